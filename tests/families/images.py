"""Images of texts: the loop of transformers, diagonals without a cache, and what tokens cost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import diagd
from diagd.backends.native.model import NativeModel
from diagd.decoding.visibility import Seen
from diagd.pipeline.prompts import seed_of
from diagd.tokenizers.text import TextIds
from tests import oracles
from tests.models.tiny import random_tokens


def raster_images(
    model: Any,
    prompts: Tensor,
    negatives: Tensor,
    scale: float,
    visual: list[int],
    height: int,
    width: int,
) -> Tensor:
    """Generate greedily (B, height, width + 1) of their ids; the last of `visual` ends each row."""
    length = prompts.shape[1]
    *codes, row_end = visual

    def allowed(_: int, sequence: Tensor) -> list[int]:
        at_end = (len(sequence) - length) % (width + 1) == width
        return [row_end] if at_end else codes

    guided = {"guidance_scale": scale, "negative_prompt_ids": negatives} if scale != 1 else {}
    sequences = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=height * (width + 1),
        do_sample=False,
        prefix_allowed_tokens_fn=allowed,
        **guided,
    )
    return sequences[:, length:].view(-1, height, width + 1)


@torch.no_grad()
def check_int8(folder: Path, tokens: Tensor | None = None, share: float = 0.1) -> None:
    """Weights of 8 bits keep the logits of tokens (B, L), of our ids, close to float32's."""
    model = diagd.load_model(folder)
    if tokens is None:
        tokens = random_tokens(2, 9, vocab_size=model.num_embeddings)
    batch, length = tokens.shape
    native, slots = NativeModel(model, "int8"), torch.arange(length)
    cache = native.make_cache(batch, length + 1)
    fed = native.forward(tokens, slots, slots, Seen(slots, slots, slots, slots), cache)
    expected = model.logits(tokens)
    assert (fed - expected).std() < share * expected.std()


def check_converted(
    command: Callable[..., Any], folder: Path, out: Path, video: Any, *given: Any, **how: Any
) -> diagd.VideoGenerator:
    """Convert a folder to one of ours, which generates the video from what was given."""
    outcome = command("convert", folder, out)
    assert outcome.code == 0, outcome.err
    ours = diagd.VideoGenerator.from_pretrained(out)
    again = ours.generate(*given, **how)
    assert torch.equal(again.tokens, video.tokens)
    assert torch.equal(again.frames, video.frames)
    return ours


Logits = Callable[[Tensor, Tensor, Tensor], Tensor]  # of tokens, positions and what sees what


def diagonal_image(
    full: Logits,
    ids: TextIds,
    scale: float,
    num_codes: int,
    height: int,
    width: int,
    row_lag: int,
) -> Tensor:
    """Generate greedily in our ids, (1, height, width + 1), as `reference_image` does."""

    def choose(logits: Tensor, _frame: int, _row: int, column: int) -> Tensor:
        is_end = column == width
        return logits[:, :num_codes].argmax(-1) * (not is_end) + num_codes * is_end

    return reference_image(full, ids, scale, height, width + 1, row_lag, choose, num_codes)


def guided_price(
    full: Logits, ids: TextIds, scale: float, tokens: Tensor, row_lag: int, row_end: int | None
) -> float:
    """Return the nats a token of (height, width) tokens, which the reference must write."""
    costs, (height, width) = [], tokens.shape

    def forced(logits: Tensor, _frame: int, row: int, column: int) -> Tensor:
        token = tokens[row, column]
        if token != row_end:  # that is known, and drawn nowhere
            costs.append(-logits[0, :row_end].log_softmax(-1)[token].item())
        return token[None]

    written = reference_image(full, ids, scale, height, width, row_lag, forced, row_end)
    assert torch.equal(written[0], tokens)
    return sum(costs) / len(costs)


def reference_image(
    full: Logits,
    ids: TextIds,
    scale: float,
    height: int,
    width: int,
    row_lag: int,
    choose: oracles.SampleFn,
    row_end: int | None,
) -> Tensor:
    """Generate in our ids, (1, height, width): both prompts whole, each in its own forward.

    Args:
        full: returns logits of codes and row end.
        choose: guided logits (1, V), frame, row and column -> (1,) id.
    """
    length, other = ids.prompt.shape[1], ids.unconditional.shape[1]

    def logits_fn(tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        rest = positions >= length
        seen = torch.ones(other + int(rest.sum()), other + int(rest.sum())).tril().bool()
        seen[other:, other:] = visible[rest][:, rest]
        without = torch.cat([ids.unconditional, tokens[:, rest]], 1)
        places = torch.cat([torch.arange(other), positions[rest] + other - length])
        null = full(without, places, seen)[:, other - 1 :]
        logits = full(tokens, positions, visible)
        logits[:, length - 1 :] = null + scale * (logits[:, length - 1 :] - null)
        return logits

    row_ends = None if row_end is None else [row_end] * height
    reference = oracles.ReferenceStream(
        logits_fn, ids.prompt, height, width, sample_fn=choose, row_ends=row_ends
    )
    frame_lag = diagd.DiagonalSchedule(diagd.TokenGrid(1, height, width), row_lag).num_steps
    return reference.decode(1, row_lag, frame_lag)[0]


def check_prices(
    command: Callable[..., Any],
    folder: Path,
    out: Path,
    full: Logits,
    text: str,
    row_end: int | None = None,
) -> None:
    """Run `evaluate` on a folder; compare what raster's tokens cost with `guided_price`."""
    out.mkdir()
    (out / "texts.txt").write_text(text)
    flags = "--model", folder, "--prompts", out / "texts.txt", "--strategy", "k=1", "--out", out
    outcome = command("evaluate", *flags, "--json")
    assert outcome.code == 0, outcome.err
    world = diagd.VideoGenerator.from_pretrained(folder)
    assert world.text is not None
    seed, scale = seed_of(text, 0), world.defaults.guidance
    raster = world.generate(text=text, strategy="raster", seed=seed).tokens[0]
    rows = {row["strategy"]: row for row in outcome.document["rows"]}
    for name, row_lag in (("raster", world.width), ("k=1", 1)):
        price = guided_price(full, world.text(text), scale, raster, row_lag, row_end)
        assert abs(rows[name]["nll"]["mean"] - price) < 1e-3
    assert rows["k=1"]["nll"]["difference"] != 0
