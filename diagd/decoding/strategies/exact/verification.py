"""Write the raster video, token for token, in fewer steps: the algorithm that all rules share.

The noise of a draw is bound to its place, so the raster sample is the fixed point of "draft, feed
all drafts causally, draw again". A step feeds draft tokens behind the verified prefix and drafts
ahead of it (see `Drafts`); a draw replaces the draft it was to confirm. What stands before the
first change is final, for it was drawn after final tokens only: at least one token a step (Jacobi
decoding, arXiv:2305.10427, with noise bound to the place). Keys and values of final tokens stay,
the others are overwritten.
"""

from collections.abc import Iterator

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
    table, first_frame, frame = _table(stream, layout), stream.num_generated, 0
    while not drafts.is_done:
        first = drafts.num_verified
        lanes = drafts.choose()
        changed = _feed(stream, table, lanes, drafts.verified, rule)
        accepted = drafts.update(lanes, changed)
        t, i, j = drafts.places[first]
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
    table, verified = torch.stack(lane), [0] * stream.batch_size

    def dry_step(num_lanes: int) -> None:
        _feed(stream, table, [0] * num_lanes, verified, None)

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
    fresh = drafts.unfed(frame)
    if fresh:
        base = stream.num_used - (frame - 1) * layout.slots_per_frame
        positions = torch.tensor(fresh, device=stream.tokens.device) + base
        newest = stream.tokens[:, stream.slots_at(positions - layout.slots_per_frame)]
        stream.tokens[:, stream.slots_at(positions)] = newest


@torch.inference_mode()
def _feed(
    stream: Stream,
    table: Tensor,
    chosen: list[int],
    verified: list[int],
    rule: DrawRule | None,
) -> list[list[bool]]:
    """Feed lanes, replace drafts by draws, and return (B, L) where they differ.

    Args:
        table: (8, all lanes) on the CPU, the fields of `Lanes`.
        verified: lanes of each row of the batch that are final.
    """
    count, indices = len(chosen), torch.tensor(chosen)
    lanes = table[:, indices]
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
        final = (indices < torch.tensor(verified)[:, None]).to(drawn.device)
        drawn = torch.where(final, drafted, drawn)
        stream.tokens[:, lane.outputs] = drawn
    return (drawn != drafted).cpu().numpy().tolist()


def _table(stream: Stream, layout: SequenceLayout) -> Tensor:
    """Return (8, all lanes) int64 on the CPU, the fields of `Lanes`."""
    lanes = torch.arange(layout.num_slots)
    positions, zero = lanes + stream.num_used - 1, torch.zeros_like(lanes)
    within = lanes % layout.slots_per_frame - layout.num_action_tokens
    cells = within.clamp(min=0)
    slots = stream.slots_at(positions)
    outputs = torch.where(within < 0, SCRATCH, positions + 1)
    fields = Lanes(
        positions=positions,
        slots=slots,
        inputs=slots,
        outputs=stream.slots_at(outputs),
        steps=zero,
        frames=lanes // layout.slots_per_frame + stream.num_generated,
        rows=cells // layout.grid.width,
        columns=cells % layout.grid.width,
    )
    return torch.stack(fields)
