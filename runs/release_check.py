"""Install what a release publishes as a stranger does, without a C++ compiler, and run it.

The sdist and this platform's wheel are each installed, with their dependencies from the package
index, into a fresh environment; there `diagd` and `diagd generate` run in an empty folder, and
`diagd doctor` tells where the kernels come from: prebuilt ones of the wheel, none of the sdist.
Needs nothing but Python.

    make release-check                           # builds both first
    python runs/release_check.py --dist dist     # what was built before
"""

import argparse
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory


def packages(dist: Path, folder: Path) -> list[Path]:
    """Return the sdist, and the wheel that pip chooses for this platform, as a copy in a folder."""
    flags = ("--no-index", "--no-deps", "--only-binary", ":all:", "--find-links", dist, "diagd")
    command = [sys.executable, "-m", "pip", "download", "-q", "-d", folder, *flags]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    found = [*dist.glob("diagd-*.tar.gz"), *folder.glob("diagd-*.whl")]
    if done.returncode or len(found) != 2:
        there = ", ".join(sorted(path.name for path in dist.glob("*")))
        raise OSError(
            f"{dist}: expected an sdist and a wheel that fits here, got {there or 'none'}"
        )
    return found


def check(package: Path) -> None:
    """Install a package into a fresh environment and run its first commands in an empty folder."""
    print(f"== {package.name}", flush=True)
    with TemporaryDirectory() as scratch:
        root = Path(scratch)
        venv.create(root / "venv", with_pip=True)
        scripts = root / "venv" / ("Scripts" if os.name == "nt" else "bin")
        python = next(scripts.glob("python*"))
        subprocess.run([python, "-m", "pip", "install", "-q", package.resolve()], check=True)
        work = root / "work"
        work.mkdir()
        # no compiler on the path
        kept = {name: os.environ[name] for name in ("SYSTEMROOT", "TEMP") if name in os.environ}
        own = {"PATH": str(scripts), "HOME": str(root), **kept}

        def run(*flags: str) -> str:
            done = subprocess.run(
                [str(scripts / "diagd"), *flags],
                cwd=work,
                env=own,
                capture_output=True,
                text=True,
                encoding="utf-8",
            )
            if done.returncode:
                raise OSError(f"diagd {' '.join(flags)}: {done.stderr.strip()[-2000:]}")
            return done.stdout

        print(run("--version"), end="")
        if "diagd generate" not in run():
            raise OSError("diagd without arguments shows no tour")
        print(run("generate", "--frames", "4"), flush=True)
        if not (work / "dream.mp4").is_file():
            raise OSError("diagd generate wrote no dream.mp4")
        kernels = json.loads(run("doctor", "--seconds", "0", "--json"))["kernels"]
        print(f"kernels: {kernels['origin']}; compiler: {kernels['compiler']}", flush=True)
        is_prebuilt = str(kernels["origin"]).startswith("prebuilt for ")
        if kernels["compiler"] or is_prebuilt != (package.suffix == ".whl"):
            raise OSError(f"{package.name}: these are not the kernels expected of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dist", type=Path, required=True, help="folder of sdist and wheels")
    with TemporaryDirectory() as folder:
        for package in packages(parser.parse_args().dist, Path(folder)):
            check(package)
    print("sdist and wheel install, and run without a compiler")


if __name__ == "__main__":
    try:
        main()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"release check: {error}")
