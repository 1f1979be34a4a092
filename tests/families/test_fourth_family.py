"""A family that diagd does not know yet takes one folder (here: this file) and one line.

Pong's checkpoint has tensor names of its own, a config of its own and a tokenizer inside; it brings
two action tokens, a format of recordings and generation defaults. Nothing else learns its name.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor

from diagd.data.actions import ActionCodec
from diagd.data.video import read_video
from diagd.families import table
from diagd.families.checkpoints import load_model
from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Family, RecordingFormat, Source, TokenizerFolder
from diagd.families.weights import rename
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.world_folder import load_parts
from diagd.tokenizers.vq import VideoTokenizer
from tests.models.tiny import tiny_fields
from tests.worlds import random_model, smooth_frames

HEIGHT, WIDTH, PATCH_PX, NUM_LEVELS = 3, 5, 8, 12
SIZE_PX = HEIGHT * PATCH_PX, WIDTH * PATCH_PX
MODULES = {
    "model.embed_tokens": "symbols",
    "model.norm": "last.norm",
    "lm_head": "last.linear",
    "model.layers.{i}.input_layernorm": "block.{i}.look.norm",
    **{f"model.layers.{{i}}.self_attn.{n}_proj": f"block.{{i}}.look.{n}" for n in "qkvo"},
    "model.layers.{i}.post_attention_layernorm": "block.{i}.think.norm",
    **{
        f"model.layers.{{i}}.mlp.{n}_proj": f"block.{{i}}.think.{n}" for n in ("gate", "up", "down")
    },
}


@dataclass(frozen=True)
class PongActions:
    """Which paddle moves, and where to: two tokens."""

    names = ("none", "left_up", "left_down", "right_up", "right_down")
    num_tokens = 2
    num_ids = 5
    combines = False

    def tokens_of(self, action: str) -> tuple[int, ...]:
        if action not in self.names:
            raise ValueError(f"unknown action {action!r}")
        place = self.names.index(action) - 1
        return (4, 4) if place < 0 else (place // 2, 2 + place % 2)

    def action_of(self, record: dict[str, Any]) -> str:
        self.tokens_of(record["action"])
        return record["action"]


class LevelTokenizer(VideoTokenizer):
    """A token is the level of grey that is nearest to the mean of a patch."""

    compression = PATCH_PX

    def __init__(self, levels: Tensor) -> None:
        self.levels, self.codebook_size = levels, len(levels)

    @classmethod
    def load(cls, folder: Path) -> "LevelTokenizer":
        return cls(torch.tensor(json.loads((folder / "config.json").read_text())["levels"]))

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        config = {"kind": "pong-levels", "levels": self.levels.to(dtype).tolist()}
        (Path(folder) / "config.json").write_text(json.dumps(config))

    def encode(self, frames: Tensor) -> Tensor:
        grey = frames.float().mean(-1)
        means = torch.nn.functional.avg_pool2d(grey, PATCH_PX)
        return (means[..., None] - self.levels).abs().argmin(-1)

    def decode(self, tokens: Tensor) -> Tensor:
        patches = self.levels[tokens].round().to(torch.uint8)[..., None].expand(-1, -1, -1, 3)
        return patches.repeat_interleave(PATCH_PX, 1).repeat_interleave(PATCH_PX, 2)

    def to(self, device: torch.device | str) -> Self:
        return self


def convert(source: Source) -> tuple[ModelConfig, dict[str, Tensor]]:
    tensors = {name: tensor for name, tensor in source.tensors.items() if name != "levels"}
    weights = rename(tensors, MODULES)
    return pong_config(source.side["pong_rows"], source.side["pong_columns"]), weights


def pong_config(height: int, width: int) -> ModelConfig:
    fields = tiny_fields(
        vocab_size=NUM_LEVELS + PongActions.num_ids,
        image_vocab_size=NUM_LEVELS,
        max_positions=6 * (height * width + PongActions.num_tokens),
        grid_height=height,
        grid_width=width,
        num_action_tokens=PongActions.num_tokens,
    )
    return ModelConfig(**fields)


def recorded(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text())


def recorded_frames(path: Path, numbers: Iterable[int]) -> Iterator[Tensor]:
    frames = np.asarray(recorded(path)["frames"], dtype=np.uint8)
    return (torch.from_numpy(frames[number]) for number in numbers)


CODEC: ActionCodec = PongActions()
PONG = Family(
    name="Pong",
    licence="public domain",
    files=("pong.pt",),
    config_fields=frozenset({"pong_rows"}),
    signature=("symbols.weight",),
    convert=convert,
    tokenizer=lambda found: LevelTokenizer(found.source.tensors["levels"]),
    tokenizer_folder=TokenizerFolder(LevelTokenizer.load, kind="pong-levels"),
    actions=CODEC,
    recordings=RecordingFormat(
        suffix=".rally",
        length=lambda path: (len(recorded(path)["frames"]), Fraction(5)),
        frames=recorded_frames,
        actions=lambda path: ["none", *recorded(path)["actions"][:-1]],
    ),
    defaults=lambda found: GenerationDefaults(
        fps=5, context_frames=2, num_frames=2, row_lag=2, temperature=0.0, top_p=None
    ),
)


@pytest.fixture
def model() -> Transformer:
    return random_model(pong_config(HEIGHT, WIDTH))


@pytest.fixture
def released(model, tmp_path) -> Path:
    """Write a checkpoint as Pong's makers would."""
    weights = model.state_dict()
    theirs = {"levels": torch.linspace(0, 255, NUM_LEVELS)}
    for i in range(model.config.num_layers):
        for ours, name in MODULES.items():
            ours, name = (text.replace("{i}", str(i)) for text in (ours, name))
            theirs[f"{name}.weight"] = weights[f"{ours}.weight"]
    folder = tmp_path / "released"
    folder.mkdir()
    torch.save(theirs, folder / "pong.pt")
    (folder / "config.json").write_text(json.dumps({"pong_rows": HEIGHT, "pong_columns": WIDTH}))
    return folder


