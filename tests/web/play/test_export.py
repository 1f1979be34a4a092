"""Worlds as static files: the kernels in them against Python, frame by frame; what is refused."""

import dataclasses
import json
import math
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from diagd.backends.native.boundary import check_records
from diagd.backends.native.wasm import RECORDS
from diagd.backends.webgpu.model import FIELDS, Task
from diagd.backends.webgpu.shader import UNIFORM, bytes_of
from diagd.data.actions import ActionVocabulary
from diagd.decoding.engine import Batch
from diagd.decoding.step import BLOCK, whole_blocks
from diagd.decoding.strategies.table import parse_strategy
from diagd.families.checkpoints import save_model, write_defaults
from diagd.families.defaults import GenerationDefaults
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import model_scenes
from diagd.pipeline.world_folder import load_parts
from diagd.tokenizers.vq import VQTokenizer, vq_model_class
from diagd.web.play.export import KERNELS, export, pack
from diagd.web.play.options import ExportWebOptions, PlayOptions
from diagd.web.play.server import load
from diagd.web.play.session import Controls, Session, SessionLog
from runs import web_kernels
from tests.worlds import (
    CONTEXT_FRAMES,
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
NONE, DAMAGED, OTHER_VERSION, OUT_OF_RANGE, _, UNDRAWN = range(6)


class Told(NamedTuple):
    tasks: torch.Tensor  # (steps, words) int32
    lanes: torch.Tensor  # (lanes, fields and turns) int32
    memory: torch.Tensor  # int32
    slots: int
    at: int  # where `memory` stands


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

    def write(self, tensor: torch.Tensor, at: int) -> None:
        self.exports["memory"].write(self.store, bytes_of(tensor), at)

    def told(self, at: int, head_dim: int) -> Told:
        """Read what a GPU is told: `Submission` in csrc/wasm/world.cpp."""
        submission = self.read(at, torch.int32, 8).tolist()
        steps, lane_words, memory_words, slots, capacity, *places = submission
        tasks = self.read(places[0], torch.int32, steps, UNIFORM // 4)
        lanes = self.read(places[1], torch.int32, lane_words).view(-1, FIELDS + head_dim)
        memory = self.read(places[2], torch.int32, memory_words)
        assert (tasks[:, Task.capacity.offset // 4] == capacity).all()
        assert capacity == tasks[:, 0].max()
        return Told(tasks, lanes, memory, slots, places[2])


@pytest.fixture(scope="module", params=["kernels.wasm", "kernels-relaxed.wasm"])
def kernels(request):
    return Kernels(request.param)


@pytest.fixture(scope="module")
def packed(world, tmp_path_factory):
    """Return the files of the tiny world, by name."""
    return pack(ExportWebOptions(tmp_path_factory.mktemp("site"), model=str(world)))


def test_the_kernels_are_those_of_the_sources():
    said = (KERNELS / "SOURCES").read_text().strip()
    assert said == web_kernels.digest(), "the C++ has changed: python runs/web_kernels.py"


def test_both_sides_see_a_world_alike(kernels):
    at, memory = kernels("records_of_worlds"), kernels.exports["memory"]
    described = memory.read(kernels.store, at, at + 2**16).partition(b"\0")[0]
    needless = "Step", "Space", "Attended"
    check_records(described, {name: RECORDS[name] for name in RECORDS if name not in needless})


# five frames of context, far beyond a full one; and a picture
@pytest.mark.parametrize(
    ("scene", "temperature", "beyond"), [(0, 1.0, 34), (0, 0.0, 6), (2, 1.0, 6)]
)
def test_frames_are_those_of_python(kernels, packed, world, scene, temperature, beyond):
    generator = VideoGenerator.from_pretrained(world, dtype="int8")
    start = model_scenes(world, generator, generator.defaults.context_frames)[scene]
    session = Session(generator, SessionLog(start.frames, start.actions, 2**31 + 5))
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
        assert kernels("held_frames") == session.stream.num_held
        assert kernels("window_frames") == session.stream.window
        pixels = kernels.read(kernels("paint"), torch.uint8, *generator.frame_size_px, 4)
        painted = generator.tokenizer.decode(expected)[0]
        assert (pixels[..., :3].int() - painted.int()).abs().max() <= 1
        assert (pixels[..., 3] == 255).all()


@pytest.mark.parametrize("gain", [3, 0])  # above which activations have a second digit
def test_a_world_s_own_top_k_holds_in_a_browser(gain, kernels, world, tmp_path, monkeypatch):
    """Of a world that is greedy until the page says otherwise, too."""
    monkeypatch.setattr("diagd.backends.native.weights.HIGHEST_GAIN", gain)
    greedy = shutil.copytree(world, tmp_path / "greedy")
    write_defaults(greedy, GenerationDefaults(temperature=0, top_k=3))
    generator = VideoGenerator.from_pretrained(greedy, dtype="int8")
    start = model_scenes(greedy, generator, generator.defaults.context_frames)[0]
    session = Session(generator, SessionLog(start.frames, start.actions, 7))
    packed = pack(ExportWebOptions(tmp_path, model=str(greedy)))["world/world.bin"]
    assert kernels.open(packed) == kernels("begin", 0, 7) == NONE
    for temperature in (0.0, 2.0, 2.0, 0.0):
        expected = session.advance(NAMES[1], Controls(parse_strategy("raster"), temperature, 1.0))
        assert kernels("advance", 1, 0, temperature, 1.0) == NONE
        found = kernels.read(kernels("newest_tokens"), torch.int32, *expected.shape[1:])
        assert torch.equal(found, expected[0].int())


@torch.inference_mode()
def test_a_gpu_is_told_what_the_engine_of_python_feeds(kernels, packed, world):
    """Frame by frame it is told lanes, slots and steps, and its tokens are taken as they come."""
    generator, seed = VideoGenerator.from_pretrained(world, dtype="int8"), 2**31 + 5
    start = model_scenes(world, generator, generator.defaults.context_frames)[2]
    session = Session(generator, SessionLog(start.frames, start.actions, seed))
    stream, noted, config = session.stream, [], generator.config
    names = [name for name, _ in json.loads(packed["world/world.json"])["strategies"]]
    rotary, vocabulary = load_parts(world).model.model.rotary, generator.vocabulary
    assert rotary is not None
    assert vocabulary is not None
    assert kernels.open(packed["world/world.bin"]) == kernels("begin", 2, seed - 2**32) == NONE
    prompt = stream.num_used
    context = kernels.told(kernels("describe_context"), config.head_dim)
    assert context.tasks[:, 0].tolist() == [prompt - 1]
    for frame in range(generator.config.frames_held + 3):
        which, controls = frame % len(names), Controls(parse_strategy(names[frame % 4]), 0.8, 0.9)
        run = Batch.run.__get__(stream.batch)
        noted.clear()

        def note(asking, run=run):
            ((_, step),) = asking
            state = stream.tokens[0], stream.held[0], stream.fed_at[0]
            noted.append(
                (
                    step.lanes[:, 0],
                    min(step.end, stream.batch.scratch),
                    [part.clone() for part in state],
                )
            )
            run(asking)

        stream.batch.run = note
        told = kernels.told(kernels("describe_frame", 1, which, 0.8, 0.9), config.head_dim)
        expected = session.advance(vocabulary.names[1], controls)
        lanes = torch.cat([lanes for lanes, _, _ in noted], 1)
        assert torch.equal(told.lanes[:, :8], lanes[:8].T.int()), frame
        assert (told.lanes[:, 8:FIELDS] == torch.tensor([0, NUM_CODES])).all()
        turns = torch.cat(
            rotary(lanes[0], lanes[8:] if config.on_grid else None, torch.float32), -1
        )
        assert (told.lanes[:, FIELDS:].view(torch.float32) - turns).abs().max() < 1e-6
        before = [part[:-1] for part in noted[0][2]]  # without the scratch slot, which nobody reads
        found = [part[:-1] for part in told.memory[: 3 * told.slots].view(3, -1)]
        assert all(map(torch.equal, found, [part.int() for part in before])), frame
        assert told.memory[3 * told.slots :].tolist() == [seed - 2**32, 0]
        firsts = [0, *torch.tensor([one[0].shape[1] for one in noted]).cumsum(0).tolist()]
        for index, (lanes, end, _) in enumerate(noted):
            fields = [name for name, *_ in Task._fields_]
            task = dict(zip(fields, told.tasks[index].tolist(), strict=False))
            assert {task[name] for name in ("lanes", "rows", "keep")} == {lanes.shape[1]}
            assert {task[name] for name in ("slots", "stride", "held")} == {stream.held.shape[1]}
            assert task["reach"] == min(whole_blocks(end, BLOCK), stream.held.shape[1])
            assert task["first"] == firsts[index] * told.lanes.shape[1]
            assert task["mask"] == task["top_k"] == task["exclusive_top_p"] == 0
        assert told.tasks[:, 12:14].contiguous().view(torch.float32).unique().tolist() == [
            pytest.approx(0.8),
            pytest.approx(0.9),
        ]
        drawn = told.memory[: told.slots].clone()
        drawn[stream.slots_between(stream.num_used - HEIGHT * WIDTH, stream.num_used)] = (
            expected.flatten().int()
        )
        kernels.write(drawn, told.at)
        assert kernels("accept_frame") == NONE
        newest = kernels.read(kernels("newest_tokens"), torch.int32, HEIGHT, WIDTH)
        assert torch.equal(newest, expected[0].int())
    context = kernels.told(kernels("describe_context"), config.head_dim)
    held = stream.held[0, :-1]
    slots = torch.nonzero((held >= 0) & (held < stream.num_used - 1)).flatten()
    slots = slots[held[slots].argsort()]
    assert torch.equal(context.lanes[:, 0], held[slots].int())  # all that may be seen, in order
    assert torch.equal(context.lanes[:, 1], slots.int())
    assert torch.equal(context.lanes[:, 2], slots.int())
    assert torch.equal(context.lanes[:, 4], held[slots].int())


def test_kernels_go_on_with_what_a_gpu_has_written(kernels, packed, world):
    """In raster order, in a context that is not full: that is read again to the very bit."""
    assert kernels.open(packed["world/world.bin"]) == NONE
    frames, head_dim = [], model_config().head_dim
    assert kernels("begin", 2, 7) == NONE
    for _ in range(CONTEXT_FRAMES - 1):
        assert kernels("advance", 1, 0, 1.0, 1.0) == NONE
        frames.append(kernels.read(kernels("newest_tokens"), torch.int32, HEIGHT * WIDTH))
    assert kernels("begin", 2, 7) == NONE
    for number, frame in enumerate(frames):
        if number % 3:
            told = kernels.told(kernels("describe_frame", 1, 0, 1.0, 1.0), head_dim)
            visual = told.lanes[:, 3].long()  # raster order: one lane for each token
            drawn = told.memory[: told.slots].clone()
            drawn[visual[-HEIGHT * WIDTH :]] = frame
            kernels.write(drawn, told.at)
            assert kernels("accept_frame") == NONE
        else:
            assert kernels("advance", 1, 0, 1.0, 1.0) == NONE
        found = kernels.read(kernels("newest_tokens"), torch.int32, HEIGHT * WIDTH)
        assert torch.equal(found, frame), number


@pytest.mark.parametrize("id", [-1, NUM_CODES + len(NAMES)])
def test_a_frame_that_a_gpu_has_not_drawn_is_no_frame(kernels, packed, id):
    assert kernels.open(packed["world/world.bin"]) == kernels("begin", 0, 7) == NONE
    told = kernels.told(kernels("describe_frame", 1, 0, 1.0, 1.0), model_config().head_dim)
    kernels.write(torch.full((told.slots,), id, dtype=torch.int32), told.at)
    assert kernels("accept_frame") == UNDRAWN
    assert kernels("advance", 1, 0, 1.0, 1.0) == NONE  # the frame is written by somebody else
    assert kernels("describe_frame", 99, 0, 1.0, 1.0) == 0


def test_a_painter_of_two_sizes_paints_as_diffusers_does(kernels, tmp_path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = vq_model_class()(
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
    assert (
        kernels.open(pack(ExportWebOptions(tmp_path, model=str(tmp_path)))["world/world.bin"])
        == NONE
    )
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
    out = tmp_path / "my site"
    written = export(ExportWebOptions(out, model=str(world)))
    assert {str(path.relative_to(out)) for path in out.rglob("*.*")} == set(written["files"])
    page = (out / "index.html").read_text()
    assert 'data-engine="browser"' in page
    assert '"/static/' not in page  # it may lie in a folder of a host
    manifest = json.loads((out / "world" / "world.json").read_text())
    assert manifest["bytes"] == (out / "world" / "world.bin").stat().st_size
    assert [name for name, _ in manifest["strategies"]] == ["raster", "k=4", "k=2", "k=1"]
    assert f"play it: python -m http.server -d '{out}', then" in capsys.readouterr().out
    before = (out / "world" / "world.bin").read_bytes()
    export(ExportWebOptions(out, model=str(world)))
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
            export(ExportWebOptions(site, model=str(model), **flags))
    assert not site.exists()


def test_a_strategy_that_does_not_fit_is_refused_before_weights_are_read(
    world, tmp_path, monkeypatch
):
    monkeypatch.delattr(VideoGenerator, "from_pretrained")
    monkeypatch.delattr("diagd.web.play.export.load_parts")
    message = r"row_lag must be in \[1, width=5\], got 6"
    with pytest.raises(ValueError, match=message):
        pack(ExportWebOptions(tmp_path, model=str(world), strategy="k=6"))
    with pytest.raises(ValueError, match=message):
        load(PlayOptions(model=str(world), strategy="k=6", open=False))


def test_the_command_refuses_in_one_line(tmp_path):
    command = [sys.executable, "-m", "diagd", "export-web", str(tmp_path), "--strategy", "fast"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2
    assert len(run.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
