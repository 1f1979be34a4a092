"""Worlds as static files: the kernels in them against Python, frame by frame; what is refused."""

import ctypes
import dataclasses
import json
import math
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vq_model import VQModel

from diagd.backends.native.wasm import World
from diagd.data.actions import ActionVocabulary
from diagd.decoding.strategies.table import parse_strategy
from diagd.families.checkpoints import save_model
from diagd.pipeline.generator import VideoGenerator
from diagd.tokenizers.vq import VQTokenizer
from diagd.web.play.export import KERNELS, export, pack
from diagd.web.play.options import ExportWebOptions
from diagd.web.play.session import Controls, Session, SessionStart
from diagd.web.play.welcome import start_scenes
from runs import web_kernels
from tests.worlds import (
    HEIGHT,
    NAMES,
    NUM_CODES,
    WIDTH,
    model_config,
    random_model,
    tokenizer,
    write_scenes,
    write_world,
)

wasmtime = pytest.importorskip("wasmtime", reason="pip install -e '.[test]'")
NONE, DAMAGED, OTHER_VERSION, OUT_OF_RANGE = range(4)


class Kernels:
    """The kernels for browsers, one thread, in a runtime of their own; a world may be open."""

    def __init__(self, name: str) -> None:
        config = wasmtime.Config()
        config.wasm_relaxed_simd = True
        engine = wasmtime.Engine(config)
        module = wasmtime.Module.from_file(engine, str(KERNELS / name))
        self.store, linker = wasmtime.Store(engine), wasmtime.Linker(engine)
        for one in module.imports:
            values = [wasmtime.ValType.f64()] if one.name == "now" else one.type.results
            kind = wasmtime.FuncType(one.type.params, values)
            linker.define_func(
                one.module, one.name, kind, lambda *_, zero=0.0 if one.name == "now" else 0: zero
            )
        self.exports = linker.instantiate(self.store, module).exports(self.store)
        self("_initialize")

    def __call__(self, name: str, *arguments: float) -> int:
        return self.exports[name](self.store, *arguments)

    def open(self, content: bytes) -> int:
        at = self("allocate", max(1, len(content)))
        self.exports["memory"].write(self.store, content, at)
        return self("open_world", at, len(content))

    def read(self, at: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        content = self.exports["memory"].read(self.store, at, at + size)
        return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


@pytest.fixture(scope="module", params=["kernels.wasm", "kernels-relaxed.wasm"])
def kernels(request):
    return Kernels(request.param)


@pytest.fixture(scope="module")
def packed(world, tmp_path_factory):
    """Return the files of the tiny world, by name."""
    return pack(ExportWebOptions(tmp_path_factory.mktemp("site"), str(world)))


def test_the_kernels_are_those_of_the_sources():
    said = (KERNELS / "SOURCES").read_text().strip()
    assert said == web_kernels.digest(), "the C++ has changed: python runs/web_kernels.py"


def test_both_sides_see_a_world_alike(kernels):
    assert kernels("size_of_world") == ctypes.sizeof(World)


# five frames of context, far beyond a full one; and a picture
@pytest.mark.parametrize(
    ("scene", "temperature", "beyond"), [(0, 1.0, 34), (0, 0.0, 6), (2, 1.0, 6)]
)
def test_frames_are_those_of_python(kernels, packed, world, scene, temperature, beyond):
    generator = VideoGenerator.from_pretrained(world, dtype="int8")
    start = start_scenes(world, None, generator, generator.defaults.context_frames)[scene]
    session = Session(generator, SessionStart(start.frames, start.actions, 2**31 + 5))
    manifest = json.loads(packed["world/world.json"])
    names, top_p = [name for name, _ in manifest["strategies"]], 0.9 if temperature else 1.0
    assert kernels.open(packed["world/world.bin"]) == NONE
    assert kernels("begin", scene, 2**31 + 5 - 2**32) == NONE  # wasm's integers have a sign
    for frame in range(generator.config.frames_held + beyond):
        action, which = frame * 7 % len(manifest["actions"]), frame * 5 % len(names)
        controls = Controls(parse_strategy(names[which]), temperature, top_p)
        expected = session.advance(manifest["actions"][action], controls)
        assert kernels("advance", action, which, temperature, top_p) == NONE
        found = kernels.read(kernels("newest_tokens"), torch.int32, *expected.shape[1:])
        assert torch.equal(found, expected[0].int()), frame
        assert manifest["written_at"][which] == list(session.written_at)
        assert kernels("held_frames") == session.engine.stream.num_held
        assert kernels("window_frames") == session.engine.stream.window
        pixels = kernels.read(kernels("paint"), torch.uint8, *generator.frame_size_px, 4)
        painted = generator.tokenizer.decode(expected)[0]
        assert (pixels[..., :3].int() - painted.int()).abs().max() <= 1
        assert (pixels[..., 3] == 255).all()


def test_a_painter_of_two_sizes_paints_as_diffusers_does(kernels, tmp_path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = VQModel(
            in_channels=12,
            out_channels=12,
            block_out_channels=(8, 24),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            vq_embed_dim=4,
            num_vq_embeddings=NUM_CODES,
            norm_num_groups=4,
            mid_block_add_attention=False,
        )
        model.quantize.embedding.weight.data.normal_()
    save_model(random_model(model_config()), tmp_path)
    VQTokenizer(model).save_pretrained(tmp_path / "tokenizer")
    ActionVocabulary(NAMES).save(tmp_path / "actions.json")
    write_scenes(tmp_path)
    assert kernels.open(pack(ExportWebOptions(tmp_path, str(tmp_path)))["world/world.bin"]) == NONE
    assert kernels("begin", 0, 1) == kernels("advance", 1, 0, 1.0, 1.0) == NONE
    tokens = kernels.read(kernels("newest_tokens"), torch.int32, 1, HEIGHT, WIDTH)
    expected = VQTokenizer.from_pretrained(tmp_path / "tokenizer").decode(tokens)[0]
    assert len(tokens.unique()) > 3
    assert expected.shape == (HEIGHT * 4, WIDTH * 4, 3)
    pixels = kernels.read(kernels("paint"), torch.uint8, HEIGHT * 4, WIDTH * 4, 4)[..., :3]
    assert (pixels.int() - expected.int()).abs().max() <= 1


def test_a_foreign_or_damaged_file_is_refused(kernels, packed):
    whole = packed["world/world.bin"]
    assert kernels.open(whole) == NONE
    for content in (
        b"",
        b"GIF89a",
        whole[:100],
        whole[:-4],
        whole[: len(whole) // 2],
        whole + b"0",
    ):
        assert kernels.open(content) == DAMAGED
    for place in (20, 300, 5000, len(whole) - 3):  # of the records, weights and pointers
        broken = bytearray(whole)
        broken[place] ^= 4
        assert kernels.open(bytes(broken)) == DAMAGED, place
    newer = bytearray(whole)
    newer[4:8] = struct.pack("<I", 99)
    assert kernels.open(bytes(newer)) == OTHER_VERSION
    wild = bytearray(whole)  # a pointer outside, under a checksum that is right
    wild[-4:] = struct.pack("<I", 2**31)
    wild[12:16] = bytes(4)
    wild[12:16] = struct.pack("<I", zlib.crc32(wild))
    assert kernels.open(bytes(wild)) == DAMAGED


def test_what_a_world_does_not_have_is_refused(kernels, packed):
    assert kernels.open(packed["world/world.bin"]) == NONE
    assert kernels("begin", 99, 0) == kernels("begin", -1, 0) == OUT_OF_RANGE
    assert kernels("begin", 0, 0) == NONE
    for action, strategy in ((-1, 0), (99, 0), (0, -1), (0, 99)):
        assert kernels("advance", action, strategy, 1.0, 1.0) == OUT_OF_RANGE


def test_export_writes_a_page_that_names_its_files(world, tmp_path, capsys):
    out = tmp_path / "site"
    written = export(ExportWebOptions(out, str(world)))
    assert {str(path.relative_to(out)) for path in out.rglob("*.*")} == set(written["files"])
    page = (out / "index.html").read_text()
    assert 'data-engine="browser"' in page
    assert '"/static/' not in page  # it may lie in a folder of a host
    manifest = json.loads((out / "world" / "world.json").read_text())
    assert manifest["bytes"] == (out / "world" / "world.bin").stat().st_size
    assert [name for name, _ in manifest["strategies"]] == ["raster", "k=4", "k=2", "k=1"]
    assert "http.server" in capsys.readouterr().out
    before = (out / "world" / "world.bin").read_bytes()
    export(ExportWebOptions(out, str(world)))
    assert (out / "world" / "world.bin").read_bytes() == before


def test_worlds_that_cannot_be_played_are_refused_before_anything_is_written(tmp_path):
    still = write_world(tmp_path / "still", num_action_tokens=0)
    learned = tmp_path / "learned"
    config = dataclasses.replace(model_config(), position="learned")
    save_model(random_model(config), learned)
    tokenizer().save_pretrained(learned / "tokenizer")
    ActionVocabulary(NAMES).save(learned / "actions.json")
    write_scenes(learned)
    world, site = write_world(tmp_path / "world"), tmp_path / "site"
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (still, {}, "without actions"),
        (learned, {}, "absolute positions"),
        (world, {"strategy": "exact"}, "no schedule"),
        (world, {"context_frames": 0}, "context_frames must be at least 1, got 0"),
        (world, {"scenes": tmp_path / "none"}, "folder of scenes not found"),
        (tmp_path / "nowhere", {}, "nowhere"),
    ]
    for model, flags, complaint in refused:
        with pytest.raises((ValueError, FileNotFoundError), match=complaint):
            export(ExportWebOptions(site, str(model), **flags))
    assert not site.exists()


def test_the_command_refuses_in_one_line(tmp_path):
    command = [sys.executable, "-m", "diagd", "export-web", str(tmp_path), "--strategy", "fast"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert len(run.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
