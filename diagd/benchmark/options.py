"""Options of `diagd bench` and `diagd doctor`."""

from dataclasses import dataclass, replace
from typing import Literal

import tyro

from diagd.backends.names import Backend, DTypeChoice
from diagd.checks import check_at_least, check_values
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.table import Diagonal, Raster, Strategy, parse_strategies
from diagd.families.defaults import GenerationDefaults
from diagd.flags import Device, OutputFile, RowLags

QUICK_STEPS = 30


@dataclass(frozen=True)
class BenchOptions:
    """Run raster, diagonal decoding and other strategies and compare.

    They go on from one frame, and then, since a step takes longer the more it sees, from as many as
    leave room for the frames to generate: what a stream comes to that has filled its context.

    How many steps exact and the like take follows how sure the model is: random weights say little
    about it. Trained ones (doom) after a context of random tokens, as here, take more than on
    recorded clips, which runs/exact.py and `diagd evaluate` measure.
    """

    model: str = "doom"  # doom, maze or a folder; or a preset with random weights: mc-ar-42m
    grid: str | None = None  # frames x rows x columns to generate; default 2 frames of the model's
    row_lag: RowLags = (1, 2, 4)  # a row for the diagonals of each
    # more rows: k=1,d=14, exact, exact,lanes=32, zipar=4 ...
    strategy: tuple[str, ...] = ()
    overlap: bool = False  # frames start row_lag * rows steps apart (Cosmos); else spatial only
    # frames to go on from, rows for each number; default: 1, and what fills the context
    context_frames: tuple[int, ...] = ()
    dtype: tuple[DTypeChoice, ...] = ("float32",)  # of the weights
    backend: tuple[Backend, ...] = ("auto",)  # what runs the steps
    device: Device = "cpu"  # cpu, cuda, cuda:1
    # hf: Hugging Face generate on the same weights; auto: where it has such a model, tokens are
    # greedy, and no step is skipped
    baseline: Literal["auto", "hf", "none"] = "auto"
    # within a minute: raster and k=1 after one frame, from a sample of their steps, no Hugging Face
    quick: bool = False
    repeats: int = 3  # timed runs of every row
    steps: int | None = None  # time so many steps of a run, evenly spread, and skip the others
    random_weights: bool = False  # whatever the checkpoint holds; presets always have random ones
    temperature: float = 0.0  # 0 is greedy
    top_p: float | None = GenerationDefaults.top_p  # keep the likeliest tokens up to this mass
    seed: int = 0  # of random weights, prompt and actions
    submit: OutputFile | None = None  # JSON file of the measurement for LEADERBOARD.md's machines

    def __post_init__(self) -> None:
        check_at_least(self, repeats=1, steps=1, context_frames=1)
        if self.submit and not self.is_comparable():
            raise ValueError(
                "submit needs the same measurement from all machines, that of doom with raster and "
                "k=1: leave out --model, --grid, --steps, --quick and the like"
            )
        if self.quick:
            self.shortened()  # is checked like any other
            return
        if self.steps and self.baseline == "hf":
            raise ValueError("steps skips most of our own steps: it needs --baseline none")
        if self.steps and "webgpu" in self.backend:
            raise ValueError("quick and steps time steps, webgpu runs whole frames: leave it out")
        if self.temperature and self.baseline == "hf":
            raise ValueError("the baseline hf is greedy: temperature needs --baseline none")
        grid = None if self.grid is None else TokenGrid.parse(self.grid)
        for strategy in self.strategies(grid):
            if self.steps and not strategy.has_schedule:
                raise ValueError(f"steps skips most steps, of which {strategy} needs every one")
            strategy.check(grid)

    def shortened(self) -> "BenchOptions":
        """Replace --quick by what it stands for."""
        if not self.quick:
            return self
        return replace(
            self,
            quick=False,
            baseline="none",
            row_lag=(1,),
            steps=self.steps or QUICK_STEPS,
            context_frames=self.context_frames or (1,),
        )

    def strategies(self, grid: TokenGrid | None = None) -> list[Strategy]:
        """Return raster, a diagonal for each row_lag, and the others, each once."""
        height = grid.height if self.overlap and grid is not None else None
        lags = [Diagonal(k, None if height is None else k * height) for k in self.row_lag]
        return list(dict.fromkeys([Raster(), *lags, *parse_strategies(self.strategy)]))

    def sampling(self) -> SamplingOptions:
        return SamplingOptions(self.temperature, top_p=self.top_p if self.temperature else None)

    def is_comparable(self) -> bool:
        """Return whether rows are those that all machines have; there may be others beside them."""
        free = ("dtype", "backend", "device", "row_lag", "strategy", "baseline")
        common = BenchOptions(**{name: getattr(self, name) for name in free})
        return 1 in self.row_lag and replace(self, submit=None) == common


@dataclass(frozen=True)
class DoctorOptions:
    """Look at Python, PyTorch, processor, memory, compiler and extras; then measure.

    With --json the document has `machine`, `gpu` (null on the CPU), `kernels` (and
    how those `tried` did), `choices` (what auto becomes, and why, and `fastest`; what
    a step takes for each of the `candidates`), `extras` (the modules that each lacks),
    `frames_per_second` of the model by strategy, as `diagd play` shows it (none for
    models that bring no prompt), and `warnings`.
    """

    device: Device = "cpu"  # cpu, cuda, cuda:1
    model: str = "doom"  # for which is chosen, and which is probed: bundled, a folder, a checkpoint
    seconds: float = 5.0  # of the speed probe; 0 leaves it out
    # time a step of the model's shape now, and not from what was timed within the last day
    again: tyro.conf.FlagCreatePairsOff[bool] = False

    def __post_init__(self) -> None:
        check_values(self, ("seconds", 0 <= self.seconds < float("inf"), "0 or more"))
