"""Commands that write to a folder, at their smallest: the arguments, and what they need."""

from pathlib import Path

from tests.evaluation.lines import write_clips as write_named_clips
from tests.tokenizers.rectangles import write_clips
from tests.worlds import clips_of, write_shard, write_shard_model

COMMANDS = ("train", "finetune", "tokenize", "record", "evaluate", "convert")


def flags_of(name: str, world: Path, folder: Path, out: Path) -> list[object]:
    """Return the arguments of a command that writes to a folder; what it needs is made."""
    if name in ("train", "finetune"):
        tokens = write_shard(folder / "tokens", clips_of())
        start = ("--model", "mc-ar-tiny")
        if name == "finetune":
            start = ("--init", write_shard_model(folder / "model", frames=3))
        training = ("--steps", 4, "--batch-size", 2, "--frames", 3, "--log-every", 1)
        precise = ("--precision", "no", "--no-compile", "--warmup-steps", 1)
        return ["--tokens", tokens, *start, *training, *precise, "--out", out]
    if name == "tokenize":
        write_clips(folder / "clips")
        quick = ("--steps", 2, "--batch-size", 2, "--codes", 16, "--frame-stride", 1)
        return ["--clips", folder / "clips", *quick, "--out", out]
    if name == "record":
        game = ("--gym", "tests.data.recorders.scroller:Scroller-v0")
        return [*game, "--clips", 3, "--frames", 4, "--out", out]
    if name == "evaluate":
        clips = write_named_clips(folder / "clips", count=2)
        short = ("--num-clips", 2, "--frames", 4, "--context-frames", 2, "--backend", "native")
        return [
            "--clips",
            clips,
            "--model",
            world,
            *short,
            "--strategy",
            "k=1",
            "--save-videos",
            "--out",
            out,
        ]
    assert name == "convert"
    return [world, out]
