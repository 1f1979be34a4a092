"""Generate a video from a prompt; write it with a contact sheet, and print what it took.

diagd generate                 # the bundled model, its prompt: dream.mp4
diagd generate --actions "forward*8,left*8" --compare
diagd generate --prompt photo.jpg --actions forward --out dream.gif
diagd generate --model WHAM_200M.ckpt --prompt clip.npz
diagd generate --model Cosmos-Predict1-4B --tokenizer DV8x16x16-720p
diagd generate --model c2i_B_256.pt --actions "class 207" --out dog.png
diagd generate --model BAAI/Emu3-Gen-hf --text "a red house"  # dream.png
diagd generate --model zai-org/GLM-Image --text "a house" --size 768x1024
diagd generate --prompts clips --out dreams --workers 2   # one per clip
"""

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from diagd.backends.devices import device_of
from diagd.checks import shorten
from diagd.console import duration, make_console, print_records, progress, track, waiting
from diagd.data.actions import ActionCodec, parse_actions, read_actions
from diagd.data.video import contact_sheet, save_frames, write_image
from diagd.decoding.strategies.table import Raster, Strategy
from diagd.families.checkpoints import contents_of, diffusers_pipeline, find_model, model_path
from diagd.families.clip_files import prompt_suffixes
from diagd.families.family import Checkpoint
from diagd.files import list_files, note_left_out, read_json_object, require_file, write_json
from diagd.flags import output_file
from diagd.metrics.quality import psnr
from diagd.pipeline.first_stage import write_tokens
from diagd.pipeline.generator import GeneratedVideo, VideoGenerator
from diagd.pipeline.options import MANY_VIDEOS, ONE_VIDEO, GenerateOptions
from diagd.pipeline.pictures import numbered
from diagd.pipeline.prompts import Prompt, likeness_notes, seed_of
from diagd.pipeline.world_folder import WorldSource, check_strategy, codec_of, decide
from diagd.system import only_writer, provenance, refuse_other_run
from diagd.tokenizers.text import encode_text, read_embedding
from diagd.workers import do_tasks

GLM_IMAGE = "diagd.pipeline.glm_image"  # slow to import
# Paths are not compared, as files may move; a model is compared by its contents.
_MAY_DIFFER = {"model", "config", "adapter", "tokenizer", "text_encoder", "text_embedding"}


# how a video was made (JSON types), its context and new frames, and their rate
Made = tuple[dict[str, Any], Tensor, float]


