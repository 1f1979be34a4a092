"""The main job: generate a video with a world model and say how fast it was.

diagd generate                                       # the bundled model, its prompt, dream.mp4
diagd generate --actions "forward*8,left*8" --compare
diagd generate --prompt photo.jpg --actions forward --frames 8 --output dream.gif
diagd generate --model WHAM_200M.ckpt --prompt clip.npz
diagd generate --model Cosmos-Predict1-4B --tokenizer DV8x16x16-720p --prompt clip.mp4
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diagd.backends.devices import DTypeChoice, choose_dtype, device_of, dtype_of
from diagd.backends.prepare import Backend
from diagd.console import make_console, waiting
from diagd.data.saving import check_suffix
from diagd.decoding.plan import RowStart
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.strategies.diagonal import Diagonal, Raster
from diagd.decoding.strategies.exact.exact import Tolerant
from diagd.decoding.strategies.short_forms import strategy_of
from diagd.decoding.strategies.strategy import Strategy
from diagd.families.checkpoints import model_path
from diagd.families.defaults import GenerationDefaults
from diagd.flags import FrameLag, OptionalRowLag, OutputFile
from diagd.pipeline.coming import read_coming, read_text
from diagd.pipeline.generated_video import GeneratedVideo
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.outputs import check_writable, print_runs, report_runs, write_generated

RASTER_FRAMES = 2


@dataclass(frozen=True)
class GenerateOptions:
    """Generate a video from a prompt clip and actions, and write it as mp4 with a contact sheet.

    What is not given is a default of the model: of the bundled one, 16 frames after 4 with
    row_lag 1 at temperature 1 and top-p 0.9.
    """

    model: str = "doom"  # the bundled model, our folder, or a Cosmos, WHAM or MineWorld checkpoint
    config: Path | None = None  # a released checkpoint's config, if not beside it
    tokenizer: Path | None = None  # tokenizer folder; TorchScript in it (Cosmos) runs: trust it
    # any video or gif (its last frames are continued), picture, or npz; default: the bundled clip
    prompt: Path | None = None
    context_frames: int | None = None  # frames of the prompt that the model sees
    # such as forward*8,left*4 (the last goes on), or a jsonl file; default: the clip's, or the
    # bundled walk
    actions: str | None = None
    text: str | None = None  # what the video shows, for models that read a text
    text_encoder: Path | None = None  # folder of the T5 that encodes the text
    text_embedding: Path | None = None  # a text encoded before (safetensors), instead of both
    frames: int | None = None  # frames to generate
    # how to decode: raster, k=2, k=1,d=14, exact, jacobi, sjd, zipar=4 ...; or in short:
    strategy: str | None = None
    row_lag: OptionalRowLag = None  # the paper's k: columns a row runs ahead of the next one
    # the paper's d: steps between frames; default: a frame starts when the last is whole
    frame_lag: FrameLag = None
    # what stands in for a predecessor that is not known yet; default temporal
    row_start: RowStart | None = None
    raster: bool = False  # next-token prediction, one token a step
    exact: bool = False  # what raster would write, token for token, in fewer steps
    tolerance: float = 1.0  # let drafts stay that are so many times too unlikely for --exact
    compare: bool = False  # run raster as well; the video shows both side by side (raster left)
    raster_frames: int | None = None  # timed in raster order for the table; default 2, Cosmos 0
    temperature: float | None = None  # 0 is greedy
    top_k: int | None = None  # keep the k likeliest tokens
    top_p: float | None = None  # keep the likeliest tokens up to this mass
    seed: int = 0  # repeats a video exactly
    device: str = "cpu"  # cpu, cuda, cuda:1
    dtype: DTypeChoice = "auto"  # of the weights; auto: bfloat16 where the machine multiplies it
    backend: Backend = "auto"  # what runs the steps; auto is native on the CPU, cuda-graph on CUDA
    # .mp4, .gif or .webp, with a contact sheet beside it as .png; or .png, the sheet alone
    output: OutputFile = Path("dream.mp4")

    def __post_init__(self) -> None:
        for name, lowest in (("frames", 1), ("context_frames", 1), ("raster_frames", 0)):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name} must be at least {lowest}, got {value}")
        check_suffix(self.output)
        if self.tolerance != 1 and not self.exact:
            raise ValueError("tolerance needs --exact")
        if self.compare and self.decoding(GenerationDefaults(), 1) == Raster():
            raise ValueError("compare already runs raster; leave it out")

    def decoding(self, defaults: GenerationDefaults, height: int) -> Strategy:
        """Return the strategy that the flags name, for frames of so many rows of tokens."""
        lags = self.row_lag, self.frame_lag, self.row_start
        strategy = strategy_of(self.strategy, *lags, raster=self.raster, exact=self.exact)
        if self.tolerance != 1:
            return Tolerant(self.tolerance)
        if self.strategy is None and isinstance(strategy, Diagonal):
            return defaults.strategy(height, *lags)
        return strategy

    def sampling(self, defaults: GenerationDefaults) -> SamplingOptions:
        """Return how tokens are drawn; greedy needs no truncation."""
        temperature = defaults.temperature if self.temperature is None else self.temperature
        if temperature == 0:
            return SamplingOptions(0.0, self.top_k, self.top_p)
        return SamplingOptions(
            temperature, self.top_k, defaults.top_p if self.top_p is None else self.top_p
        )


def main(options: GenerateOptions) -> dict[str, Any]:
    """Generate, write, report."""
    console = make_console()
    sheet = options.output.with_suffix(".png")
    check_writable(options.output)
    check_writable(sheet)
    device = device_of(options.device)
    dtype = choose_dtype(options.dtype, device)
    world = VideoGenerator.from_pretrained(
        options.model,
        device,
        dtype_of(dtype),
        options.backend,
        int8=dtype == "int8",
        config=options.config,
        tokenizer=options.tokenizer,
    )
    defaults = world.defaults
    sampling = options.sampling(defaults)
    num_frames = options.frames or defaults.num_frames
    strategy = options.decoding(defaults, world.height)
    world.check(strategy, sampling)  # before raster ran in vain
    world.grids_of(num_frames)
    given = Path(options.model).parent if Path(options.model).is_file() else None
    folder = given or model_path(options.model)
    prompt = world.prompts.read_file(
        options.prompt or folder / "prompt.mp4", options.context_frames, num_frames
    )
    for note in prompt.notes:
        console.print(note)
    walk = folder / "walk.jsonl"
    actions = read_coming(options.actions, walk, prompt, world, num_frames, console)
    text = read_text(
        options.text, options.text_encoder, options.text_embedding, world.config.context_size
    )

    def run(num_frames: int, strategy: Strategy) -> GeneratedVideo:
        return world.generate(
            prompt.frames,
            None if actions is None else actions[:num_frames],
            num_frames,
            strategy=strategy,
            context_actions=prompt.context_actions,
            sampling=sampling,
            seed=options.seed,
            text=None if text is None else text.to(device),
        )

    step = world.tokenizer.temporal_compression
    timed = (RASTER_FRAMES if step == 1 else 0) if options.raster_frames is None else 0
    timed = num_frames if options.compare else min(num_frames, options.raster_frames or timed)
    wanted: dict[Strategy, int] = {Raster(): -(-timed // step) * step} if timed else {}
    wanted[strategy] = num_frames
    videos: dict[str, GeneratedVideo] = {}
    for one, count in wanted.items():
        with waiting(f"generating {count} frames, {one}"):
            videos[one.name] = run(count, one)
    whole = [video for video in videos.values() if len(video.frames) == num_frames]
    shown = whole[-2:] if options.compare else whole[-1:]
    write_generated(options.output, sheet, prompt.frames, shown, prompt.fps)
    report = report_runs(videos)
    threads = f", {torch.get_num_threads()} threads" if options.device == "cpu" else ""
    print_runs(console, report, f"{options.model} on {device}{threads}, {dtype}")
    wrote = " and ".join(map(str, dict.fromkeys([options.output, sheet])))
    console.print(f"wrote {wrote}")
    return {"output": str(options.output), "contact_sheet": str(sheet), "runs": report}
