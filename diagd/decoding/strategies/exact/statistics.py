"""How drafts fare on a model, by measurement: what choosing lanes is tuned by, and nothing else.

Wrong numbers cost speed, never tokens.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftStatistics:
    """What was measured on one model.

    Attributes:
        source: which model, and where the measurement is told.
        tokens_per_step: pairs of most lanes in a step and tokens that become final in it.
        draft_lag, drafted_lanes: the best lag of drafts, and the lanes above which none pay.
        neighbours: rows down and columns right of a token whose draws are likely to change when it
            does; the first is the one to its right.
        fresh, beside_a_change, stale, changed, confirmed: how often a draw at the verified prefix
            differs from its draft, by what happened to the draft last: nothing yet; the token to
            its left changed with it or since; another neighbour did; it changed itself; it was
            confirmed.
        least_survival: chance of a lane being reached, below which it is not fed there.
        draft_share: most of a step's lanes that draft ahead.
    """

    source: str
    tokens_per_step: tuple[tuple[int, float], ...]
    draft_lag: int
    drafted_lanes: int
    neighbours: tuple[tuple[int, int], ...]
    fresh: float
    beside_a_change: float
    stale: float
    changed: float
    confirmed: float
    least_survival: float
    draft_share: float

    @property
    def num_lanes(self) -> tuple[int, ...]:
        """The lanes that were tried."""
        return tuple(lanes for lanes, _ in self.tokens_per_step)


BUNDLED = DraftStatistics(
    source="the bundled model at temperature 1 on ViZDoom clips; docs/log.md, exact decoding",
    tokens_per_step=(
        (1, 1.0),
        (8, 2.9),
        (12, 3.64),
        (16, 4.36),
        (24, 5.44),
        (32, 6.32),
        (40, 7.16),
        (96, 9.11),
        (192, 10.77),
    ),
    draft_lag=2,
    drafted_lanes=40,
    neighbours=((0, 1), (0, 2), (1, -1), (1, 0), (1, 1), (2, 0)),
    fresh=0.92,
    beside_a_change=0.45,
    stale=0.1,
    changed=0.07,
    confirmed=0.02,
    least_survival=0.3,
    draft_share=0.7,
)
