"""Install what a release publishes as a stranger does, without a C++ compiler, and run it.

The sdist and the wheel of this platform are each installed, with their dependencies from the package
index, into a fresh environment; there `diagd` and `diagd generate` run in an empty folder, and
`diagd doctor` tells where the kernels come from: of the wheel, prebuilt ones; of the sdist, none.

    make release-check                           # builds both first
    python runs/release_check.py --dist dist     # what was built before
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

SYSTEMS = {"Linux": "manylinux", "Darwin": "macosx", "Windows": "win"}
MACHINES = {
    "x86_64": ("x86_64", "amd64"),
    "amd64": ("x86_64", "amd64"),
    "aarch64": ("aarch64", "arm64"),
    "arm64": ("aarch64", "arm64"),
}


def packages(dist: Path) -> list[Path]:
    """Return the sdist and the wheel of this platform; OSError unless there is one of each."""
    system, machines = SYSTEMS[platform.system()], MACHINES[platform.machine().lower()]
    tags = [path.stem.rpartition("-")[2] for path in dist.glob("diagd-*.whl")]
    here = [tag for tag in tags if tag.startswith(system) and tag.endswith(machines)]
    found = [*dist.glob("diagd-*.tar.gz"), *(p for tag in here for p in dist.glob(f"*{tag}.whl"))]
    if len(found) != 2 or not here:
        raise OSError(
            f"{dist}: expected one sdist and one wheel for {system} {machines[0]}, "
            f"got {[path.name for path in found]}"
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
        # no compiler: neither on the path nor named, and flags of g++'s keep any other from trying
        kept = {name: os.environ[name] for name in ("SYSTEMROOT", "TEMP") if name in os.environ}
        own = {"PATH": str(scripts), "HOME": str(root), "DIAGD_CXXFLAGS": "-O2", **kept}

        def run(*flags: str) -> str:
            # the command that the package installed; not of this checkout
            command = [str(scripts / "diagd"), *flags]
            done = subprocess.run(
                command, cwd=work, env=own, capture_output=True, text=True, encoding="utf-8"
            )
            if done.returncode:
                raise OSError(f"{' '.join(flags)}: {done.stderr.strip()[-2000:]}")
            return done.stdout

        print(run("--version"), end="")
        assert "diagd generate" in run()
        print(run("generate", "--frames", "4"), flush=True)
        assert (work / "dream.mp4").stat().st_size > 1000
        kernels = json.loads(run("doctor", "--seconds", "0", "--json"))["kernels"]
        print(f"kernels: {kernels}", flush=True)
        assert kernels["compiler"] is None
        is_wheel = package.suffix == ".whl"
        assert is_wheel == str(kernels.get("origin", "")).startswith("prebuilt for ")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dist", type=Path, required=True, help="folder of sdist and wheels")
    for package in packages(parser.parse_args().dist):
        check(package)
    print("each of them installs and runs without a compiler")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"release check: {error}")
