"""Extras by the modules they bring."""

import sys
import tomllib
from pathlib import Path

import pytest

from diagd.cli import COMMANDS
from diagd.extras import EXTRAS, missing_modules, require

MODULES = {"ray[client,serve]": "ray"}  # where a package's name is another
MODULES |= {name: name.replace("-", "_") for name in ("prometheus-client", "python-multipart")}


def test_extras_are_those_of_the_package():
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    listed = tomllib.loads(text)["project"]["optional-dependencies"]
    packages = {
        extra: tuple(wanted.partition(">=")[0] for wanted in wants)
        for extra, wants in listed.items()
        if extra not in ("test", "dev", "docs")  # of what is no command
    }
    assert {
        extra: tuple(MODULES.get(name, name) for name in names) for extra, names in packages.items()
    } == EXTRAS


def test_what_is_missing_is_named_with_the_way_to_get_it(monkeypatch):
    require("diagd play", "uvicorn", "fastapi")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert missing_modules(EXTRAS["web"]) == ["uvicorn"]
    hint = r"diagd play needs uvicorn: pip install -e '\.\[web\]' in a clone of diagd"
    with pytest.raises(ValueError, match=hint):
        require("diagd play", "fastapi", "uvicorn")


def test_what_a_command_needs_can_be_had():
    for command in COMMANDS.values():
        assert any(set(command.needs) <= set(brought) for brought in EXTRAS.values())
