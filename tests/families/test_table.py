from pathlib import Path

import pytest

from diagd.families import table
from diagd.families.family import Checkpoint, Source
from diagd.families.presets import PRESETS
from tests.test_architecture import FAMILIES, MODULES, dotted, own_imports

MAKERS = {  # by how the names of presets begin
    **{"cosmos": "Cosmos", "wham": "WHAM", "emu3": "Emu3", "iris": "IRIS", "mc-ar": "MineWorld"},
    **{"emu3.5": "Emu3.5", "llamagen-b": "LlamaGen", "llamagen-t2i": "LlamaGen-T2I"},
}


def test_families_can_be_told_apart():
    names = [family.name for family in table.FAMILIES]
    suffixes = [family.recordings.suffix for family in table.FAMILIES if family.recordings]
    for values in (names, suffixes):
        assert len(set(values)) == len(values)
    assert all(family.licence for family in table.FAMILIES)


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("cosmos-4b", {"context_frames": 9, "num_frames": 24, "row_lag": 2, "top_p": 0.8}),
        ("cosmos-5b", {"context_frames": 9, "num_frames": 24, "row_lag": 2, "top_p": 0.7}),
        ("cosmos-12b", {"fps": 25, "row_lag": 1, "overlap": True, "top_p": 0.8}),
        ("wham-1.6b", {"fps": 10, "context_frames": 9, "keep_frames": 9, "first_id": 1}),
        ("wham-200m", {"temperature": 0.9, "top_p": None, "exclusive_top_p": True}),
        ("llamagen-b", {"context_frames": 0, "top_k": 2000, "top_p": None, "guidance": 4.0}),
        ("llamagen-t2i-512", {"context_frames": 0, "top_k": 1000, "guidance": 7.5}),
        ("emu3", {"context_frames": 0, "top_k": 2048, "guidance": 3.0, "row_ends": True}),
        ("emu3.5", {"top_k": 5120, "top_p": None, "guidance": 5.0, "row_ends": True}),
        ("iris", {"fps": 15, "context_frames": 1, "top_p": None, "keep_frames": 1}),
        ("mc-ar-300m", {"fps": 20, "context_frames": 1, "num_frames": 15, "top_p": 0.8}),
    ],
)
def test_models_are_used_as_their_makers_and_the_paper_do(preset, expected):
    name = MAKERS[max((start for start in MAKERS if preset.startswith(start)), key=len)]
    (family,) = (family for family in table.FAMILIES if family.name == name)
    found = Checkpoint(family, Path(), PRESETS[preset], {}, Source({}))
    defaults = family.defaults(found)
    assert {name: getattr(defaults, name) for name in expected} == expected


def test_only_two_tables_know_families():
    """So a new family is one file or folder and a line in each: sizes are read without PyTorch."""
    tables = ("families", "table"), ("families", "presets")
    for module, path in ((dotted(path), path) for path in MODULES):
        if module not in tables and not (module[0] == "families" and module[1] in FAMILIES):
            known = [name for name in own_imports(path) if name[0] == "families"]
            assert not FAMILIES.intersection(name[1] for name in known if name[1:]), module
    assert len(FAMILIES) == len(table.OURS) - 3  # Chameleon's holds three, LlamaGen's two
