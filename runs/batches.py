"""How much does it save to decode many sequences in one step?

Texts of unlike lengths through a model of transformers, guided images of unlike prompts, videos of
our worlds: all in one run, and one after the other; exact decoding's steps in a batch; players of
one world. Each pair takes turns in one process. Leave the machine alone.

    python runs/batches.py --out docs/results/zen5/batches.json
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import tyro

import diagd
from diagd.backends.native.model import NativeModel
from diagd.console import make_console, print_records
from diagd.data.video import read_video
from diagd.families.checkpoints import model_path
from diagd.files import write_json
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.system import provenance

COUNT = 4  # of everything
Pair = tuple[Callable[[], object], Callable[[], object]]  # all at once; one after the other


@dataclass(frozen=True)
class Options:
    """Time all at once against one after the other."""

    out: Path | None = None  # a JSON file
    works: tuple[str, ...] = ("texts", "images", "doom", "raster", "exact")
    rounds: int = 5


def main(options: Options) -> None:
    """Time every pair in turns, and print the median of the rounds' ratios."""
    rows = list[dict[str, Any]]()
    for name in options.works:
        together, apart = WORKS[name]()
        together(), apart()  # builds what is built once
        pairs = [(_seconds(together), _seconds(apart)) for _ in range(options.rounds)]
        ratios = [one / other for one, other in pairs]
        row = {"work": name, "together_s": [], "apart_s": [], "ratio": statistics.median(ratios)}
        for key, values in zip(("together_s", "apart_s"), zip(*pairs, strict=True), strict=True):
            row[key] = [round(value, 4) for value in values]
        row |= {"ratios": [round(one, 3) for one in ratios], "ratio": round(row["ratio"], 3)}
        rows.append(row)
        if options.out is not None:
            about = {**provenance(torch.device("cpu")), "count": COUNT}
            write_json(options.out, {**about, "rows": rows}, indent=1)
    columns = {"work": "{work}", "all in one run, share of the time one by one": "{ratio}"}
    print_records(make_console(), f"{COUNT} at once", columns, rows)


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _prompts(num_ids: int, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(num_ids, (length,), generator=generator) for length in lengths]


def _pair(model: Any, prompts: list[torch.Tensor], strategy: str, **given: Any) -> Pair:
    def together() -> object:
        return diagd.generate_tokens(model(prompts), prompts, strategy, **given)

    def apart() -> object:
        each = ([prompt] for prompt in prompts)
        return [diagd.generate_tokens(model(one), one, strategy, **given) for one in each]

    return together, apart


def texts() -> Pair:
    """Four texts of unlike lengths, each before an image of 12 x 12 tokens, k=1."""
    shape = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = diagd.HuggingFaceModel(transformers.LlamaForCausalLM(shape))
    given = {"grid": diagd.TokenGrid(1, 12, 12), "context_frames": 0}
    return _pair(lambda _: model, _prompts(256, (9, 21, 14, 33)), "k=1", **given)


def images() -> Pair:
    """Four guided images of unlike prompts: the shape of Janus, eight of its layers, bfloat16."""
    config = ModelConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=8,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        vocab_size=16384,
        image_vocab_size=16384,
        max_positions=700,
        grid_height=24,
        grid_width=24,
    )
    plain = NativeModel(Transformer.random(config, dtype=torch.bfloat16), "bfloat16", use_up=True)

    def guided(prompts: list[torch.Tensor]) -> diagd.GuidedModel:
        others = [prompt[-3:] for prompt in prompts]
        return diagd.GuidedModel(plain, others, [*map(len, prompts)], 5.0)

    sampling = diagd.SamplingOptions(1.0)
    given = {"grid": diagd.TokenGrid(1, 24, 24), "context_frames": 0, "sampling": sampling}
    return _pair(guided, _prompts(16384, (17, 40, 25, 12)), "k=1", **given)


def videos(strategy: str, num_frames: int) -> Pair:
    """Four dreams of doom from the same two frames, by seeds of their own."""
    world = diagd.VideoGenerator.from_pretrained("doom")
    frames = read_video(model_path("doom") / "prompt.mp4").frames[-2:]
    actions = ["forward"] * num_frames

    def generate(count: int, seed: int) -> object:
        clips, between = [frames] * count, [["forward"]] * count
        given = {"strategy": strategy, "seed": seed, "context_actions": between}
        return world.generate(clips, [actions] * count, **given)

    return lambda: generate(COUNT, 0), lambda: [generate(1, seed) for seed in range(COUNT)]


WORKS: dict[str, Callable[[], Pair]] = {
    "texts": texts,
    "images": images,
    "doom": lambda: videos("k=1", 4),
    "raster": lambda: videos("raster", 1),
    "exact": lambda: videos("exact,lanes=32", 2),
}

if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
