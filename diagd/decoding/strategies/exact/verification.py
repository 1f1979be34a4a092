"""Write the raster video, token for token, in fewer steps: the algorithm that all rules share.

The noise of a draw is bound to its place, so the raster sample is the fixed point of "draft, feed
all drafts causally, draw again". A step feeds draft tokens behind the verified prefix and drafts
ahead of it (see `Drafts`); a draw replaces the draft it was to confirm. What stands before the
first change is final, for it was drawn after final tokens only: at least one token a step (Jacobi
decoding, arXiv:2305.10427, with noise bound to the place). Keys and values of final tokens stay,
the others are overwritten.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from diagd.decoding.layout import SequenceLayout
from diagd.decoding.plan import SCRATCH, Lanes, padded_width
from diagd.decoding.strategies.exact.costs import measure_costs
from diagd.decoding.strategies.exact.drafts import Drafts
from diagd.decoding.stream import Stream, VerifiedStep
from diagd.decoding.workspace import DrawRule


def verify_frames(
    stream: Stream, layout: SequenceLayout, drafts: Drafts, rule: DrawRule | None = None
) -> Iterator[None]:
    """Draft, feed and confirm until all frames are final; yield as each becomes so.

    Args:
        drafts: of this layout, nothing fed.
        rule: what becomes of a draft token; None replaces it by the draw of its place.
    """
    _draft_first(stream, layout)
    table, first_frame, frame = _table(stream, drafts), stream.num_generated, 0
    while not drafts.is_done:
        first = drafts.num_verified
        lanes = drafts.choose()
        changed = _feed(stream, table, lanes, drafts.verified, rule)
        accepted = drafts.update(lanes, changed)
        t, i, j = (int(of[first]) for of in (drafts.frames, drafts.rows, drafts.columns))
        stream.verified.append(VerifiedStep(first_frame + t, i, j, len(lanes), accepted))
        while drafts.num_verified >= (frame + 1) * layout.slots_per_frame:
            frame += 1
            _draft_next(stream, layout, drafts, frame)
            yield


def step_costs(stream: Stream) -> dict[int, float]:
    """Return the seconds of a step by its lanes (see `costs`); between frames."""
    zero = torch.zeros(1, dtype=torch.int64)
    here, scratch = zero + max(stream.num_used, 1) - 1, zero + stream.scratch
    lane = Lanes(here, scratch, stream.slots_at(here), scratch, zero, zero, zero, zero)
    table, verified = torch.stack(lane), np.zeros(stream.batch_size, np.int64)

    def dry_step(num_lanes: int) -> None:
        _feed(stream, table, np.zeros(num_lanes, np.int64), verified, None)

    before = stream.num_steps, stream.num_fed, stream.fed_at.clone()
    costs = measure_costs(stream.model, (stream.batch_size, stream.runner), dry_step)
    stream.num_steps, stream.num_fed, fed_at = before
    stream.fed_at.copy_(fed_at)
    return costs


@torch.inference_mode()
def _draft_first(stream: Stream, layout: SequenceLayout) -> None:
    """Let the newest frame be the first draft of all frames."""
    base, num_actions, grid = stream.num_used, layout.num_action_tokens, layout.grid
    slots = stream.slots_between(base, base + layout.num_slots)
    visual = slots.view(-1, layout.slots_per_frame)[:, num_actions:]
    if layout.context_frames:
        newest = stream.tokens[:, stream.slots_between(base - grid.tokens_per_frame, base)]
        stream.tokens[:, visual] = newest[:, None]
    else:
        stream.tokens[:, visual] = stream.ranges.low


@torch.inference_mode()
def _draft_next(stream: Stream, layout: SequenceLayout, drafts: Drafts, frame: int) -> None:
    """Let drafts of a frame that no draw has replaced be the frame before, which is now final."""
    height = layout.grid.height
    cells = drafts.cells[frame * height : (frame + 1) * height]
    fresh = cells[~drafts.is_fed[cells]]
    if len(fresh):
        base = stream.num_used - (frame - 1) * layout.slots_per_frame
        positions = torch.as_tensor(fresh).to(stream.tokens.device) + base
        newest = stream.tokens[:, stream.slots_at(positions - layout.slots_per_frame)]
        stream.tokens[:, stream.slots_at(positions)] = newest


@torch.inference_mode()
def _feed(
    stream: Stream, table: Tensor, chosen: np.ndarray, verified: np.ndarray, rule: DrawRule | None
) -> np.ndarray:
    """Feed lanes, replace drafts by draws, and return (B, L) bool where they differ.

    Args:
        table: (8, all lanes) on the CPU, the fields of `Lanes`.
        verified: (B,) lanes of each row that are final.
    """
    count = len(chosen)
    lanes = table[:, torch.as_tensor(chosen)]
    lane = Lanes.of(lanes)
    lane.steps.fill_(stream.num_steps)
    end = int(lane.positions[-1]) + 1
    if stream.pad:
        padding = lanes[:, :1].repeat(1, padded_width(count) - count)
        of_padding = Lanes.of(padding)
        of_padding.slots.fill_(stream.scratch)
        of_padding.outputs.fill_(stream.scratch)
        lanes = torch.cat([lanes, padding], dim=1)
    lanes = lanes.to(stream.tokens.device)
    lane = Lanes.of(lanes[:, :count])
    stream.fed_at[lane.slots] = stream.num_steps
    drafted = stream.tokens[:, lane.outputs]
    stream.feed(lanes, count, end, rule)
    drawn = stream.tokens[:, lane.outputs]
    if len(verified) > 1:  # what is final in a row stays, though other rows are behind
        final = torch.as_tensor(chosen < verified[:, None]).to(drawn.device)
        drawn = torch.where(final, drafted, drawn)
        stream.tokens[:, lane.outputs] = drawn
    return (drawn != drafted).cpu().numpy()


def _table(stream: Stream, drafts: Drafts) -> Tensor:
    """Return (8, all lanes) int64 on the CPU, the fields of `Lanes`."""
    positions = torch.arange(drafts.size) + stream.num_used - 1
    slots, zero = stream.slots_at(positions), torch.zeros_like(positions)
    outputs = torch.where(torch.as_tensor(drafts.is_action), SCRATCH, positions + 1)
    fields = Lanes(
        positions=positions,
        slots=slots,
        inputs=slots,
        outputs=stream.slots_at(outputs),
        steps=zero,
        frames=torch.as_tensor(drafts.frames + stream.num_generated),
        rows=torch.as_tensor(drafts.rows),
        columns=torch.as_tensor(drafts.columns),
    )
    return torch.stack(fields)
