"""A family of an installed package: found by its entry point, and like ours in all."""

import json
import subprocess
import sys

import pytest
import torch

from diagd.families import table

RECORD = """
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Family
from diagd.models.config import ModelConfig


def convert(source):
    weights = {name.removeprefix("rink."): one for name, one in source.tensors.items()}
    return ModelConfig(**source.side["rink"]), weights


RINK = Family(
    name="Rink",
    defaults=lambda found: GenerationDefaults(context_frames=1, num_frames=2),
    licence="MIT",
    files=("rink.pt",),
    config_fields=frozenset({"rink"}),
    signature=("rink.model.norm.weight",),
    convert=convert,
)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a package where an installer would."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def put(name, target, code=RECORD):
        (tmp_path / f"{name}.py").write_text(code)
        about = tmp_path / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[diagd.families]\n{name} = {target}\n")
        return tmp_path

    return put


def test_its_checkpoints_load(install):
    from tests.models.tiny import tiny_fields, tiny_model

    folder, model = install("diagd_rink", "diagd_rink:RINK"), tiny_model()
    theirs = {f"rink.{name}": weight for name, weight in model.state_dict().items()}
    torch.save(theirs, folder / "rink.pt")
    (folder / "config.json").write_text(json.dumps({"rink": tiny_fields()}))
    script = (
        "import diagd, torch, sys; from diagd.families.checkpoints import find_model;"
        "print(find_model(sys.argv[1]).family.name);"
        "print(diagd.load_model(sys.argv[1]).logits(torch.arange(9)[None]).argmax(-1).tolist())"
    )
    command = [sys.executable, "-c", script, str(folder / "rink.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    expected = model.logits(torch.arange(9)[None]).argmax(-1).tolist()
    assert (done.stdout, done.stderr) == (f"Rink\n{expected}\n", "")


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("rink_a:RINK", "import no_such_module", "No module named 'no_such_module'"),
        ("rink_b:RINK", "RINK = 3", "expected a Family, got int"),
        ("rink_c:SHOE", RECORD, "has no attribute 'SHOE'"),
        ("rink_d:RINK", RECORD.replace("Rink", "WHAM"), "a family named WHAM already"),
    ],
)
def test_a_package_that_brings_none_is_named(install, target, code, message):
    name = target.partition(":")[0]
    install(name, target, code)
    where = rf"family {name} \({target}\) of an installed package: .*{message}"
    with pytest.raises(ValueError, match=where):
        table.with_installed(table.OURS)
