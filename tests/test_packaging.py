"""diagd as it is installed, on a machine without a C++ compiler."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import diagd

ROOT = Path(diagd.__file__).parent.parent
NOTE = "no C++ compiler found (set CXX, or install g++): decoding with PyTorch's kernels"


def generate_without_compiler(package, world, folder):
    """Run the command of a package there; returns what both streams show, in order."""
    environment = {"HOME": str(folder), "PATH": str(folder), "PYTHONPATH": str(package)}
    flags = ("--model", world, "--frames", "2", "--context-frames", "3")
    done = subprocess.run(
        [sys.executable, "-m", "diagd", "generate", *map(str, flags)],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert (folder / "dream.mp4").is_file()
    return done.stdout.splitlines()


def test_without_a_compiler_one_line_says_so_before_all_others(world, tmp_path):
    lines = generate_without_compiler(ROOT, world, tmp_path)
    assert lines[0].startswith(NOTE)
    assert not [line for line in lines[1:] if "compiler" in line]


@pytest.mark.slow
@pytest.mark.parametrize("built", ["wheel", "sdist"])
def test_a_built_package_runs_without_a_compiler(built, world, tmp_path):
    source = tmp_path / "source"
    kept = shutil.ignore_patterns(
        ".*", "tests", "docs", "runs", "shared", "work", "build", "*.egg-info"
    )
    shutil.copytree(ROOT, source, ignore=kept)
    build = [sys.executable, "-m", "build", f"--{built}", "--no-isolation", "-o", tmp_path, source]
    environment = os.environ | {"CXX": "", "CC": ""}
    subprocess.run(list(map(str, build)), env=environment, check=True, capture_output=True)
    (package,) = tmp_path.glob("diagd-*")
    site = tmp_path / "site"
    if built == "wheel":
        zipfile.ZipFile(package).extractall(site)
    else:
        shutil.unpack_archive(package, site)
        (site,) = site.iterdir()
    (tmp_path / "run").mkdir()
    assert generate_without_compiler(site, world, tmp_path / "run")[0].startswith(NOTE)
