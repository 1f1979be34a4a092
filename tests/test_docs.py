"""What the documentation points to is there, and what is made by scripts is as they make it."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from runs import report, site

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("d[eo]*/**/*.md")),  # dev and docs
    *sorted(ROOT.glob("diagd/assets/*/README.md")),
    *sorted(ROOT.glob("integrations/*/README.md")),
]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
PATH = re.compile(r"`((?:dev|diagd|docs|integrations|runs|tests)/[\w./*-]+)`")
FOLDERS = ("dev", "diagd", "docs", "integrations", "runs", "tests")
# a file named in a comment, by its last folders or by all
FILE = re.compile(r"(?<![\w./*-])[\w./-]*\w\.(?:cpp|h|js|md|py|sh|wgsl|yaml)\b(?![\w(/])")
SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".cpp", ".h", ".js", ".py", ".wgsl")
]

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


def comments(path: Path) -> list[str]:
    """Return what is no code: comments, and docstrings of Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return re.findall(r"/\*[\s\S]*?\*/|//.*", text)
    found = re.finditer(r'(^\s*)?("""[\s\S]*?"""|#.*)', text, flags=re.MULTILINE)
    return [m[2] for m in found if m[1] is not None or m[2][0] == "#"]


def test_files_named_in_comments_exist():
    files = [*ROOT.glob("*"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*"))]
    endings = {path.parts[n:] for path in files for n in range(len(ROOT.parts), len(path.parts))}
    missing = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in SOURCES
        for comment in comments(path)
        for name in FILE.findall(comment)
        if Path(name.lstrip("./")).parts not in endings
    ]
    assert not missing


def test_the_tree_names_every_folder_and_every_module_of_the_top():
    package, text = ROOT / "diagd", (ROOT / "docs/architecture.md").read_text()
    tree = re.search(r"^```\ndiagd/$.*?^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert tree
    named = set(re.findall(r"[\w.]+/|\w+\.py", tree[0]))
    folders = {f"{path.parent.name}/" for path in package.rglob("__init__.py")}
    modules = {path.name for path in package.glob("[!_]*.py")}
    assert not (folders | modules) - named
    gone = {name for name in named if not any(ROOT.rglob(name.rstrip("/")))}
    assert not gone


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 130


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/tutorials/*.ipynb")), ids=lambda p: p.stem)
def test_a_tutorial_is_kept_with_what_it_printed(path):
    text = path.read_text(encoding="utf-8")
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs
    assert not [
        out for out in outputs if out["output_type"] == "error" or out.get("name") == "stderr"
    ]
    assert str(Path.home()) + "/" not in text
    assert "/tmp/" not in text


def test_the_tables_of_the_report_are_those_of_the_results():
    page = (ROOT / "docs/report/index.md").read_text(encoding="utf-8")
    assert report.filled(page) == page
    assert set(re.findall(r"\]\((\w+)\.svg\)", page)) == set(report.FIGURES)


@pytest.mark.slow
def test_the_figures_of_the_report_are_the_same_bytes_each_time(tmp_path):
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        report.draw(folder)
    for name in report.FIGURES:
        one, other = (tmp_path / folder / f"{name}.svg" for folder in ("one", "other"))
        assert one.read_bytes() == other.read_bytes()
        assert (ROOT / f"docs/report/{name}.svg").is_file()


def test_the_pages_of_the_site_are_whole(tmp_path):
    folder = tmp_path / "docs"
    site.prepare(folder)
    index = (folder / "index.md").read_text(encoding="utf-8")
    assert "(tutorials/your-own-model.md)" in index
    assert "data-world" in index  # not the README, to which RELEASING.md links
    assert (folder / "source/CONTRIBUTING.md").is_file()
    assert not list(folder.rglob("LOG.md"))  # it is for developers
    assert (folder / "source/diagd/assets/maze/README.md").read_text().startswith("\n# maze")
    assert "````python\n" in (folder / "source/runs/report.py.md").read_text(encoding="utf-8")
    assert "- [exact.json](exact.json)" in (folder / "results/exact/listing.md").read_text()
    moving = (folder / "tutorials/diagonal-decoding.md").read_text(encoding="utf-8")
    assert "![output of the cell above](diagonal-decoding_1.gif)" in moving
    assert (folder / "tutorials/diagonal-decoding_1.gif").read_bytes().startswith(b"GIF8")


def test_a_link_that_leads_nowhere_ends_the_making_of_the_site():
    with pytest.raises(FileNotFoundError, match=r"docs/use.md links to docs/gone.md"):
        list(site.linked("See [this](gone.md).", "docs/use.md"))
    assert list(site.linked("```\nx[0](gone)\n```\n[a](exact.md#x)", "docs/use.md")) == [
        "docs/exact.md"
    ]


class Addresses(HTMLParser):
    """What a page loads when it is opened."""

    def __init__(self):
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag, attrs):
        names = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video"):
            self.loaded.append(names.get("src") or "")
        if tag == "link" and names.get("rel") == "stylesheet":
            self.loaded.append(names.get("href") or "")


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere():
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    command = [sys.executable, "runs/site.py", "--no-world", "--no-pdf"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # --strict: a broken link or anchor is an error
    pages = sorted((ROOT / "build/site").rglob("index.html"))
    assert len(pages) > 30
    for page in pages:
        parser = Addresses()
        parser.feed(page.read_text(encoding="utf-8"))
        assert not [url for url in parser.loaded if url.startswith(("http", "//"))], page
    assert "generate_tokens" in (ROOT / "build/site/reference/index.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/tutorials/*.ipynb")), ids=lambda p: p.stem)
def test_a_tutorial_runs_and_shows_the_same_kinds_of_things(path):
    pytest.importorskip("nbclient", reason="pip install -e '.[docs]'")
    from runs.notebooks import execute

    def kinds(notebook):
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        return [[sorted(out.get("data", {"text": 0})) for out in cell["outputs"]] for cell in code]

    assert kinds(execute(path)) == kinds(json.loads(path.read_text(encoding="utf-8")))
