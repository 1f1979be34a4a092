"""The main job: generate a video with a world model and say how fast it was.

diagd generate                 # the bundled model, its prompt: dream.mp4
diagd generate --actions "forward*8,left*8" --compare
diagd generate --prompt photo.jpg --actions forward --output dream.gif
diagd generate --model WHAM_200M.ckpt --prompt clip.npz
diagd generate --model Cosmos-Predict1-4B --tokenizer DV8x16x16-720p
diagd generate --prompts clips --out dreams --workers 2   # one for each
"""

from pathlib import Path
from typing import Any

import torch

from diagd.console import make_console, waiting
from diagd.decoding.strategies.diagonal import Raster
from diagd.decoding.strategies.strategy import Strategy
from diagd.flags import output_file
from diagd.pipeline.generated_video import GeneratedVideo
from diagd.pipeline.many_prompts import continue_prompts, print_report
from diagd.pipeline.options import GenerateOptions
from diagd.pipeline.outputs import print_runs, report_runs, write_generated
from diagd.pipeline.recipe import PreparedWorld

RASTER_FRAMES = 2


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
    timed = -(-timed // step) * step if strategy != Raster() else 0

    def run(one: Strategy, count: int) -> GeneratedVideo:
        with waiting(f"generating {count} frames, {one}"):
            return prepared.generate(prompt, count, one, options.seed)

    runs: list[tuple[str, GeneratedVideo]] = []
    if (size := min(timed, num_frames - 1) or step) < num_frames:
        run(strategy, step)  # warms up
        sample = run(strategy, size)
        seconds = sample.stats.seconds * num_frames / size
        console.print(f"{num_frames} frames, {strategy}: expect about {seconds:.3g} s here")
        runs = [(strategy.name, sample)] if size == timed else []
    if timed:
        runs.insert(0, (Raster().name, run(Raster(), timed)))
    runs.append((strategy.name, run(strategy, num_frames)))
    shown = [video for _, video in runs if len(video.frames) == num_frames]
    shown = shown[-2:] if options.compare else shown[-1:]
    write_generated(options.output, sheet, prompt.frames, shown, prompt.fps)
    report = report_runs(runs)
    threads = f", {torch.get_num_threads()} threads" if options.device == "cpu" else ""
    print_runs(console, report, f"{options.model} on {prepared.device}{threads}, {prepared.dtype}")
    wrote = " and ".join(map(str, dict.fromkeys([options.output, sheet])))
    console.print(f"wrote {wrote}")
    return {"output": str(options.output), "contact_sheet": str(sheet), "runs": report}
