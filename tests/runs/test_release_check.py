"""runs/release_check.py: the install lines that it tries, and what a maintainer has to fill in."""

import tomllib

from runs import release_check
from runs.release_check import NEEDS, ROOT, commands, install_lines, missing_addresses


def test_every_extra_has_a_command_that_needs_it_and_every_install_line_is_found():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert {*NEEDS} == {"", *tomllib.loads(text)["project"]["optional-dependencies"]}
    lines = install_lines()
    assert {"-e .", "-e '.[docs]'", "-e '.[web]'"} < {*lines}
    assert "-e '.[gym,train,web]' 'gymnasium[box2d]>=1.3'" in lines
    assert commands("-e '.[doom,train]'") == [NEEDS["doom"], NEEDS["train"]]
    assert commands("-e .") == [NEEDS[""]]


def test_an_address_that_is_missing_is_named_with_its_page(monkeypatch):
    pages = {
        ROOT / "README.md": "git clone <repository-url> diagd; open `<play-url>`",
        ROOT / "RELEASING.md": "fill in <repository-url> and <play-url>",
        ROOT / "docs" / "gym.md": "nothing",
    }
    monkeypatch.setattr(release_check, "pages", lambda: pages)
    assert missing_addresses() == ["README.md: <repository-url>", "README.md: <play-url>"]
