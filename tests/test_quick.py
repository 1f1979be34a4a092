import os
import re
import shutil
import subprocess
import sys

import pytest

from tests import quick

TESTS = """
import time
def test_sleepy(): time.sleep(0.4)
def test_brisk(): pass
def test_brisk_too(): pass
"""


@pytest.fixture
def run(tmp_path):
    """Run pytest on three tests in a folder of their own; returns the names of those that ran."""
    shutil.copy(quick.__file__, tmp_path / "conftest.py")
    (tmp_path / "test_three.py").write_text(TESTS)

    def names(*flags):
        command = [sys.executable, "-m", "pytest", "-v", "--rootdir", str(tmp_path), *flags]
        bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they are slow to import
        done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True)
        assert not done.returncode, done.stdout
        return re.findall(r"::test_(\w+) PASSED", done.stdout)

    return names


def test_what_took_long_is_left_out_and_what_is_new_counts_as_average(run, tmp_path):
    assert len(run("--quick", "0.25")) == 2  # nothing is known yet: two of 0.1 s fit
    assert run() == ["sleepy", "brisk", "brisk_too"]
    with (tmp_path / "test_three.py").open("a") as file:
        file.write("def test_new(): pass\n")
    assert run("--quick", "0.3") == ["brisk", "brisk_too", "new"]
