"""Generation defaults: the settings of a model's authors, unless overridden."""

from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, get_args, get_type_hints

from diagd.checks import brief
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.strategies.table import Diagonal, Strategy, parse_strategy
from diagd.models.config import ModelConfig

_MIN = {"context_frames": 0, "num_frames": 1, "row_lag": 1, "keep_frames": 0, "first_id": 0}
_MIN |= {"guidance": 0, "remember": 2}
_MAX, _MAX_FPS = 2**28, 1000
_JSON_TYPES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
_JSON_TYPES |= {NoneType: "null"}


@dataclass(frozen=True)
class GenerationDefaults:
    """Settings of a model's authors; flags of `diagd generate` override them."""

    fps: float = 8.75
    context_frames: int = 4  # of the prompt; 0: no prompt, a frame follows from its action
    num_frames: int = 16  # to generate
    decoding: str | None = None  # strategy by name; None: diagonals by the next two
    row_lag: int = 1  # the paper's k
    overlap: bool = False  # start frames row_lag * height steps apart
    temperature: float = 1.0  # this and the next three: see `SamplingOptions`
    top_k: int | None = None
    top_p: float | None = 0.9
    exclusive_top_p: bool = False
    remember: int | None = None  # maximum frames that the model sees; None: as many as it holds
    keep_frames: int | None = None  # prefilled again in a full context; None: as in `Stream`
    guidance: float = 1.0  # classifier-free guidance scale; 1: none
    first_id: int = 0  # lowest visual id at the first place of a frame
    row_ends: bool = False  # whether the last visual id ends each row, and is used only there

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            is_whole = type(value) is int and isinstance(0.0, kind)  # an int is a valid float
            is_flag = isinstance(value, bool) and kind is not bool
            if is_flag or not (isinstance(value, kind) or is_whole):
                expected = " or ".join(_JSON_TYPES[one] for one in get_args(kind) or (kind,))
                raise ValueError(f"{name} must be {expected}, got {brief(value, 40)}")
        for name, low in _MIN.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= _MAX:
                raise ValueError(f"{name} must be {low} to {_MAX}, got {brief(value, 40)}")
        if not 0 < self.fps <= _MAX_FPS:
            raise ValueError(f"fps must be above 0 and at most {_MAX_FPS}, got {self.fps}")
        self.sampling(None, None)  # validates its own arguments
        self.strategy(1)

    def strategy(
        self, height: int, row_lag: int | None = None, frame_lag: int | None = None
    ) -> Strategy:
        """Return the default strategy for frames of `height` rows of tokens.

        If a lag is given, it is diagonals, with the other lag filled in.
        """
        if self.decoding is not None and row_lag is frame_lag is None:
            return parse_strategy(self.decoding)
        row_lag = self.row_lag if row_lag is None else row_lag
        if frame_lag is None and self.overlap:
            frame_lag = row_lag * height
        return Diagonal(row_lag, frame_lag)

    def sampling(
        self, options: SamplingOptions | None, valid_range: tuple[int, int] | Any
    ) -> SamplingOptions:
        """Complete options, if given, with these defaults and the valid range."""
        if options is None:
            rules = (self.top_k, self.top_p) if self.temperature else (None, None)
            options = SamplingOptions(self.temperature, *rules)
        if options.valid_range is not None:
            return options
        exclusive = options.exclusive_top_p or self.exclusive_top_p
        return replace(options, valid_range=valid_range, exclusive_top_p=exclusive)


def image_defaults(**settings: Any) -> GenerationDefaults:
    """Return settings of an image model: videos of one frame without a prompt clip."""
    return GenerationDefaults(fps=1, context_frames=0, num_frames=1, **settings)


def visual_ranges(defaults: GenerationDefaults, config: ModelConfig) -> tuple[int, int] | Any:
    """Return the valid visual ids: one range, or a tensor with one for each place."""
    num_ids = config.image_vocab_size
    if not (defaults.first_id or defaults.row_ends):
        return 0, num_ids
    import torch  # the defaults can be read without torch

    ranges = torch.zeros(config.grid_height, config.grid_width, 2, dtype=torch.int64)
    ranges[..., 1] = num_ids - defaults.row_ends
    ranges[0, 0, 0] = defaults.first_id
    if defaults.row_ends:
        ranges[:, -1] = torch.tensor([num_ids - 1, num_ids])
    return ranges
