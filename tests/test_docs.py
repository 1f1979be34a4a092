"""What the documentation points to is there, and the README's tree is complete."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("diagd/assets/*/README.md")),
]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
PATH = re.compile(r"`((?:diagd|docs|runs|tests)/[\w./*-]+)`")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """Name the headings of a page as GitHub does."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_relative_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


@every_page
def test_paths_in_the_text_exist(page):
    missing = [path for path in PATH.findall(page.read_text()) if not any(ROOT.glob(path))]
    assert not missing


def test_the_tree_of_the_readme_names_every_folder_and_every_module_of_the_top():
    package = ROOT / "diagd"
    tree = re.search(r"^```\ndiagd/$.*?^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert tree
    named = set(re.findall(r"[\w.]+/|\w+\.py", tree[0]))
    folders = {f"{path.parent.name}/" for path in package.rglob("__init__.py")}
    modules = {path.name for path in package.glob("[!_]*.py")}
    assert not (folders | modules) - named
    gone = {name for name in named if not any(ROOT.rglob(name.rstrip("/")))}
    assert not gone
