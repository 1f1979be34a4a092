"""Files of anybody's making: they load, or it is one line that names the file.

Configs, safetensors headers, token shards, pickles and kernel caches.

Nothing may be allocated that the file does not hold, so each attempt is quick and small.
"""

import json
import resource
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, seed
from hypothesis import strategies as st
from safetensors.torch import save_file

from diagd.backends.native import library
from diagd.families.checkpoints import load_model, save_model
from diagd.tokenizers.shards import read_shards
from diagd.weight_files import read_torch_file, read_weights
from tests.attack.fuzzing import attack
from tests.models.tiny import tiny_fields, tiny_model

pytestmark = pytest.mark.slow

NUMBERS = st.sampled_from(
    [-(2**63), -1, 0, 1, 2, 3, 7, 64, 10**6, 2**28, 2**31, 10**9, 10**12, 2**62, 2**64, 10**400]
)
JUNK = st.one_of(
    NUMBERS,
    st.floats(),
    st.none(),
    st.booleans(),
    st.text(max_size=5),
    st.lists(NUMBERS, max_size=2),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tiny_model(), tmp_path / "model")
    return tmp_path / "model"


def attempt(path: Path) -> None:
    """Load a model: it works or is refused in a line that is not endless, quickly and small."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    try:
        load_model(path)
    except (ValueError, OSError) as error:
        complaint = str(error)
    else:
        complaint = ""
    assert len(complaint) < 3000
    assert time.monotonic() - started < 30
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2**20, f"{grown} KiB"  # a GiB: tables of 2^20 positions are no lie


@seed(15)
@attack
@given(changes=st.dictionaries(st.sampled_from([*tiny_fields(), "x"]), JUNK, max_size=3))
@example(changes={"max_positions": 10**12})
@example(changes={"grid_height": 10**6, "grid_width": 10**6})
@example(changes={"num_layers": 10**9})
@example(changes={"hidden_size": 2**62})
@example(changes={"num_heads": 2**28, "num_kv_heads": 2**28})
@example(changes={"rope_theta": 10**400})
@example(changes={"rope_theta": float("inf")})
def test_a_config_of_anything_loads_or_is_refused(folder: Path, changes: dict[str, Any]) -> None:
    fields = {**tiny_fields(), **changes}
    if fields["max_positions"] == 2**28:
        return  # may be true: whether such a table fits is up to the machine
    (folder / "config.json").write_text(json.dumps(fields))
    attempt(folder)


@seed(15)
@attack
@given(
    tensor=st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["F32", "BF16", "I64", "F4", "F8_E8M0", "BOOL", "X", 3]),
            "shape": st.lists(NUMBERS, max_size=3) | JUNK,
            "data_offsets": st.lists(NUMBERS, max_size=3) | JUNK,
        },
    ),
    length=st.none() | NUMBERS.filter(lambda n: 0 <= n < 2**64),
    body=st.binary(max_size=40),
)
@example(tensor={}, length=2**62, body=b"")
@example(
    tensor={"dtype": "F32", "shape": [2**62], "data_offsets": [0, 4]}, length=None, body=b"4444"
)
@example(
    tensor={"dtype": "F32", "shape": [2**62, 0], "data_offsets": [0, 0]}, length=None, body=b""
)
def test_a_safetensors_header_of_anything_is_read_or_refused(
    folder: Path, tensor: dict[str, Any], length: int | None, body: bytes
) -> None:
    text = json.dumps({"model.norm.weight": tensor}).encode()
    size = struct.pack("<Q", len(text) if length is None else length)
    path = folder / "model.safetensors"
    path.write_bytes(size + text + body)
    try:
        held = sum(weight.nbytes for weight in read_weights(path).values())
    except ValueError:
        held = 0
    assert held <= len(body)
    attempt(folder)


@pytest.mark.parametrize("part", range(4))
def test_damaged_kernels_are_never_loaded(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = library.find_or_make()
    content = own.read_bytes()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    damaged = tmp_path / "diagd" / own.name
    damaged.parent.mkdir()
    generator = torch.Generator().manual_seed(part)
    for _ in range(250):
        place, value = (
            int(torch.randint(n, (1,), generator=generator)) for n in (len(content), 256)
        )
        flipped = content[:place] + bytes([value]) + content[place + 1 :]
        for now in (flipped, content[:place], content + bytes([value])):
            damaged.write_bytes(now)
            assert (library.find_kept() is None) == (now != content)


def fields_of_shards() -> st.SearchStrategy[dict[str, str]]:
    lies = JUNK.map(lambda value: json.dumps(value, default=str)) | st.text(max_size=9)
    return st.dictionaries(
        st.sampled_from(["codebook_size", "action_names", "clips", "codebook"]), lies, max_size=2
    )


@seed(15)
@attack
@given(
    metadata=fields_of_shards(),
    shape=st.lists(st.sampled_from([0, 1, 2, 3]), min_size=3, max_size=5),
    action=st.sampled_from([-(2**15), -1, 0, 1, 2**15 - 1]),
)
@example(metadata={"action_names": "[" * 10**5}, shape=[1, 2, 3, 3], action=0)
@example(metadata={"action_names": '"none"'}, shape=[1, 2, 3, 3], action=0)
@example(metadata={"action_names": "[1, [2]]"}, shape=[1, 2, 3, 3], action=0)
@example(metadata={"codebook_size": "9" * 5000}, shape=[1, 2, 3, 3], action=0)
def test_a_shard_of_anything_is_read_or_refused(
    tmp_path: Path, metadata: dict[str, str], shape: list[int], action: int
) -> None:
    good = {"clips": '["a"]', "codebook_size": "20", "action_names": '["none", "left"]'}
    tensors = {
        "tokens": torch.ones(shape, dtype=torch.int16),
        "actions": torch.full(shape[:2], action, dtype=torch.int16),
    }
    save_file(tensors, tmp_path / "shard_00000.safetensors", good | metadata)
    clips, complaint = None, ""
    try:
        clips = read_shards(tmp_path)
    except ValueError as error:
        complaint = str(error)
    if clips is None:
        assert "shard_00000.safetensors" in complaint
        assert len(complaint) < 3000
    else:
        assert all(isinstance(name, str) for name in clips.action_names)
        assert 0 <= action < len(clips.action_names)


OPCODES = [bytes([opcode]) for opcode in range(256)]
PIECES = st.sampled_from(
    [
        *OPCODES,
        b"cos\nsystem\n",
        b"cbuiltins\neval\n",
        b"ccollections\nOrderedDict\n",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch\nFloatStorage\n",
        b"U\x07storage",
        b"K\x00",
        b"J\xff\xff\xff\x7f",
        b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
        b"X\xff\xff\xff\x7f",
        b"h\x00q\x00",
        b"((lp0\n",
        b"}",
        b")R",
        b"\x85R",
    ]
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pickles") / "whole.pt"
    torch.save({"w": torch.arange(6.0).view(2, 3), "b": torch.zeros(3)}, path)
    return path


def read_all(path: Path) -> None:
    complaint = path.name
    try:
        read_torch_file(path)
    except ValueError as error:
        complaint = str(error)
    assert path.name in complaint


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@seed(15)
@attack
@given(pieces=st.lists(PIECES, max_size=12), whole=st.booleans(), place=st.integers(0, 10**4))
def test_a_pickle_of_anything_is_read_or_refused(
    archive: Path, tmp_path: Path, pieces: list[bytes], whole: bool, place: int
) -> None:
    """Made of nothing but the pieces, or of a good one with the pieces inside."""
    path, content = tmp_path / "pickle.pt", b"".join(pieces)
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("data.pkl"):
                cut = place % len(data)
                data = content + b"." if whole else data[:cut] + content + data[cut:]
            target.writestr(name, data)
    read_all(path)