class PromptWorker:
    """A world that continues prompts, several at once, with the given options."""

    def __init__(self, options: GenerateOptions, found: Checkpoint | None = None) -> None:
        if options.size is not None:
            raise ValueError("size is for GLM-Image and MammothModa2; others have one of their own")
        self.options, self.device = options, device_of(options.device)
        found = found or find_model(options.model, options.config, options.adapter)
        defaults = found.defaults
        self.sampling = options.sampling(defaults)
        self.strategy = options.decoding(defaults, found.config.grid_height)
        check_strategy(found, self.strategy)
        self.num_frames = options.frames or defaults.num_frames
        if options.prompt is not None and defaults.context_frames:
            require_file(options.prompt, "video")
        self._notes: list[str] = []
        self._actions = self._read_actions(options.actions, codec_of(found))
        self.world = world = VideoGenerator.from_pretrained(
            options.model,
            self.device,
            options.dtype,
            options.backend,
            config=options.config,
            tokenizer=options.tokenizer,
            adapter=options.adapter,
        )
        self.makes_pictures = not world.defaults.context_frames and self.num_frames == 1
        world.check(self.strategy, self.sampling)  # before any work
        world.num_grids(self.num_frames)
        if options.context_frames and not world.defaults.context_frames:
            raise ValueError("context_frames must be left out: this model takes no prompt")
        self._folder, self._provenance = WorldSource(options.model).folder, provenance(self.device)
        self._text = self._read_text()
        if options.images > 1 and not self.makes_pictures:
            raise ValueError("images must be left out: this model generates videos")

    def _read_text(self) -> str | Tensor | None:
        options, size = self.options, self.world.config.context_size
        text, encoder, embedding = options.text, options.text_encoder, options.text_embedding
        if self.world.text is not None:
            if (encoder, embedding) != (None, None):
                raise ValueError(
                    "text_encoder and text_embedding must be left out: this model has its own text "
                    "tokenizer"
                )
            if text is None:
                hint = 'give --text, such as "a house"'
                raise ValueError(f"this model generates images from text: {hint}")
            return text
        if not size:
            if (text, encoder, embedding) != (None, None, None):
                raise ValueError("this model takes no text")
            return None
        if embedding is not None:
            states = read_embedding(embedding)
        elif text is not None and encoder is not None:
            states = encode_text(text, encoder)
        else:
            raise ValueError(
                "this model needs a text: give --text with --text-encoder FOLDER (T5), "
                "or --text-embedding FILE"
            )
        if states.shape[2] != size:
            raise ValueError(f"text embeddings must have width {size}, got {states.shape[2]}")
        return states.to(self.device)

    def _read_actions(self, asked: str | None, codec: ActionCodec | None) -> list[str]:
        """Read actions from a jsonl file, or a string, whose last action repeats to the end."""
        wanted = self.num_frames
        if asked is None:
            return []
        if codec is None:
            raise ValueError("this model takes no actions")
        if asked.endswith(".jsonl"):
            return self._one_a_frame(read_actions(asked, codec))
        actions = parse_actions(asked, codec)
        if 1 < (given := len(actions)) < wanted:
            self._notes.append(
                f"{given} actions for {wanted} frames: {actions[-1]!r} repeats to the end"
            )
        return self._one_a_frame(actions + actions[-1:] * (wanted - given))

    def _one_a_frame(self, actions: list[str]) -> list[str]:
        wanted, given = self.num_frames, len(actions)
        if given != wanted:
            hint = f": use --frames {given}" if self.options.frames is None else ""
            raise ValueError(f"expected {wanted} actions (one per frame), got {given}{hint}")
        return actions

    def read(self, path: Path | None = None) -> Prompt:
        """Read a prompt, by default the world's own, with one action for each new frame."""
        folder, codec = self._folder, self.world.vocabulary
        own = folder / "prompt.mp4" if self.world.defaults.context_frames else None
        if path is None and own and not own.is_file():
            raise FileNotFoundError(f"prompt not found: {own}, give --prompt")
        given = self.options.context_frames
        prompt = self.world.read_prompt(
            path or own, context_frames=given, num_frames=self.num_frames
        )
        notes = [*prompt.notes]
        if path is not None:
            notes += likeness_notes(self.world.tokenizer, folder, prompt.frames[-1])
        actions = self._actions or prompt.coming_actions
        if codec is not None and not actions:
            walk, hint = folder / "walk.jsonl", f"{codec.names[-1]}*{self.num_frames}"
            if not walk.is_file():
                raise FileNotFoundError(f"actions not found: {walk}, give --actions {hint}")
            actions = list(islice(cycle(read_actions(walk, codec)), self.num_frames))
        if codec is not None:
            self._one_a_frame(actions)
        return replace(prompt, coming_actions=actions, notes=[*notes, *self._notes])

    def generate(
        self,
        prompt: Prompt,
        num_frames: int,
        strategy: Strategy,
        seed: int,
        on_frame: Callable[[int], object] | None = None,
    ) -> GeneratedVideo:
        """Generate a video, or several images in place of its frames."""
        actions = prompt.coming_actions[:num_frames] if self.world.vocabulary else None
        count = self.options.images
        made = self.world.generate(
            [prompt] * count,
            None if actions is None else [actions] * count,
            num_frames,
            strategy=strategy,
            sampling=self.sampling,
            seed=seed,
            text=self._text,
            guidance=self.options.guidance,
            on_frame=on_frame,
        )
        whole = {n: torch.cat([getattr(one, n) for one in made]) for n in ("frames", "tokens")}
        return replace(made[0], **whole)

    def __call__(self, paths: Sequence[Path]) -> list[Made | ValueError]:
        """Continue prompts as one batch; an error in one does not affect the others."""
        started, made = time.perf_counter(), dict[Path, Made | ValueError]()
        prompts, seeds = dict[Path, Prompt](), list[int]()
        for path in paths:
            try:
                prompts[path] = self.read(path)
                seeds.append(seed_of(path.stem, self.options.seed))
            except (ValueError, OSError) as error:
                made[path] = ValueError(shorten(str(error)))
        try:
            videos = self._continue([*prompts.values()], seeds) if prompts else []
        except ValueError as error:
            if len(paths) > 1:
                return [one for path in paths for one in self([path])]
            videos, made[paths[0]] = [], ValueError(shorten(str(error)))
        for (path, prompt), seed, video in zip(prompts.items(), seeds, videos, strict=False):
            record = {
                "prompt": path.name,
                "strategy": self.strategy.name,
                "sampling": asdict(self.sampling),
                "seed": seed,
                "context_actions": prompt.context_actions,
                "actions": prompt.coming_actions,
                "notes": prompt.notes,
                "batch_size": len(prompts),
                "stats": asdict(video.stats),  # of the whole batch, as are the seconds
                "wall_seconds": time.perf_counter() - started,  # with tokenizing and detokenizing
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                "dtype": self.world.dtype,
                "backend": self.world.backend,
                **self._provenance,
            }
            made[path] = record, torch.cat([prompt.frames, video.frames]), prompt.fps
        return [made[path] for path in paths]

    def _continue(self, prompts: list[Prompt], seeds: list[int]) -> list[GeneratedVideo]:
        actions = [prompt.coming_actions for prompt in prompts]
        return self.world.generate(
            prompts,
            actions if self.world.vocabulary else None,
            self.num_frames,
            strategy=self.strategy,
            sampling=self.sampling,
            seed=seeds,
            text=self._text,
            guidance=self.options.guidance,
        )


