"""Build the site in build/site: `make docs`, or `python runs/site.py [--no-world] [--no-pdf]`.

Pages in docs/ are written for a reader of the repository: they link to notebooks, to folders and to
files outside docs/. build/docs gets a copy in which each of those is a page too, so the site is
complete without the repository and without a network, and any generator that reads mkdocs.yml can
build it.
"""

import argparse
import base64
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
# pages of the menu outside docs/, and one to which the report leads in HTML
ALSO = (
    "CONTRIBUTING.md",
    "RELEASING.md",
    "LEADERBOARD.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "runs/report.py",
)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(#[^)\s]+)?\)")
CODE = re.compile(r"(^ *(`{3,}).*?^ *\2$)", flags=re.MULTILINE | re.DOTALL)
IMAGES = {"image/png": "png", "image/gif": "gif", "image/svg+xml": "svg"}
LANGUAGES = {".py": "python", ".sh": "bash", ".json": "json", ".cpp": "cpp", ".h": "cpp"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-world", action="store_true", help="without the world in the browser")
    parser.add_argument("--no-pdf", action="store_true", help="without the report as a PDF")
    options = parser.parse_args()
    prepare(ROOT / "build/docs")
    copy_package(ROOT / "build/api/diagd")
    settings = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    run("mkdocs", "build", "--strict", env=settings)
    if not options.no_world:
        run("diagd", "export-web", "build/site/world")
    if not options.no_pdf:
        print_report(ROOT / "build/site")
    print("build/site is complete: python -m http.server -d build/site")


def run(module: str, *arguments: str, **settings: Any) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=True, **settings)


def copy_package(copy: Path) -> None:
    """Copy the package for mkdocstrings, which reads only folders that have an `__init__.py`."""
    shutil.rmtree(copy, ignore_errors=True)
    for path in (ROOT / "diagd").rglob("*.py"):
        place = copy / path.relative_to(ROOT / "diagd")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
        (place.parent / "__init__.py").touch()


def prepare(folder: Path) -> None:
    """Write the pages of the site, and the files that they show, to a folder.

    Raises:
        FileNotFoundError: a link leads nowhere.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.md"))
    docs = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*")]
    waiting = [path for path in docs if path.endswith((".md", ".ipynb"))] + [*ALSO]
    done = {"README.md"}  # links to it lead to docs/index.md
    while waiting:
        source = waiting.pop()
        if source in done:
            continue
        done.add(source)
        text, pictures = page_of(ROOT / source)
        page = folder / place_of(source)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(relinked(text, source), encoding="utf-8")
        for name, picture in pictures.items():
            (page.parent / name).write_bytes(picture)
        waiting += [target for target in linked(text, source, pictures) if is_page(target)]


def linked(text: str, source: str, pictures: Container[str] = ()) -> Iterator[str]:
    """List what a page links to but its own pictures, as paths from the root of the repository."""
    for target, _ in LINK.findall(CODE.sub("", text)):
        if target in pictures:
            continue
        path = resolve(source, target)
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{source} links to {path}, which is not there")
        yield path


def relinked(text: str, source: str) -> str:
    """Lead each link of a page to where the site has what it points to."""
    here = posixpath.dirname(place_of(source)) or "."

    def lead(match: re.Match[str]) -> str:
        target = resolve(source, match[1])
        return f"]({posixpath.relpath(place_of(target), here)}{match[2] or ''})"

    parts = CODE.split(text)  # what is between code, code, its fence
    parts[::3] = [LINK.sub(lead, part) for part in parts[::3]]
    return "".join(part for n, part in enumerate(parts) if n % 3 < 2)


def resolve(source: str, target: str) -> str:
    folder = source if (ROOT / source).is_dir() else posixpath.dirname(source)
    return posixpath.normpath(posixpath.join(folder, target))


def is_page(target: str) -> bool:
    """Return whether a page shows the file; all else in docs/ is copied as it is."""
    path = ROOT / target
    is_copied = target.startswith("docs/") and path.suffix not in (".md", ".ipynb")
    return path.exists() and (path.is_dir() or not is_copied)


def place_of(target: str) -> str:
    """Return the path below docs/ of the site of a file of the repository."""
    if target == "README.md":
        return "index.md"
    place = target.removeprefix("docs/") if target.startswith("docs/") else f"source/{target}"
    if (ROOT / target).is_dir():
        return f"{place}/listing.md"
    return f"{place.removesuffix('.md').removesuffix('.ipynb')}.md" if is_page(target) else place


def page_of(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a file or folder as Markdown, and the pictures of a notebook by their names."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir() if p.is_file() and p.name[0] != ".")
        return f"# {name}\n\n" + "".join(f"- [{n}]({n})\n" for n in names), {}
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return page_of_notebook(json.loads(text), path)
    if path.suffix == ".md":  # without the settings of a model card
        is_card = path.is_relative_to(ROOT / "diagd")
        return re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL) if is_card else text, {}
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n````\n", {}


def page_of_notebook(notebook: dict[str, Any], path: Path) -> tuple[str, dict[str, bytes]]:
    blocks: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            blocks.append(source)
            continue
        blocks.append(f"````python\n{source}\n````")
        for output in cell["outputs"]:
            data = output.get("data", {})
            kind = next((kind for kind in IMAGES if kind in data), None)
            if kind:
                name = f"{path.stem}_{len(pictures) + 1}.{IMAGES[kind]}"
                content = "".join(data[kind])
                is_text = kind == "image/svg+xml"
                pictures[name] = content.encode() if is_text else base64.b64decode(content)
                blocks.append(f"![output of the cell above]({name})")
            elif "text/html" in data:
                blocks.append("".join(data["text/html"]))
            else:
                told = "".join(output.get("text") or data["text/plain"]).rstrip()
                blocks.append(f"````text\n{told}\n````")
    title, *rest = "\n\n".join(blocks).split("\n", 1)
    note = f'<a href="../{path.name}" download>This page as a notebook</a>'
    return "\n".join([title, "", note, *rest]) + "\n", pictures


def print_report(site: Path) -> None:
    """Print the page of the report to report/diagd.pdf."""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if not chromium:
        print("note: no report/diagd.pdf, which Chromium prints: it is not installed")
        return
    foot = '<p style="width: 100%; font-size: 8px; text-align: center" class="pageNumber"></p>'
    margins = {"top": "18mm", "bottom": "18mm", "left": "16mm", "right": "16mm"}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(color_scheme="light")
        page.goto((site / "report/index.html").as_uri())
        page.pdf(
            path=site / "report/diagd.pdf",
            format="A4",
            display_header_footer=True,
            header_template="<p></p>",
            footer_template=foot,
            margin=margins,
        )
        browser.close()


if __name__ == "__main__":
    main()
