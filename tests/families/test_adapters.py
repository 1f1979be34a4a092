"""Adapters given to commands: merged into the world, or refused before anything is written."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from diagd.families.adapters import weights_sha256
from diagd.families.checkpoints import find_model, load_model
from diagd.files import write_json
from diagd.pipeline.generator import VideoGenerator
from tests.evaluation.lines import write_clips
from tests.web.play.serving import serving
from tests.worlds import WALK

RANK, MODULES = 2, ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


@pytest.fixture
def adapter(world, tmp_path):
    """Return an adapter of the little world: factors of two layers, and a stand-in."""
    weights, folder = find_model(world).weights, tmp_path / "adapter"
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name in MODULES:
        outputs, inputs = weights[f"{name}.weight"].shape
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator)
    folder.mkdir()
    save_file(tensors | {"stand_in": torch.randn(32)}, folder / "adapter.safetensors")
    about = {"base": str(world), "base_sha256": weights_sha256(weights), "rank": RANK}
    write_json(folder / "adapter.json", about | {"scale": 2.0, "decoding": "k=1/learnt"})
    return folder


def test_a_converted_world_is_the_world_with_its_adapter(adapter, command, world, tmp_path):
    merged = tmp_path / "merged"
    told = command("convert", world, merged, "--adapter", adapter, "--json")
    assert told.code == 0, told.err
    ours, theirs = load_model(merged), load_model(world, adapter=adapter)
    assert ours.config == theirs.config
    assert all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    one = VideoGenerator.from_pretrained(world, adapter=adapter)
    other = VideoGenerator.from_pretrained(merged)
    assert one.defaults == other.defaults
    assert one.defaults.decoding == "k=1/learnt"
    videos = [w.generate(world / "prompt.mp4", WALK, seed=3).frames for w in (one, other)]
    plain = VideoGenerator.from_pretrained(world).generate(world / "prompt.mp4", WALK, seed=3)
    assert torch.equal(*videos)
    assert not torch.equal(videos[0], plain.frames)
    one.save_pretrained(tmp_path / "saved")
    saved = load_model(tmp_path / "saved")
    assert all(map(torch.equal, saved.state_dict().values(), ours.state_dict().values()))


def test_int8_rounds_what_is_merged(adapter, command, world, tmp_path):
    command("convert", world, tmp_path / "merged", "--adapter", adapter)
    one = VideoGenerator.from_pretrained(world, dtype="int8", adapter=adapter)
    other = VideoGenerator.from_pretrained(tmp_path / "merged", dtype="int8")
    assert one.dtype == other.dtype == "int8"
    videos = [w.generate(world / "prompt.mp4", WALK, seed=3).frames for w in (one, other)]
    assert torch.equal(*videos)


def test_generate_evaluate_and_bench_run_it_by_its_own_strategy(adapter, command, world, tmp_path):
    given = "--model", world, "--adapter", adapter, "--json"
    made = command("generate", *given, "--frames", 2, "--out", tmp_path / "dream.mp4")
    assert made.code == 0, made.err
    assert made.document["runs"][-1]["strategy"] == "k=1/learnt"
    clips = write_clips(tmp_path / "clips", count=2)
    short = "--strategy", "k=1/learnt", "--frames", 4, "--context-frames", 1, "--num-clips", 1
    judged = command("evaluate", *given, "--clips", clips, "--out", tmp_path / "judged", *short)
    assert judged.code == 0, judged.err
    assert "k=1/learnt" in [row["strategy"] for row in judged.document["rows"]]
    short = "--strategy", "k=1/learnt", "--repeats", 1, "--baseline", "none"
    timed = command("bench", *given, *short)
    assert timed.code == 0, timed.err
    assert "k=1/learnt" in [row["strategy"] for row in timed.document["rows"]]


def test_a_page_plays_it(adapter, world):
    with serving(world, adapter=adapter) as served, served.page() as page:
        page.send("begin", scene=0, seed=1)
        assert page.frames(1)


COMMANDS = {
    "bench": (),
    "convert": (),
    "evaluate": ("--clips", "clips", "--out", "out"),
    "export-web": (),
    "generate": ("--out", "dream.mp4"),
    "play": ("--no-open", "--port", 0),
    "serve": ("--port", 0),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_that_of_another_base_is_refused_by_every_command(
    name, adapter, command, monkeypatch, tmp_path, world
):
    monkeypatch.chdir(tmp_path)
    other = shutil.copytree(world, tmp_path / "other")
    weights = {key: of.clone() for key, of in find_model(world).weights.items()}
    weights["model.norm.weight"][0] += 1
    save_file(weights, other / "model.safetensors")
    write_clips(tmp_path / "clips", count=2)
    model = (other, "out") if name == "convert" else ("--model", other)
    model = ("out", *model) if name == "export-web" else model
    outcome = command(name, *model, "--adapter", adapter, *COMMANDS[name])
    outcome.assert_refused(r"adapter: its base is .* with weights of SHA-256 \w{12}, .* has \w{12}")
    assert {path.name for path in tmp_path.iterdir()} == {"adapter", "clips", "other"}


def test_an_adapter_of_an_adapter_or_of_random_weights_is_refused(adapter, command):
    with pytest.raises(
        ValueError, match=r"adapter must be left out: .*adapter is one of .* itself"
    ):
        load_model(adapter, adapter=adapter)
    refused = command("bench", "--model", "mc-ar-128x3", "--adapter", adapter)
    refused.assert_refused("adapter needs a model with weights, mc-ar-128x3 has none")
