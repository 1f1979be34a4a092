"""Install what a release publishes as a stranger does, without a C++ compiler, and run it.

The sdist and this platform's wheel are each installed, with their dependencies from the package
index, into a fresh environment; there `diagd` and `diagd generate` run in an empty folder, and
`diagd doctor` tells where the kernels come from: prebuilt ones of the wheel, none of the sdist.
Needs nothing but Python. With `--install-lines`, every line by which the documentation installs a
clone is tried as well, each in a fresh environment with a command that needs it, and the addresses
that a maintainer fills in must be there.

    make release-check                           # builds both first
    python runs/release_check.py --dist dist     # what was built before
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
INSTALL = re.compile(r"pip install (-e (?:\.(?!\w)|'\.\[[\w,]+\]')(?: '[^']+')*)")
ADDRESSES = "<repository-url>", "<play-url>"
# By an extra, or none: what cannot run without it. Run in the clone, with {scratch} for its files.
NEEDS = {
    "": "diagd generate --frames 4 --out {scratch}/dream.mp4",
    "doom": "diagd record --help",
    "train": "diagd train --help",
    "lora": "python -c 'import peft'",
    "robots": "python -c 'import pyarrow'",
    "metrics": "diagd evaluate --help",
    "gym": "python -c 'import diagd; diagd.GymEnv(\"maze\").reset()'",
    "web": "diagd export-web {scratch}/page",
    "webgpu": "python -c 'import wgpu'",
    "scale": "python -c 'import ray'",
    "docs": "python runs/site.py",
    "test": "pytest -q tests/test_docs.py",
    "dev": "ruff check .",
}


@contextmanager
def fresh_environment() -> Iterator[tuple[Path, Path]]:
    """Yield an empty folder, but for a virtual environment, and the folder of its programs."""
    with TemporaryDirectory() as scratch:
        root = Path(scratch)
        venv.create(root / "venv", with_pip=True)
        yield root, root / "venv" / ("Scripts" if os.name == "nt" else "bin")


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
    with fresh_environment() as (root, scripts):
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


def pages() -> dict[Path, str]:
    """Return the text of each page that a user or a contributor reads."""
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    return {path: path.read_text(encoding="utf-8") for path in sorted(paths)}


def install_lines() -> list[str]:
    """Return the arguments by which the documentation lets pip install a clone, each once."""
    found = (line for text in pages().values() for line in INSTALL.findall(text))
    return list(dict.fromkeys(found))


def commands(line: str) -> list[str]:
    """Return what must run after an install line."""
    extras = re.search(r"\[([\w,]+)\]", line)
    return [NEEDS[extra] for extra in (extras[1].split(",") if extras else [""])]


def check_line(line: str) -> None:
    """Install a clone in a fresh environment as documented, and run what needs that."""
    print(f"== pip install {line}", flush=True)
    with fresh_environment() as (root, scripts):
        path = f"{scripts}{os.pathsep}{os.environ['PATH']}"
        own = {**os.environ, "PATH": path, "PYTHONPATH": ""}
        for command in (f"pip install -q {line}", "pip check", *commands(line)):
            name, *words = shlex.split(command.format(scratch=root.as_posix()))
            subprocess.run([str(scripts / name), *words], cwd=ROOT, env=own, check=True)


def missing_addresses() -> list[str]:
    """Name the pages, and the addresses that a maintainer has yet to fill in there."""
    return [
        f"{path.relative_to(ROOT)}: {address}"
        for path, text in pages().items()
        for address in ADDRESSES
        if address in text and path.name != "RELEASING.md"  # which says so
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--dist", type=Path, required=True, help="folder of sdist and wheels")
    parser.add_argument("--install-lines", action="store_true", help="those of the documentation")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        for package in packages(options.dist, Path(folder)):
            check(package)
    print("sdist and wheel install, and run without a compiler")
    if options.install_lines:
        for line in install_lines():
            check_line(line)
        if missing := missing_addresses():
            raise OSError(f"addresses to fill in (RELEASING.md): {', '.join(missing)}")


if __name__ == "__main__":
    try:
        main()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"release check: {error}")