@pytest.fixture
def known(monkeypatch) -> Family:
    """Add the one line."""
    monkeypatch.setattr(table, "FAMILIES", (*table.FAMILIES, PONG))
    return PONG


def test_without_its_line_the_family_is_unknown(released):
    with pytest.raises(
        ValueError, match=r"expected a checkpoint of WHAM, IRIS, .*, MineWorld, got"
    ):
        load_model(released / "pong.pt")


def test_its_weights_are_read(known, released, model):
    tokens = torch.arange(12)[None] % NUM_LEVELS
    for path in (released, released / "pong.pt"):
        loaded = load_model(path)
        assert loaded.config == model.config
        assert torch.equal(loaded.logits(tokens), model.logits(tokens))


def test_it_generates_and_a_converted_folder_generates_the_same(known, released, command, tmp_path):
    outcome = command("convert", released, tmp_path / "ours", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["family"] == "Pong"
    assert "public domain" in outcome.said
    assert json.loads((tmp_path / "ours" / "actions.json").read_text()) == {"kind": "Pong"}
    before, after = load_parts(released), load_parts(tmp_path / "ours")
    assert (before.vocabulary, before.defaults) == (after.vocabulary, after.defaults)
    assert before.defaults.fps == 5
    frames = smooth_frames(2, *SIZE_PX)
    videos = [
        VideoGenerator.from_pretrained(path).generate(
            frames, ["left_up", "none"], num_frames=2, context_actions=["right_down"]
        )
        for path in (released, tmp_path / "ours")
    ]
    assert videos[0].frames.shape == (2, *SIZE_PX, 3)
    assert videos[0].tokens.shape == (2, HEIGHT, WIDTH)
    assert len(videos[0].tokens.unique()) > 2
    assert torch.equal(videos[0].frames, videos[1].frames)


def test_its_recordings_and_defaults_serve_the_command_line(known, released, command, tmp_path):
    frames = smooth_frames(4, *SIZE_PX)
    rally = {"frames": frames.tolist(), "actions": ["left_up", "none", "right_up", "none"]}
    (tmp_path / "clip.rally").write_text(json.dumps(rally))
    outcome = command(
        *("generate", "--model", released, "--prompt", tmp_path / "clip.rally"),
        *("--raster-frames", 0, "--output", tmp_path / "dream.mp4", "--json"),
    )
    assert outcome.code == 0, outcome.err
    (run,) = outcome.document["runs"]
    assert run["num_steps"] == 2 * ((HEIGHT - 1) * 2 + WIDTH)  # its row_lag, two frames
    video = read_video(tmp_path / "dream.mp4")
    assert (len(video.frames), video.fps) == (2 + 2, 5)