def _continue_many(options: GenerateOptions, prompts: Path, out: Path) -> dict[str, Any]:
    """Generate missing videos; a prompt is done if NAME.mp4 and NAME.json exist."""
    (paths, others), console = find_prompts(prompts), make_console()
    if out.resolve() == prompts.resolve():
        raise ValueError(f"out must not be the folder of prompts, got {out}")
    settings = _settings(options)
    failed: dict[str, str] = {}
    with only_writer(out):
        before = [_read_record(path.stem, out, settings) for path in paths]
        missing = [path for path, record in zip(paths, before, strict=True) if record is None]
        num_done = len(paths) - len(missing)
        size = options.batch_size
        parts = [tuple(missing[i : i + size]) for i in range(0, len(missing), size)]
        results = do_tasks(parts, partial(PromptWorker, _decided(options, before)), options)
        for path, made in track(_one_by_one(results), "prompts", len(paths), num_done):
            if isinstance(made, ValueError):
                failed[path.name] = str(made)
            else:  # the video first, then the file that marks it as done
                record, frames, fps = made
                save_frames(out / f"{path.stem}.mp4", frames, fps)
                write_json(out / f"{path.stem}.json", {**record, "settings": settings}, indent=1)
    generated = len(missing) - len(failed)
    before = f", {num_done} existed before" if num_done else ""
    console.print(f"{generated} videos written to {out}{before}")
    if failed:
        console.print(f"failed prompts: {len(failed)}")
    for name, why in failed.items():
        console.print(f"  {name}: {why}")
    note_left_out(prompts, others, console.print)
    return {"out": str(out), "generated": generated, "done_before": num_done, "failed": failed}


def _one_by_one(
    results: Iterator[tuple[tuple[Path, ...], list[Made | ValueError] | ValueError]],
) -> Iterator[tuple[Path, Made | ValueError]]:
    for paths, made in results:
        yield from zip(paths, made if isinstance(made, list) else [made] * len(paths), strict=True)


