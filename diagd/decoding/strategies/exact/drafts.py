"""Which lanes a step of exact decoding feeds, and how far its draws are final.

A draw depends on all tokens before it, so it is final once they are: the verified prefix grows up
to the first draw that differs from its draft, that draw included. A step feeds the lanes behind the
prefix, as far as they are likely to be confirmed. With what is left of its lanes it drafts ahead:
lanes that a diagonal opens, and stale ones, whose neighbours have changed since they were fed. The
others would most likely draw what they drew; they wait.

Lanes are counted from 0, the lane at the last slot before the generation; lane q writes slot q.
They are few a step, so lists and loops take half the time that arrays do.
"""

from collections.abc import Sequence
from itertools import chain, compress, islice, product, takewhile

from diagd.decoding.layout import SequenceLayout
from diagd.decoding.strategies.exact.statistics import BUNDLED


class Drafts:
    """What is known of every lane of a generation: fed or not, stale or not, verified or not.

    Args:
        layout: of the generation.
        batch_size: rows; they share lanes, so the slowest one sets the pace.
        num_lanes: most lanes of a step.
        lag: columns that a row's drafts keep behind those of the row above; 0 drafts nothing ahead
            and fills the step with the lanes behind the prefix (plain Jacobi decoding). None is
            the best by the statistics.
        width: columns that a row's drafts advance in a step.

    Attributes:
        size: lanes of the generation.
        verified: of each row of the batch, how many lanes are final.
        num_verified: lanes that are final in every one.
        fed_columns: of each row of tokens, all frames' in turn, how many were fed, from its left.
        stale: lanes that were fed, and are to be fed again.
    """

    def __init__(
        self,
        layout: SequenceLayout,
        batch_size: int,
        num_lanes: int,
        lag: int | None,
        width: int = 3,
    ) -> None:
        if lag is None:
            lag = BUNDLED.draft_lag if num_lanes <= BUNDLED.drafted_lanes else 0
        self.layout, self.num_lanes, self.lag, self.width = layout, num_lanes, lag, width
        self.size, self.height = layout.num_slots, layout.grid.height
        self.num_verified = 0 if layout.has_prompt else 1
        self.verified = [self.num_verified] * batch_size
        self.fed_columns = [0] * (layout.grid.num_frames * self.height)
        self.stale: set[int] = set()
        self.places = [self._place(lane) for lane in range(self.size)]
        inside = (lane % layout.slots_per_frame for lane in range(self.size))
        self.is_action = [within < layout.num_action_tokens for within in inside]
        self.unfed_actions = dict.fromkeys(compress(range(self.size), self.is_action))  # in order
        # chances that a draw will change its draft
        self.doubts = [0.0 if is_action else BUNDLED.fresh for is_action in self.is_action]

    @property
    def is_done(self) -> bool:
        """Whether all tokens are final."""
        return self.num_verified >= self.size

    def unfed(self, frame: int) -> list[int]:
        """Return the lanes of a frame's tokens that were not fed; none behind the last frame."""
        rows = islice(enumerate(self.fed_columns), frame * self.height, (frame + 1) * self.height)
        width = self.layout.grid.width
        return [self._first_of(row) + j for row, fed in rows for j in range(fed, width)]

    def choose(self) -> list[int]:
        """Return the lanes of the next step, ascending, at least one and at most num_lanes."""
        first = self.num_verified
        most = min(first + self.num_lanes, self.size)
        if not self.lag:
            return list(range(first, most))
        end, survival = first + 1, 1.0
        while end < most:
            survival *= 1 - self.doubts[end - 1]
            if survival <= BUNDLED.least_survival:
                break
            end += 1
        room = min(self.num_lanes - (end - first), int(self.num_lanes * BUNDLED.draft_share))
        return [*range(first, end), *self._ahead(end)[:room]]

    def update(self, lanes: Sequence[int], changed: Sequence[Sequence[bool]]) -> int:
        """Take in a step: let the prefix grow, and mark who has become stale.

        Args:
            lanes: what `choose` returned.
            changed: of each row of the batch and lane, whether a draw differs from the draft it
                replaces.

        Returns:
            Lanes by which the slowest row advanced.
        """
        before, turned = self.num_verified, set[int]()
        run = next((i for i, lane in enumerate(lanes) if lane != before + i), len(lanes))
        for b, of_row in enumerate(changed):
            found = [
                i
                for i, lane in enumerate(lanes)
                if of_row[i] and lane >= self.verified[b] and not self.is_action[lane]
            ]
            turned.update(lanes[i] for i in found)
            accepted = found[0] + 1 if found and found[0] < run else run
            self.verified[b] = max(self.verified[b], before + accepted)
        self.num_verified = min(self.verified)
        self.stale.difference_update(lanes)
        for lane in lanes:
            if self.is_action[lane]:
                self.unfed_actions.pop(lane, None)
            else:
                frame, row, column = self.places[lane]
                row += frame * self.height
                self.fed_columns[row] = max(self.fed_columns[row], column + 1)
                self.doubts[lane] = BUNDLED.changed if lane in turned else BUNDLED.confirmed
        if self.lag:
            self._spread(turned)
        return self.num_verified - before

    def _ahead(self, start: int) -> list[int]:
        """Return lanes from `start` on that are stale or that the diagonal has reached."""
        width, opened = self.layout.grid.width, list[int]()
        frame, row, _ = self.places[self.num_verified]
        first = frame * self.height + row
        limit = width  # columns that the row above leaves free
        for row in range(first, min(first + self.height, len(self.fed_columns))):
            fed, lane = self.fed_columns[row], self._first_of(row)
            opened += range(lane + fed, lane + min(fed + self.width, limit))
            limit = fed - self.lag if fed < width else width
        last = opened[-1] if opened else 0  # drafts see their actions
        actions = takewhile(lambda lane: lane < last, self.unfed_actions)
        return sorted(lane for lane in chain(opened, self.stale, actions) if lane >= start)

    def _spread(self, lanes: set[int]) -> None:
        """Let the fed neighbours of tokens that changed be stale, and doubted."""
        width = self.layout.grid.width
        for lane, (number, (down, right)) in product(lanes, enumerate(BUNDLED.neighbours)):
            frame, row, column = self.places[lane]
            row, column, near = row + down, column + right, lane + down * width + right
            if row >= self.height or not 0 <= column < width:
                continue
            if not number:
                self.doubts[near] = max(self.doubts[near], BUNDLED.beside_a_change)
            if near > self.num_verified:
                self.doubts[near] = max(self.doubts[near], BUNDLED.stale)
                if column < self.fed_columns[frame * self.height + row]:
                    self.stale.add(near)

    def _first_of(self, row: int) -> int:
        """Return the lane of a row's first token."""
        frame, i = divmod(row, self.height)
        before = frame * self.layout.slots_per_frame + self.layout.num_action_tokens
        return before + i * self.layout.grid.width

    def _place(self, lane: int) -> tuple[int, int, int]:
        """Return frame, row and column of what a lane writes: row 0 and column 0 of actions."""
        frame, within = divmod(lane, self.layout.slots_per_frame)
        row, column = divmod(max(0, within - self.layout.num_action_tokens), self.layout.grid.width)
        return frame, row, column
