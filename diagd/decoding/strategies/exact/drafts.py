"""Which lanes a step of exact decoding feeds, and how far its draws are final.

A draw depends on all tokens before it, so it is final once they are: the verified prefix grows up
to the first draw that differs from its draft, that draw included. A step feeds the lanes behind the
prefix, as far as they are likely to be confirmed. With what is left of its lanes it drafts ahead:
lanes that a diagonal opens, and stale ones, whose neighbours have changed since they were fed. The
others would most likely draw what they drew; they wait.

Lanes are counted from 0, the lane at the last slot before the generation; lane q writes slot q.
"""

import numpy as np

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
        verified: (B,) int64, lanes of each row that are final.
        num_verified: lanes that are final in every row of the batch.
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
        self.size = layout.num_slots
        first = 0 if layout.has_prompt else 1
        self.verified, self.num_verified = np.full(batch_size, first), first
        self.is_fed = np.zeros(self.size, bool)
        self.is_stale = np.zeros(self.size, bool)
        grid, num_actions = layout.grid, layout.num_action_tokens
        lanes = np.arange(self.size).reshape(grid.num_frames, -1)
        self.cells = lanes[:, num_actions:].reshape(-1, grid.width)  # rows of all frames
        self.is_action = np.zeros(self.size, bool)
        self.is_action[lanes[:, :num_actions].ravel()] = True
        within = (np.arange(self.size) % layout.slots_per_frame - num_actions).clip(0)
        self.frames = np.arange(self.size) // layout.slots_per_frame
        self.rows, self.columns = np.divmod(within, grid.width)
        self.doubts = np.where(self.is_action, 0, BUNDLED.fresh)  # chances of change
        self.neighbours = self._neighbours()

    @property
    def is_done(self) -> bool:
        """Whether all tokens are final."""
        return self.num_verified >= self.size

    def choose(self) -> np.ndarray:
        """Return the lanes of the next step, ascending, (L,) int64, 1 <= L <= num_lanes."""
        first = self.num_verified
        if not self.lag:
            return np.arange(first, min(first + self.num_lanes, self.size))
        survival = np.cumprod(1 - self.doubts[first : first + self.num_lanes - 1])
        reached = int(np.count_nonzero(survival > BUNDLED.least_survival))
        end = min(first + 1 + reached, self.size)
        room = min(self.num_lanes - (end - first), int(self.num_lanes * BUNDLED.draft_share))
        return np.concatenate([np.arange(first, end), self._ahead(end)[:room]])

    def update(self, lanes: np.ndarray, changed: np.ndarray) -> int:
        """Take in a step: let the prefix grow, and mark who has become stale.

        Args:
            lanes: (L,) int64, what `choose` returned.
            changed: (B, L) bool, where a draw differs from the draft it replaces.

        Returns:
            Lanes by which the slowest row advanced.
        """
        before = self.num_verified
        changed = changed & (lanes >= self.verified[:, None]) & ~self.is_action[lanes]
        run = len(lanes) if lanes[-1] == before + len(lanes) - 1 else 0
        run = run or int(np.argmin(lanes == before + np.arange(len(lanes))))
        found = changed[:, :run]
        accepted = np.where(found.any(1), found.argmax(1) + 1, run)
        self.verified = np.maximum(self.verified, before + accepted)
        self.num_verified = int(self.verified.min())
        self.is_fed[lanes] = True
        self.is_stale[lanes] = False
        if self.lag:
            turned = changed.any(0)
            doubts = np.where(turned, BUNDLED.changed, BUNDLED.confirmed)
            self.doubts[lanes] = doubts * ~self.is_action[lanes]
            self._spread(lanes[turned])
        return self.num_verified - before

    def _ahead(self, start: int) -> np.ndarray:
        """Return lanes from `start` on that are stale or that the diagonal has reached."""
        height, width = self.layout.grid.height, self.layout.grid.width
        first = int(self.frames[self.num_verified] * height + self.rows[self.num_verified])
        cells = self.cells[first : first + height]
        reached = np.count_nonzero(self.is_fed[cells], axis=1)  # a row is fed from its left
        limit = np.minimum(reached + self.width, width)
        behind = np.where(reached < width, reached - self.lag, width)
        limit[1:] = np.minimum(limit[1:], behind[:-1])
        columns = np.arange(width)
        opened = cells[(columns >= reached[:, None]) & (columns < limit[:, None])]
        wanted = self.is_stale.copy()
        wanted[opened] = True
        if len(opened):  # drafts see their actions
            seen = slice(opened[-1])
            wanted[seen] |= self.is_action[seen] & ~self.is_fed[seen]
        return np.flatnonzero(wanted[start:]) + start

    def _spread(self, lanes: np.ndarray) -> None:
        """Let the fed neighbours of tokens that changed be stale, and doubted."""
        neighbours = self.neighbours[lanes]
        near, right = neighbours[neighbours > self.num_verified], neighbours[:, 0]
        self.is_stale[near] = self.is_fed[near]
        self.doubts[near] = np.maximum(self.doubts[near], BUNDLED.stale)
        self.doubts[right] = np.maximum(self.doubts[right], BUNDLED.beside_a_change)

    def _neighbours(self) -> np.ndarray:
        """Return (lanes, neighbours) which lanes to look at when one changes, 0 for none."""
        grid = self.layout.grid
        down, right = np.array(BUNDLED.neighbours).T
        rows, columns = self.rows[:, None] + down, self.columns[:, None] + right
        inside = (rows < grid.height) & (columns >= 0) & (columns < grid.width)
        inside &= ~self.is_action[:, None]
        lanes = np.arange(self.size)[:, None] + down * grid.width + right
        return np.where(inside, lanes, 0)