def find_prompts(folder: Path) -> tuple[list[Path], list[Path]]:
    """List the videos, pictures and recordings of a folder, and its other files, by name.

    Subfolders are not searched.
    """
    if folder.is_file():
        raise ValueError(
            f"prompts must be a folder of clips, got the file {folder}: for one image give --text "
            "or a class, for a file of them run diagd evaluate"
        )
    paths: dict[str, Path] = {}
    found, others = list_files(folder, "folder of prompts", prompt_suffixes())
    for path in found:
        if path.stem in paths:
            raise ValueError(f"names of prompts must differ, got {paths[path.stem]} and {path}")
        paths[path.stem] = path
    if not paths:
        raise FileNotFoundError(f"no prompts ({', '.join(prompt_suffixes())}) in {folder}")
    return found, others


def _settings(options: GenerateOptions) -> dict[str, Any]:
    names = {field.name for field in fields(options)} - {"prompts", "out", *ONE_VIDEO, *MANY_VIDEOS}
    flags = {name: getattr(options, name) for name in sorted(names)}
    return {"weights": contents_of(options.model, options.adapter), **flags}


def _decided(options: GenerateOptions, before: list[dict[str, Any] | None]) -> GenerateOptions:
    """Resolve `auto` once for all workers, as in the videos that exist."""
    known: dict[str, Any] = next((record for record in before if record), {})
    decided = known.get("dtype", options.dtype), known.get("backend", options.backend)
    device = torch.device(options.device)
    if device.type == "cpu" or torch.cuda.is_available():  # otherwise the cluster's workers have it
        decided = decide(options.model, device, *decided, options.config)
    return replace(options, dtype=decided[0], backend=decided[1])


