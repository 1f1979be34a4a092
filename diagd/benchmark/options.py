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
from diagd.pipeline.options import AdapterFlag

QUICK_STEPS = 30


@dataclass(frozen=True)
class BenchOptions(AdapterFlag):
    """Time raster, diagonal decoding and other strategies side by side.

    By default each is timed after one context frame and with a full context, as steps that attend
    to more slots are slower.

    The number of steps of exact and similar strategies depends on how confident the model is, so
    random weights say little about it. Trained weights (doom) after random tokens, as here, need
    more steps than on recorded clips; for those see runs/exact.py and `diagd evaluate`.
    """

    model: str = "doom"  # doom, maze or a folder; or a preset with random weights: mc-ar-42m
    grid: str | None = None  # frames x rows x columns to generate; default: 2 of the model's frames
    row_lag: RowLags = (1, 2, 4)  # time diagonal decoding with each of these row lags
    # more strategies to time: k=1,d=14, exact, exact,lanes=32, zipar=4 ...
    strategy: tuple[str, ...] = ()
    overlap: bool = False  # start frames row_lag * rows steps apart (Cosmos); default: spatial only
    # context lengths to time, in frames; default: 1, and a full context
    context_frames: tuple[int, ...] = ()
    dtype: tuple[DTypeChoice, ...] = ("float32",)  # weight types
    backend: tuple[Backend, ...] = ("auto",)  # execution backends
    device: Device = "cpu"  # run on cpu, cuda or cuda:1
    # hf: Hugging Face generate on the same weights; auto: hf if it has the model, decoding is
    # greedy and no step is skipped
    baseline: Literal["auto", "hf", "none"] = "auto"
    # benchmark in a minute: raster and k=1 after one frame, sampled steps, no Hugging Face
    quick: bool = False
    repeats: int = 3  # number of timed runs per row
    steps: int | None = None  # time only this many steps of a run, evenly spaced; skip the others
    random_weights: bool = False  # ignore the checkpoint's weights; presets always have random ones
    temperature: float = 0.0  # sampling temperature; 0: greedy
    top_p: float | None = GenerationDefaults.top_p  # keep the most likely tokens up to this mass
    seed: int = 0  # seed of random weights, prompt and actions
    submit: OutputFile | None = None  # JSON file to write for LEADERBOARD.md's table of machines

    def __post_init__(self) -> None:
        check_at_least(self, repeats=1, steps=1, context_frames=1)
        if self.submit and not self.is_comparable():
            raise ValueError(
                "submit needs the same measurement on all machines, doom with raster and k=1: "
                "leave out --model, --grid, --steps, --quick and the like"
            )
        if self.quick:
            self.shortened()  # the shortened options are validated as well
            return
        if self.steps and self.baseline == "hf":
            raise ValueError("steps needs --baseline none: only our own steps can be skipped")
        if self.steps and "webgpu" in self.backend:
            raise ValueError("quick and steps cannot time webgpu, which runs whole frames")
        if self.temperature and self.baseline == "hf":
            raise ValueError("temperature needs --baseline none: the baseline hf is greedy")
        grid = None if self.grid is None else TokenGrid.parse(self.grid)
        for strategy in self.strategies(grid):
            if self.steps and not strategy.has_schedule:
                raise ValueError(f"steps must be left out: {strategy} needs every step")
            strategy.check(grid)

    def shortened(self) -> "BenchOptions":
        """Replace --quick by the options it abbreviates."""
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
        """Return raster, a diagonal for each row_lag, and the other strategies, each once."""
        height = grid.height if self.overlap and grid is not None else None
        lags = [Diagonal(k, None if height is None else k * height) for k in self.row_lag]
        return list(dict.fromkeys([Raster(), *lags, *parse_strategies(self.strategy)]))

    def sampling(self) -> SamplingOptions:
        return SamplingOptions(self.temperature, top_p=self.top_p if self.temperature else None)

    def is_comparable(self) -> bool:
        """Return whether the rows include those of LEADERBOARD.md."""
        free = ("dtype", "backend", "device", "row_lag", "strategy", "baseline")
        common = BenchOptions(**{name: getattr(self, name) for name in free})
        return 1 in self.row_lag and replace(self, submit=None) == common


@dataclass(frozen=True)
class DoctorOptions:
    """Report Python, PyTorch, processor, memory, compiler and extras; then measure speed.

    With --json the document has `machine`, `gpu` (null on the CPU), `kernels` (with the
    result of each build in `tried`), `choices` (what auto chooses and why, `fastest`, and
    the step time of each of `candidates`), `extras` (the modules missing from each),
    `frames_per_second` of the model by strategy, as in `diagd play` (empty for models
    without a prompt), and `warnings`.
    """

    device: Device = "cpu"  # run on cpu, cuda or cuda:1
    model: str = "doom"  # model to choose for and to probe: bundled, a folder, a checkpoint
    seconds: float = 5.0  # duration of the speed probe; 0 skips it
    # time steps now instead of reusing timings of the last day
    again: tyro.conf.FlagCreatePairsOff[bool] = False

    def __post_init__(self) -> None:
        check_values(self, ("seconds", 0 <= self.seconds < float("inf"), "0 or more"))
