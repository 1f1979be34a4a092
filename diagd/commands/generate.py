"""The main job: generate a video with a world model and say how fast it was.

diagd generate                 # the bundled model, its prompt: dream.mp4
diagd generate --actions "forward*8,left*8" --compare
diagd generate --prompt photo.jpg --actions forward --output dream.gif
diagd generate --model WHAM_200M.ckpt --prompt clip.npz
diagd generate --model Cosmos-Predict1-4B --tokenizer DV8x16x16-720p
diagd generate --prompts clips --out dreams --workers 2   # one for each
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diagd.console import make_console, waiting
from diagd.data.saving import check_suffix
from diagd.decoding.strategies.diagonal import Raster
from diagd.decoding.strategies.strategy import Strategy
from diagd.families.defaults import GenerationDefaults
from diagd.flags import OutputFile, OutputFolder, output_file
from diagd.pipeline.generated_video import GeneratedVideo
from diagd.pipeline.many_prompts import continue_prompts, print_report
from diagd.pipeline.outputs import print_runs, report_runs, write_generated
from diagd.pipeline.recipe import PreparedWorld, Recipe
from diagd.workers import Pool

RASTER_FRAMES = 2


@dataclass(frozen=True)
class GenerateOptions(Recipe):
    """Generate a video from a prompt clip and actions, and write it as mp4 with a contact sheet.

    What is not given is a default of the model: of the bundled one, 16 frames after 4 with
    row_lag 1 at temperature 1 and top-p 0.9.

    With --prompts, each of many prompts has a video in the folder --out; those that cannot be read
    are told at the end, and make the exit code 1.
    """

    # any video or gif (its last frames are continued), picture, or npz; default: the bundled clip
    prompt: Path | None = None
    # .mp4, .gif or .webp, with a contact sheet beside it as .png; or .png, the sheet alone
    output: OutputFile = Path("dream.mp4")
    compare: bool = False  # run raster as well; the video shows both side by side (raster left)
    raster_frames: int | None = None  # timed in raster order for the table; default 2, Cosmos 0
    # instead of --prompt: a folder of them; each has its own seed, made of its name and --seed
    prompts: Path | None = None
    # folder for their videos, NAME.mp4 with NAME.json; a run that was killed goes on from here
    out: OutputFolder | None = None
    workers: int = Pool.size  # processes that share the prompts (Ray); 1 is this one alone
    worker_cpus: float = Pool.cpus  # CPU share of each
    worker_gpus: float = Pool.gpus  # GPU share of each
    # of a Ray cluster that sees the same folders, such as ray://head:10001; default: one here
    address: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.raster_frames is not None and self.raster_frames < 0:
            raise ValueError(f"raster_frames must be at least 0, got {self.raster_frames}")
        check_suffix(self.output)
        if self.compare and self.decoding(GenerationDefaults(), 1) == Raster():
            raise ValueError("compare already runs raster; leave it out")
        alone = ("prompt", "output", "compare", "raster_frames")
        many = ("out", "workers", "worker_cpus", "worker_gpus", "address")
        is_many = self.prompts is not None
        for name in alone if is_many else many:
            if getattr(self, name) != getattr(GenerateOptions, name):
                kind = "one video, not" if is_many else "many videos: it needs"
                hint = "; one video goes to --output" if name == "out" else ""
                raise ValueError(f"{name} is for {kind} --prompts{hint}")
        if is_many and self.out is None:
            raise ValueError("prompts need --out, a folder for their videos")
        self.pool()

    def pool(self) -> Pool:
        """Return who goes on from the prompts."""
        return Pool(self.workers, self.worker_cpus, self.worker_gpus, self.address)


def main(options: GenerateOptions) -> dict[str, Any]:
    """Generate, write, report."""
    if options.prompts is None or options.out is None:
        return _continue_one(options)
    report = continue_prompts(options, options.prompts, options.out, options.pool())
    print_report(report, make_console())
    return report


def _continue_one(options: GenerateOptions) -> dict[str, Any]:
    console = make_console()
    sheet = options.output.with_suffix(".png")
    prompt_file = options.prompt or Path(options.model) / "prompt.mp4"
    for path in map(output_file, (options.output, sheet)):
        if path.exists() and prompt_file.exists() and path.samefile(prompt_file):
            raise ValueError(f"output would overwrite the prompt {path}: choose another name")
    prepared = PreparedWorld(options)
    num_frames, strategy = prepared.num_frames, prepared.strategy
    prompt = prepared.read(options.prompt)
    for note in prompt.notes:
        console.print(note)
    step = prepared.world.tokenizer.temporal_compression
    timed = (RASTER_FRAMES if step == 1 else 0) if options.raster_frames is None else 0
    timed = num_frames if options.compare else min(num_frames, options.raster_frames or timed)
    wanted: dict[Strategy, int] = {Raster(): -(-timed // step) * step} if timed else {}
    wanted[strategy] = num_frames
    videos: dict[str, GeneratedVideo] = {}
    for one, count in wanted.items():
        with waiting(f"generating {count} frames, {one}"):
            videos[one.name] = prepared.generate(prompt, count, one, options.seed)
    whole = [video for video in videos.values() if len(video.frames) == num_frames]
    shown = whole[-2:] if options.compare else whole[-1:]
    write_generated(options.output, sheet, prompt.frames, shown, prompt.fps)
    report = report_runs(videos)
    threads = f", {torch.get_num_threads()} threads" if options.device == "cpu" else ""
    print_runs(console, report, f"{options.model} on {prepared.device}{threads}, {prepared.dtype}")
    wrote = " and ".join(map(str, dict.fromkeys([options.output, sheet])))
    console.print(f"wrote {wrote}")
    return {"output": str(options.output), "contact_sheet": str(sheet), "runs": report}