def _read_record(name: str, out: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Read the record of a prompt's video, if it exists; ValueError if its settings differ."""
    if not (path := out / f"{name}.json").is_file():
        return None
    try:
        record = read_json_object(path)
        before = {name: record["settings"][name] for name in settings if name not in _MAY_DIFFER}
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{path}: expected a record that diagd generate wrote") from None
    refuse_other_run(f"{path} was made with", before, settings)
    return record if (out / f"{name}.mp4").is_file() else None


RASTER_FRAMES = 2
COLUMNS = {
    "": "{strategy}",
    "frames": "{num_frames}",
    "steps": "{num_steps}",
    "seconds": "{seconds:.2f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "frames/s": "{frames_per_second:.2f}",
    "speedup": "{speedup:.1f}x",
}


def main(options: GenerateOptions) -> dict[str, Any]:
    if options.prompts is not None and options.out is not None:
        return _continue_many(options, options.prompts, options.out)
    if diffusers_pipeline(model_path(options.model)):
        return importlib.import_module(GLM_IMAGE).draw_pictures(options)
    found = find_model(options.model, options.config, options.adapter)
    if found.family.hand_over is not None:
        return write_tokens(options, found)
    console = make_console()
    output = options.out or Path("dream.mp4")
    prompt_file = options.prompt or Path(options.model) / "prompt.mp4"
    for path in map(output_file, (output, output.with_suffix(".png"))):
        if path.exists() and prompt_file.exists() and path.samefile(prompt_file):
            raise ValueError(f"output would overwrite the prompt {path}: choose another name")
    worker = PromptWorker(options, found)
    prompt = worker.read(options.prompt)
    if options.out is None and worker.makes_pictures:
        output = output.with_suffix(".png")
    threads = f", {torch.get_num_threads()} threads" if options.device == "cpu" else ""
    title = f"{options.model} on {worker.device}{threads}, {worker.world.dtype}"
    for note in prompt.notes:
        console.print(f"note: {note}")
    runs = _run(worker, prompt, console, title)
    count = options.images * worker.num_frames
    shown = [video for _, video in runs if len(video.frames) == count]
    shown, sheet = shown[-2:] if options.compare else shown[-1:], output.with_suffix(".png")
    is_picture = worker.makes_pictures and output == sheet
    written = _write(output, prompt, shown, is_picture)
    report = _report(runs)
    columns = COLUMNS if len(report) > 1 else COLUMNS | {"speedup": "-"}
    print_records(console, title, columns, report)
    if report[-1]["num_dropped_frames"]:
        seen = max(
            worker.world.remembers or worker.world.config.frames_held, len(prompt.frames) + 1
        )
        console.print(
            f"note: the model looks back {seen - 1} frames, so later frames did not see the first "
            "ones (expected for this model)"
        )
    console.print(f"wrote {' and '.join(map(str, written))}")
    return {
        "output": str(written[0]),
        "pictures": list(map(str, written)) if is_picture else None,
        "contact_sheet": None if is_picture else str(sheet),
        "runs": report,
    }


def _run(
    worker: PromptWorker, prompt: Prompt, console: Console, title: str
) -> list[tuple[Strategy, GeneratedVideo]]:
    """Generate the video, after a warm-up and some frames in raster order for comparison."""
    options, num_frames, strategy = worker.options, worker.num_frames, worker.strategy

    def generate(strategy: Strategy, count: int) -> GeneratedVideo:
        what = f"generating {count} frames, {strategy}"
        if count == step:  # decoded together
            with waiting(what):
                return worker.generate(prompt, count, strategy, options.seed)
        with progress(what, count) as job:
            return worker.generate(prompt, count, strategy, options.seed, job.reach)

    step = worker.world.tokenizer.temporal_compression
    if (timed := options.raster_frames) is None:
        timed = RASTER_FRAMES if step == 1 and not worker.makes_pictures else 0
    timed = num_frames if options.compare else min(num_frames, timed)
    timed = -(-timed // step) * step if strategy != Raster() else 0

    runs: list[tuple[Strategy, GeneratedVideo]] = []
    size = min(timed, num_frames - step) or step
    if size < num_frames:
        generate(strategy, step)  # warm-up
        sample = generate(strategy, size)
        seconds = sample.stats.seconds * num_frames / size
        expected = f"about {duration(seconds)} here" if seconds >= 1 else "under a second"
        size_px = "x".join(map(str, worker.world.frame_size_px))
        console.print(f"{title}: {num_frames} frames of {size_px} px, {strategy}, {expected}")
        runs = [(strategy, sample)] if size == timed else []
    if timed:
        runs.insert(0, (Raster(), generate(Raster(), timed)))
    return [*runs, (strategy, generate(strategy, num_frames))]


def _write(
    output: Path, prompt: Prompt, videos: list[GeneratedVideo], is_picture: bool
) -> list[Path]:
    """Write the prompt followed by the generated frames, or each image; runs side by side."""
    if is_picture:
        images = torch.cat([video.frames for video in videos], dim=2)
        paths = numbered(output, len(images))
        for path, image in zip(paths, images, strict=True):
            write_image(path, image.cpu())
        return paths
    sheet = output.with_suffix(".png")
    whole = [torch.cat([prompt.frames, video.frames]) for video in videos]
    if output != sheet:
        save_frames(output, torch.cat(whole, dim=2), prompt.fps)
    write_image(sheet, torch.cat([contact_sheet(frames) for frames in whole], dim=0))
    return list(dict.fromkeys([output, sheet]))


def _report(runs: list[tuple[Strategy, GeneratedVideo]]) -> list[dict[str, Any]]:
    """Return a record per run; speedups are over the first one, if of the same length."""
    (_, first), report = runs[0], []
    for strategy, video in runs:
        seconds, num_frames = video.stats.seconds, len(video.frames)
        row = {"strategy": strategy.name, **asdict(video.stats), "num_frames": num_frames}
        row["frames_per_second"] = num_frames / seconds  # a grid may hold several frames
        equal_work = num_frames == len(first.frames)
        row["speedup"] = first.stats.seconds / seconds if equal_work else None
        if report:
            both = min(len(first.tokens), len(video.tokens))
            equal = first.tokens[:both] == video.tokens[:both]
            row["tokens_equal_to_raster"] = equal.float().mean().item()
            row["psnr_to_raster"] = psnr(video.frames[:both], first.frames[:both]).mean().item()
        report.append(row)
    return report
