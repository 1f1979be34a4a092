"""Which lanes a pass of exact decoding feeds, and how far its draws are final.

A draw depends on all tokens before it, so it is final once they are: the front moves up to the
first draw that differs from its guess, that draw included. A pass feeds the lanes from the front
on, as far as they are likely to be confirmed. With what is left of its lanes it drafts ahead: lanes
that a diagonal opens, and stale ones, whose neighbours have changed since they were fed. The others
would most likely draw what they drew; they wait for the front.

Lanes are counted from 0, the lane at the last slot before the generation; lane q writes slot q.
"""

import numpy as np

from diagd.decoding.layout import SequenceLayout

# Rows down and columns right of a token whose draws are likely to change when it does: 9 to 45% of
# the time on the bundled model (docs/exact.md). The first is the one to its right.
NEIGHBOURS = ((0, 1), (0, 2), (1, -1), (1, 0), (1, 1), (2, 0))
# How often a draw at the front differs from its guess, by what happened to it last (docs/exact.md):
# never drawn; the token to the left changed, with it or since; another neighbour did; it changed
# itself; it was confirmed.
FRESH, BESIDE_A_CHANGE, STALE, CHANGED, CONFIRMED = 0.92, 0.45, 0.1, 0.07, 0.02
LEAST_SURVIVAL = 0.3  # of a lane to be fed at the front
DRAFTS = 0.7  # most of a pass's lanes that draft ahead, though the front may leave more


class Frontier:
    """What is known of every lane of a generation: fed or not, stale or not, final or not.

    Args:
        layout: of the generation.
        batch_size: rows; they share lanes, so the slowest one sets the pace.
        num_lanes: most lanes of a pass.
        draft_lag: columns that a row's drafts keep behind those of the row above; 0 drafts nothing
            and fills the pass with the lanes at the front (plain Jacobi decoding).
        draft_width: columns that a row's drafts advance in a pass.
    """

    def __init__(
        self,
        layout: SequenceLayout,
        batch_size: int,
        num_lanes: int,
        draft_lag: int,
        draft_width: int,
    ) -> None:
        self.layout, self.num_lanes = layout, num_lanes
        self.draft_lag, self.draft_width = draft_lag, draft_width
        self.size = layout.num_slots
        first = 0 if layout.has_prompt else 1
        self.fronts = np.full(batch_size, first)  # first lane of each row that is not final
        self.is_fed = np.zeros(self.size, bool)
        self.is_stale = np.zeros(self.size, bool)
        grid, num_actions = layout.grid, layout.num_action_tokens
        lanes = np.arange(self.size).reshape(grid.num_frames, -1)
        self.cells = lanes[:, num_actions:].reshape(-1, grid.width)  # rows of all frames
        self.actions = lanes[:, :num_actions]
        self.is_action = np.zeros(self.size, bool)
        self.is_action[self.actions.ravel()] = True
        within = (np.arange(self.size) % layout.slots_per_frame - num_actions).clip(0)
        self.frames = np.arange(self.size) // layout.slots_per_frame
        self.rows, self.columns = np.divmod(within, grid.width)
        self.doubts = np.where(self.is_action, 0, FRESH)  # chances of change at the front
        self.neighbours = self._neighbours()

    @property
    def front(self) -> int:
        """The first lane that is not final in every row of the batch."""
        return int(self.fronts.min())

    @property
    def is_done(self) -> bool:
        """Whether all tokens are final."""
        return self.front >= self.size

    def choose(self) -> np.ndarray:
        """Return the lanes of the next pass, ascending, (L,) int64, 1 <= L <= num_lanes."""
        front = self.front
        if not self.draft_lag:
            return np.arange(front, min(front + self.num_lanes, self.size))
        survival = np.cumprod(1 - self.doubts[front : front + self.num_lanes - 1])
        end = min(front + 1 + int((survival > LEAST_SURVIVAL).sum()), self.size)
        room = min(self.num_lanes - (end - front), int(self.num_lanes * DRAFTS))
        return np.concatenate([np.arange(front, end), self._drafts(end)[:room]])

    def update(self, lanes: np.ndarray, changed: np.ndarray) -> int:
        """Take in a pass: move the fronts, and mark who has become stale.

        Args:
            lanes: (L,) int64, what `choose` returned.
            changed: (B, L) bool, where a draw differs from the guess it replaces.

        Returns:
            Lanes by which the slowest row advanced.
        """
        before = self.front
        changed = changed & (lanes >= self.fronts[:, None]) & ~self.is_action[lanes]
        run = len(lanes) if lanes[-1] == before + len(lanes) - 1 else 0
        run = run or int(np.argmin(lanes == before + np.arange(len(lanes))))
        found = changed[:, :run]
        accepted = np.where(found.any(1), found.argmax(1) + 1, run)
        self.fronts = np.maximum(self.fronts, before + accepted)
        self.is_fed[lanes] = True
        self.is_stale[lanes] = False
        if self.draft_lag:
            turned = changed.any(0)
            self.doubts[lanes] = np.where(turned, CHANGED, CONFIRMED) * ~self.is_action[lanes]
            self._spread(lanes[turned])
        return self.front - before

    def _drafts(self, start: int) -> np.ndarray:
        """Return lanes from `start` on that are stale or that the diagonal has reached."""
        height, width = self.layout.grid.height, self.layout.grid.width
        first = int(self.frames[self.front] * height + self.rows[self.front])
        cells = self.cells[first : first + height]
        is_fed = self.is_fed[cells]
        reached = np.where(is_fed.all(1), width, is_fed.argmin(1))
        limit = np.minimum(reached + self.draft_width, width)
        behind = np.where(reached < width, reached - self.draft_lag, width)
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
        near, right = neighbours[neighbours > self.front], neighbours[:, 0]
        self.is_stale[near] = self.is_fed[near]
        self.doubts[near] = np.maximum(self.doubts[near], STALE)
        self.doubts[right] = np.maximum(self.doubts[right], BESIDE_A_CHANGE)

    def _neighbours(self) -> np.ndarray:
        """Return (lanes, len(NEIGHBOURS)) which lanes to look at when one changes, 0 for none."""
        grid = self.layout.grid
        down, right = np.array(NEIGHBOURS).T
        rows, columns = self.rows[:, None] + down, self.columns[:, None] + right
        inside = (rows < grid.height) & (columns >= 0) & (columns < grid.width)
        inside &= ~self.is_action[:, None]
        lanes = np.arange(self.size)[:, None] + down * grid.width + right
        return np.where(inside, lanes, 0)
