"""diagd as it is installed, on a machine without a C++ compiler."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import diagd
from runs import wheels

ROOT = Path(diagd.__file__).parent.parent
NOTE = "no C++ compiler found (set CXX, or install g++): decoding with PyTorch's kernels"


WITHOUT_ZIG = {"DIAGD_CXXFLAGS": "-O2"}  # flags are g++'s, so no other compiler is tried


def generate_without_compiler(package, world, folder, python=sys.executable, **variables):
    """Run the command of a package there; returns what both streams show, in order."""
    environment = {"HOME": str(folder), "PATH": str(folder), "PYTHONPATH": str(package)}
    flags = ("--model", world, "--frames", "2", "--context-frames", "3")
    done = subprocess.run(
        [python, "-m", "diagd", "generate", *map(str, flags)],
        env=environment | variables,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert (folder / "dream.mp4").is_file()
    return done.stdout.splitlines()


def test_without_a_compiler_one_line_says_so_before_all_others(world, tmp_path):
    lines = generate_without_compiler(ROOT, world, tmp_path, **WITHOUT_ZIG)
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
    lines = generate_without_compiler(site, world, tmp_path / "run", **WITHOUT_ZIG)
    assert lines[0].startswith(NOTE)


@pytest.mark.slow
def test_a_wheel_for_this_platform_brings_kernels_that_need_no_compiler(world, tmp_path):
    """Its dependencies are those of this environment."""
    pytest.importorskip("ziglang")
    (wheel,) = wheels.main(wheels.Options((wheels.this_platform(),), out=tmp_path))
    assert "-none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as packed:
        kernels = [packed.read(name) for name in packed.namelist() if name.endswith(".so")]
    assert kernels
    assert not [content for content in kernels if str(ROOT).encode() in content]
    venv.create(tmp_path / "venv", with_pip=False)
    python = next((tmp_path / "venv").glob("[bS]*/python*"))
    (site,) = (tmp_path / "venv").glob("[lL]ib/**/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", site, wheel]
    subprocess.run([*map(str, install)], check=True, capture_output=True)
    lines = generate_without_compiler("", world, tmp_path, python)
    assert not [line for line in lines if "compiler" in line]
    done = subprocess.run(
        [python, "-m", "diagd", "doctor", "--seconds", "0", "--json"],
        env={"HOME": str(tmp_path), "PATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    facts = json.loads(done.stdout)["kernels"]
    assert facts["compiler"] is None
    assert facts["origin"].startswith("prebuilt for ")
