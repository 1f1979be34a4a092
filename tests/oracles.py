"""The slow, obvious versions of what `diagd.decoding` does: an independent reading of its rules.

Nothing here is clever and nothing has a cache: schedules are simulated token by token, and every
decoding step is one full forward over everything fed so far, under a dense mask built from the
words of the visibility rule.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

# tokens (B, N), positions (N,), visible (N, N) bool -> logits (B, N, V)
LogitsFn = Callable[[Tensor, Tensor, Tensor], Tensor]
# logits (B, V), frame number in the stream, row, column -> ids (B,)
SampleFn = Callable[[Tensor, int, int, int], Tensor]


TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
}
NO_STOP: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def tiny_llama(vocab_size: int, max_positions: int = 256, seed: int = 0) -> LlamaForCausalLM:
    """Return a random 2-layer Llama, so widely initialised that every visible token matters."""
    config = LlamaConfig(
        **TINY,
        **NO_STOP,
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def llama_logits(model: LlamaForCausalLM) -> LogitsFn:
    """Return a full forward of `model` at arbitrary positions, under an arbitrary (N, N) mask."""

    @torch.no_grad()
    def logits_fn(tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        return model(tokens, **placed(len(tokens), positions, visible)).logits

    return logits_fn


def chameleon_logits(model: Any) -> LogitsFn:
    """Return the same of Chameleon's class, whose own forward, which bans images, is by-passed."""

    @torch.no_grad()
    def logits_fn(tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        placing = placed(len(tokens), positions, visible)
        return model.lm_head(model.model(tokens, **placing).last_hidden_state)

    return logits_fn


def placed(batch_size: int, positions: Tensor, visible: Tensor) -> dict[str, Any]:
    """Return what a class of transformers is told of positions (N,) and a mask (N, N)."""
    bias = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
    return {
        "position_ids": positions.expand(batch_size, -1),
        "attention_mask": bias.expand(batch_size, 1, -1, -1),
        "use_cache": False,
    }


def simulate_schedule(
    num_frames: int, height: int, width: int, row_lag: int, frame_lag: int
) -> list[set[tuple[int, int, int]]]:
    """Return the tokens (t, i, j) of each step, found by watching rows and frames start.

    A row goes on one token a step; it starts when the row above has `row_lag` tokens; a frame
    starts `frame_lag` steps after the frame before it.
    """
    written = [[0] * height for _ in range(num_frames)]  # tokens of each row so far
    started_at: dict[int, int] = {}  # frame -> step
    steps: list[set[tuple[int, int, int]]] = []
    while written[-1][-1] < width:
        step = len(steps)
        ready = set()
        for t in range(num_frames):
            for i in range(height):
                if written[t][i] == width:
                    continue
                if written[t][i] > 0:
                    ready.add((t, i, written[t][i]))
                elif i > 0:
                    if written[t][i - 1] >= row_lag:
                        ready.add((t, i, 0))
                elif t == 0 or step - started_at.get(t - 1, step) >= frame_lag:
                    ready.add((t, i, 0))
        for t, i, j in ready:
            written[t][i] += 1
            if i == j == 0:
                started_at[t] = step
        steps.append(ready)
    return steps


def greedy_raster(
    logits_fn: Callable[[Tensor], Tensor],
    prompt: Tensor,
    num_frames: int,
    height: int,
    width: int,
    actions: Tensor | None = None,
    valid_range: tuple[int, int] | None = None,
) -> Tensor:
    """Decode token by token with a plain causal forward over the growing sequence.

    Args:
        logits_fn: (B, N) ids -> (B, N, V) logits.
        prompt: (B, P) int64.
        actions: (B, num_frames, n) int64 or None.
        valid_range: ids allowed, [low, high).

    Returns:
        (B, num_frames, height, width) int64.
    """
    sequence = prompt
    frames = []
    for t in range(num_frames):
        if actions is not None:
            sequence = torch.cat([sequence, actions[:, t]], dim=1)
        for _ in range(height * width):
            with torch.no_grad():
                logits = logits_fn(sequence)[:, -1]
            low, high = valid_range or (0, logits.shape[-1])
            token = logits[:, low:high].argmax(-1, keepdim=True) + low
            sequence = torch.cat([sequence, token], dim=1)
        frames.append(sequence[:, -height * width :].reshape(-1, height, width))
    return torch.stack(frames, dim=1)


def greedy(logits: Tensor, _frame: int, _row: int, _column: int) -> Tensor:
    """Return the most likely id of each batch row."""
    return logits.argmax(-1)


@dataclass
class ReferenceStream:
    """A stream of frames decoded by the words of the design, chunk after chunk, without a cache.

    Frames are numbered in the stream: generated ones from 0, context frames -1, -2, ... backwards.
    """

    logits_fn: LogitsFn
    prompt: Tensor  # (B, P) int64
    height: int
    width: int
    num_action_tokens: int = 0
    context_frames: int = 0
    row_start: str = "temporal"
    sample_fn: SampleFn = greedy
    row_ends: list[int] | None = None  # ids that end the rows, where they are known beforehand
    window: int | None = None  # frames that may be seen, the one under way included
    num_seam_tokens: int = 0  # of the action tokens, the last ones, above row height / 2
    ids: dict[int, Tensor] = field(
        init=False, default_factory=dict
    )  # slot -> (B,) id, once it is known
    fed_at: dict[int, int] = field(
        init=False, default_factory=dict
    )  # slot -> step of the stream in which it was fed
    slot_of: dict[tuple[int, int, int], int] = field(
        init=False, default_factory=dict
    )  # (frame, row, column) -> slot
    left_at: dict[int, int] = field(
        init=False, default_factory=dict
    )  # slot of a frame that left the window -> first step whose lanes do not see it
    num_frames: int = field(init=False, default=0)  # generated so far
    now: int = field(init=False, default=0)  # steps so far

    def __post_init__(self) -> None:
        self.num_slots = self.prompt.shape[1]
        for slot in range(self.num_slots):
            self.ids[slot] = self.prompt[:, slot]
            if slot < self.num_slots - 1:  # one by one; the last one is fed at step 0
                self.fed_at[slot] = slot - (self.num_slots - 1)
        slot = self.num_slots
        for frame in range(-1, -self.context_frames - 1, -1):
            for row in reversed(range(self.height)):
                for column in reversed(range(self.width)):
                    slot -= 1
                    self.slot_of[frame, row, column] = slot
                if row == self.height // 2:
                    slot -= self.num_seam_tokens
            slot -= self.num_action_tokens - self.num_seam_tokens

    def decode(
        self, num_frames: int, row_lag: int, frame_lag: int, actions: Tensor | None = None
    ) -> Tensor:
        """Write the next frames of the stream, a chunk; in a full window, frame by frame.

        Args:
            actions: (B, num_frames, n) int64, or None where n is 0.

        Returns:
            (B, num_frames, height, width) int64.
        """
        if self.window is not None and num_frames > 1:
            room = max(1, self.window - self.context_frames - self.num_frames)
            if num_frames > room:
                one, rest = (None, None) if actions is None else actions.tensor_split([room], 1)
                frames = self.decode(room, row_lag, frame_lag, one)
                return torch.cat(
                    [frames, self.decode(num_frames - room, row_lag, frame_lag, rest)], 1
                )
        first, last_slot, action_slots = self.num_frames, self.num_slots - 1, {}
        if self.window is not None:
            self.leave(first + num_frames - 1 - self.window)
        for g in range(num_frames):
            numbers = iter(range(self.num_action_tokens))
            before = {0: self.num_action_tokens - self.num_seam_tokens}
            before[self.height // 2] = before.get(self.height // 2, 0) + self.num_seam_tokens
            for i in range(self.height):
                for _ in range(before.get(i, 0)):
                    action_slots[g, next(numbers)] = self.num_slots, g * frame_lag + i * row_lag
                    self.num_slots += 1
                for j in range(self.width):
                    self.slot_of[first + g, i, j] = self.num_slots
                    self.num_slots += 1

        steps = simulate_schedule(num_frames, self.height, self.width, row_lag, frame_lag)
        for step, targets in enumerate(steps):
            # 1. feed the last token so far at step 0, the actions of frame g when the token behind
            # them is written (g * frame_lag without a seam), and what the step before wrote
            if step == 0 and last_slot >= 0:  # an empty prompt has no last token
                self.fed_at[last_slot] = self.now
            for (g, n), (slot, fed) in action_slots.items():
                if step == fed:
                    assert actions is not None
                    self.ids[slot] = actions[:, g, n]
                    self.fed_at[slot] = self.now
            if step > 0:
                for g, i, j in steps[step - 1]:
                    self.fed_at[self.slot_of[first + g, i, j]] = self.now

            # 2. every target is read at its raster predecessor, or at a stand-in for it
            stand_ins = {}  # slot -> (B,) id
            for g, i, j in targets:
                predecessor = self.slot_of[first + g, i, j] - 1
                if predecessor in self.ids:
                    assert self.fed_at[predecessor] == self.now  # the lags' bounds make it so
                else:
                    assert j == 0
                    stand_ins[predecessor] = self.stand_in(first + g, i, row_lag, frame_lag)
            logits = self.full_forward(stand_ins)

            # 3. sample; the new ids are known to the next step, not to this one
            for g, i, j in sorted(targets):
                slot = self.slot_of[first + g, i, j]
                self.ids[slot] = self.sample_fn(logits[slot - 1], first + g, i, j)
            self.now += 1

        self.num_frames += num_frames
        return torch.stack([self.frame(first + g) for g in range(num_frames)], dim=1)

    def leave(self, number: int) -> None:
        """Let a frame leave, with the actions before it, if it was there."""
        if (number, 0, 0) in self.slot_of:
            leading = self.num_action_tokens - self.num_seam_tokens
            actions = leading * (number != -self.context_frames or number == 0)
            first = self.slot_of[number, 0, 0]
            size = self.height * self.width + self.num_seam_tokens
            slots = range(first - actions, first + size)
            self.left_at |= dict.fromkeys(slots, self.now)

    def frame(self, number: int) -> Tensor:
        """Return one frame, (B, height, width)."""
        rows = [
            torch.stack([self.ids[self.slot_of[number, i, j]] for j in range(self.width)], dim=1)
            for i in range(self.height)
        ]
        return torch.stack(rows, dim=1)

    def stand_in(self, frame: int, row: int, row_lag: int, frame_lag: int) -> Tensor:
        """Return the (B,) ids fed in place of the unknown predecessor of (frame, row, 0)."""
        if self.row_ends is not None:
            return self.prompt.new_full((len(self.prompt),), self.row_ends[row - 1])
        if self.row_start == "action" and self.num_action_tokens:
            return self.ids[self.slot_of[frame, 0, 0] - 1]
        if row > 0:
            places = {
                "predecessor": (frame - 1, row - 1, self.width - 1),
                "temporal": (frame - 1, row, 0),
                "spatial": (frame, row - 1, row_lag - 1),
            }
        else:
            places = {
                "predecessor": (frame - 2, self.height - 1, self.width - 1),
                "temporal": (frame - 1, 0, 0),
                "spatial": (frame - 1, 0, min(frame_lag, self.width) - 1),
            }
        policies = ["predecessor", "temporal", "spatial"]
        wanted = "predecessor" if self.row_start == "action" else self.row_start
        for policy in policies[policies.index(wanted) :]:
            slot = self.slot_of.get(places[policy])
            if slot in self.ids:
                return self.ids[slot]
        raise AssertionError(f"no stand-in for frame {frame}, row {row}")

    def full_forward(self, stand_ins: dict[int, Tensor]) -> dict[int, Tensor]:
        """Run all that was fed so far and this step's stand-ins; return (B, V) logits by slot."""
        lanes = [(slot, self.fed_at[slot], self.ids[slot]) for slot in sorted(self.fed_at)]
        lanes += [(slot, self.now, ids) for slot, ids in sorted(stand_ins.items())]
        slots, fed = (torch.tensor([lane[i] for lane in lanes]) for i in range(2))
        left = torch.tensor([self.left_at.get(slot, math.inf) for slot, _, _ in lanes])
        known = (fed <= fed[:, None]) & (fed[:, None] < left)
        visible = (slots <= slots[:, None]) & known
        # a stand-in is seen by itself alone
        itself, stand_in = torch.eye(len(lanes), dtype=torch.bool), slice(len(self.fed_at), None)
        visible[:, stand_in] = itself[:, stand_in]
        tokens = torch.stack([ids for _, _, ids in lanes], dim=1)
        logits = self.logits_fn(tokens, slots, visible)
        # no slot has both its token and a stand-in, so the key is unique
        assert len({slot for slot, _, _ in lanes}) == len(lanes)
        return {slot: logits[:, q] for q, (slot, _, _) in enumerate(lanes)}


def diagonal_reference(
    logits_fn: LogitsFn,
    prompt: Tensor,
    num_frames: int,
    height: int,
    width: int,
    row_lag: int,
    frame_lag: int,
    actions: Tensor | None = None,
    context_frames: int = 0,
    row_start: str = "temporal",
    sample_fn: SampleFn = greedy,
) -> Tensor:
    """Decode one chunk without a cache; see `ReferenceStream`."""
    num_action_tokens = 0 if actions is None else actions.shape[2]
    stream = ReferenceStream(
        logits_fn, prompt, height, width, num_action_tokens, context_frames, row_start, sample_fn
    )
    return stream.decode(num_frames, row_lag, frame_lag, actions)


def filtered_probabilities(
    logits: np.ndarray, temperature: float, top_k: int | None = None, top_p: float | None = None
) -> np.ndarray:
    """Return the probabilities (V,) after temperature, then top-k, then top-p."""
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    if top_k is not None:
        probabilities[order[top_k:]] = 0.0
        probabilities /= probabilities.sum()
    if top_p is not None:
        mass = 0.0
        for rank, token in enumerate(order):
            if mass >= top_p:
                probabilities[order[rank:]] = 0.0
                break
            mass += probabilities[token]
        probabilities /= probabilities.sum()
    return probabilities
