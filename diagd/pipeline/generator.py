"""Worlds: a model, its tokenizer and its actions generate video from pixels and actions."""

import base64
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from diagd.backends.devices import device_of
from diagd.backends.names import Backend, DTypeChoice
from diagd.backends.prepare import prepare
from diagd.checks import whole
from diagd.data.actions import ActionCodec, Actions, as_actions, idle_action, parse_actions
from diagd.data.video import encode_video, save_frames
from diagd.decoding.generate_tokens import DecodingEngine, GenerationStats, generate_tokens
from diagd.decoding.model import CausalModel
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.strategies.table import Strategy, as_strategy
from diagd.families.checkpoints import is_repository, upload
from diagd.families.defaults import GenerationDefaults, visual_ranges
from diagd.models.config import ModelConfig
from diagd.models.guidance import GuidedModel, VectorPrompt
from diagd.pipeline.prompts import (
    Clip,
    Picture,
    Prompt,
    check_held,
    is_batch,
    likeness_notes,
    prompt_tokens,
    read_clip,
    rows_of,
)
from diagd.pipeline.world_folder import WorldSource, load_parts, save_world
from diagd.system import check_memory
from diagd.tokenizers.text import TextIds, TextPrompts
from diagd.tokenizers.vq import VideoTokenizer

logger = logging.getLogger("diagd")


@dataclass(frozen=True, repr=False)
class GeneratedVideo:
    """A video that a world model generated; in a notebook it plays.

    Attributes:
        frames: (T, H_px, W_px, 3) uint8 RGB, the generated frames only.
        tokens: (T, height, width) int64; for Emu3 the last column holds row ends.
        stats: cost of decoding, for the whole batch if there was one, without tokenizing.
        fps: frames per second, the prompt's or else the model's.
    """

    frames: Tensor
    tokens: Tensor
    stats: GenerationStats
    fps: float

    def save(self, path: str | Path) -> None:
        """Write the frames to a path in .mp4, .gif or .webp, or side by side in .png."""
        save_frames(path, self.frames, self.fps)

    def __repr__(self) -> str:
        num_frames, height_px, width_px, _ = self.frames.shape
        return (
            f"GeneratedVideo({num_frames} frames of {height_px}x{width_px} px, {self.fps:g} fps, "
            f"{self.stats.num_steps} steps in {self.stats.seconds:.2f} s)"
        )

    def _repr_html_(self) -> str:
        data = base64.b64encode(encode_video(self.frames, self.fps)).decode()
        return (
            f'<video width="{2 * self.frames.shape[2]}" controls autoplay loop muted '
            f'src="data:video/mp4;base64,{data}"></video>'
        )


@dataclass(eq=False, repr=False)
class VideoGenerator:
    """A world model with its tokenizer and its actions: pixels in, pixels out.

    Attributes:
        model: predicts tokens.
        config: architecture of the model, including the token grid of a frame.
        tokenizer: turns frames into grids of tokens and back.
        vocabulary: the available actions; None if the model takes none.
        defaults: generation settings of the model's authors.
        source: where the world was loaded from; None if it was not, and then it cannot be saved.
        dtype, backend: names of the weight type and the execution backend, for display.
        remembers: maximum number of frames that the model sees, unless its context has more; by
            default that of `defaults`; None: as many as it holds.
        text: tokenizer of texts for a text-to-image model; else None.
    """

    model: CausalModel
    config: ModelConfig
    tokenizer: VideoTokenizer
    vocabulary: ActionCodec | None
    defaults: GenerationDefaults
    source: WorldSource | None = None
    dtype: str = "float32"
    backend: str = "eager"
    remembers: int | None = None
    text: TextPrompts | None = None

    def __post_init__(self) -> None:
        self.height, self.width = self.config.grid_height, self.config.grid_width
        self.frame_size_px = self.tokenizer.frame_size_px(self.height, self.width)
        self.valid_range = visual_ranges(self.defaults, self.config)
        self.remembers = self.remembers or self.defaults.remember

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path = "doom",
        device: torch.device | str = "cpu",
        dtype: torch.dtype | DTypeChoice = "auto",
        backend: Backend = "auto",
        int8: bool = False,
        config: str | Path | None = None,
        tokenizer: str | Path | None = None,
        adapter: str | Path | None = None,
    ) -> "VideoGenerator":
        """Load a world: a model with its tokenizer and its actions.

        Args:
            name_or_path: a bundled model, a folder of ours, a released checkpoint, or `user/name`
                on the Hugging Face Hub, which is downloaded once.
                device: device of the weights, such as `cpu` or `cuda`.
                dtype: type of the weights, a dtype of torch or a name: `auto` chooses the faster
                    one of float32 and bfloat16 here, `fastest` may choose int8 as well, `int8`
                    quantizes to 8 bits (as `prepare` does). `float32` gives the same numbers on all
                    machines.
                backend: execution backend (see `diagd.backends.prepare.prepare`).
                config, tokenizer: config file and tokenizer folder, if not part of the checkpoint
                    (see `diagd.pipeline.world_folder.load_parts`).
                adapter: folder of `diagd finetune --lora`, trained on this model.

        Raises:
            FileNotFoundError, ValueError: a part is missing or damaged; the message names it.
        """
        if int8 and dtype in ("auto", "fastest"):
            dtype = "int8"
        if dtype == "fastest" and backend not in ("auto", "native"):
            dtype = "auto"  # only our kernels are timed in int8
        parts = load_parts(name_or_path, device_of(str(device)), dtype, config, tokenizer, adapter)
        shape, int8 = parts.model.config, int8 or parts.int8
        used = "int8" if int8 else str(parts.model.dtype).removeprefix("torch.")
        model, chosen = prepare(parts.model, backend, int8)
        source = WorldSource(name_or_path, config, tokenizer, adapter)
        kept = parts.tokenizer, parts.vocabulary, parts.defaults
        return cls(model, shape, *kept, source, used, chosen, text=parts.text)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the world, as it was loaded, to a folder that `from_pretrained` loads.

        Weights and tokenizer are copied bit for bit, whatever dtype and backend are in use here,
        with actions, defaults, prompt and scenes; a model card is added if there is none.
        ValueError if the world was not loaded from files, or from this very `folder`;
        FileNotFoundError if those files are gone.
        """
        save_world(self.source, Path(folder), self.frame_size_px)

    def push_to_hub(
        self, repository: str, *, private: bool | None = None, token: str | None = None
    ) -> str:
        """Upload the files of `save_pretrained` to the Hugging Face Hub; return the URL.

        Args:
            repository: `user/name`; created if missing.
            private: visibility of a new repository; default: the account's setting.
            token: access token with write permission; default: that of `hf auth login`.

        Raises:
            ValueError: the world was not loaded from files, or `repository` is not a valid name.
            OSError: the Hub refuses or cannot be reached.
        """
        if not is_repository(repository):
            raise ValueError(f"expected a repository such as user/name, got {repository!r}")
        with tempfile.TemporaryDirectory() as folder:
            save_world(self.source, Path(folder), self.frame_size_px, repository)
            return upload(Path(folder), repository, private, token)

    def __repr__(self) -> str:
        name = "unnamed" if self.source is None else self.source.name_or_path
        size = "x".join(map(str, self.frame_size_px))
        given = f"{len(self.vocabulary.names)} actions" if self.vocabulary else "no actions"
        given = "images from texts" if self.text else given
        return f"VideoGenerator({name}: {size} px, {self.height}x{self.width} tokens, {given})"

    @overload
    def generate(
        self, frames: str | Path | Picture | Prompt | None = None, *rest: Any, **settings: Any
    ) -> GeneratedVideo: ...
    @overload
    def generate(self, frames: list[Any], *rest: Any, **settings: Any) -> Any: ...
    def generate(
        self,
        frames: Any = None,
        actions: Any = None,
        num_frames: int | None = None,
        *,
        strategy: Strategy | str = "k=1",
        context_actions: Any = None,
        sampling: SamplingOptions | None = None,
        seed: int | list[int] = 0,
        text: str | list[str] | Tensor | None = None,
        guidance: float | None = None,
        on_start: Callable[[DecodingEngine], object] | None = None,
        on_frame: Callable[[int], object] | None = None,
        on_step: Callable[[int], object] | None = None,
    ) -> GeneratedVideo | list[GeneratedVideo]:
        """Continue a clip, or each clip of a batch, decoded together.

        Implicit changes (resized pictures, the idle action inserted between frames) are logged, a
        line each; a picture unlike the model's training data is a warning.

        Args:
            frames: the context: a path, of which the last frames are used; or pictures, all of
                them used, fitted to `frame_size_px`: (m, H_px, W_px, 3) or (H_px, W_px, 3)
                uint8 RGB, an array, a tensor, a PIL image or a list of pictures; or the result
                of `read_prompt`. A list of clips is a batch; lengths may differ. None for an
                image model; `[None] * 4` generates four images at once.
            actions: one for each generated frame, leading to it: a string such as
                `forward*8,left*4`, whose last action repeats if there are too few, or names, or
                (T,) integers, indices into `vocabulary.names`. For a batch a list of these.
            num_frames: frames to generate; default: one for each action, or the model's number.
            strategy: decoding strategy, by name (see `diagd.decoding.strategies`) or as a
            value.
            context_actions: the m - 1 actions between the context frames, in any form of
                `actions`; default: those in the jsonl file beside a path, or else the idle
                action.
            sampling: sampling options, default: the model's own; always limited to visual ids.
            seed: of the draws, 64 bits; row b of a batch uses seed + b, or its own of a list.
            text: what an image shows, for text-to-image models; a list has one for each of a
                batch. For video models with text, (1, M, size) states of a text encoder, or (B,
                M, size) for a batch.
            guidance: classifier-free guidance scale, 1 for none; default: the model's own.
            on_start: called with the engine when it has read the prompts, to watch its streams
                (see `diagd.pipeline.previews`).
            on_frame: called with the number of decoded frames whenever it grows.
            on_step: called after each step with the number of steps so far.

        Returns:
            A video; for a batch a list of videos, each the same as if generated alone.

        Raises:
            FileNotFoundError, ValueError: frames, actions or a strategy that do not fit.
        """
        strategy = as_strategy(strategy)
        rows = rows_of(frames, actions, context_actions)
        if num_frames is None:
            num_frames, coming = self.defaults.num_frames, rows[0][1]
            if coming is not None and self.vocabulary is not None:
                num_frames = len(as_actions(coming, self.vocabulary))
        num_grids = self.num_grids(num_frames)
        ids = [self.action_ids(coming, num_grids, "generated frame") for _, coming, _ in rows]
        prompts, tokens, contexts = self._read_rows(rows)
        if said := self._read_texts(text, contexts):
            contexts = [picture[:0] for picture in contexts]
            tokens = [one.prompt[0] for one in said]
        num_context = [len(grids) for grids in contexts]
        for prompt, grids in zip(prompts, contexts, strict=True):
            given = len(prompt.frames), len(grids)
            check_held(self.tokenizer, self.config.frames_held, *given, num_frames)
        max_slots, keep_frames = self._windows(num_context)
        model = self.guided(guidance, said)
        read = [isinstance(clip, Prompt) for clip, *_ in rows]  # already read, with its notes
        own = [one.frames for one, known in zip(prompts, read, strict=True) if not known]
        self.warn_of_foreign(own)
        out = generate_tokens(
            model,
            tokens,
            strategy,
            torch.cat(ids),
            context_frames=num_context,
            sampling=self.sampling(sampling),
            seed=seed,
            grid=TokenGrid(num_grids, self.height, self.width),
            context=text if isinstance(text, Tensor) else None,
            max_slots=max_slots,
            keep_frames=keep_frames,
            frame=self.config.frame,
            on_start=on_start,
            on_step=on_step,
            on_frame=on_frame and (lambda grids: on_frame(grids * num_frames // num_grids)),
        )
        videos = []
        for context, written, prompt in zip(contexts, out.tokens, prompts, strict=True):
            pixels = self.tokenizer.decode_after(context, written)[-num_frames:].cpu()
            videos.append(GeneratedVideo(pixels, written, out.stats, prompt.fps))
        return videos if is_batch(frames) else videos[0]

    def read_text(
        self, text: str | Tensor | None, pictures: Tensor | None = None
    ) -> TextIds | None:
        """Return the prompts of a text, one behind each of the pictures (B, height, width).

        None if the model is not a text-to-image model.
        """
        if self.text is None:
            if isinstance(text, str):
                reads = "text-encoder states" if self.config.context_size else "no text"
                raise ValueError(f"this model takes {reads}, got text={text[:20]!r}")
            return None
        if not isinstance(text, str) or not text.strip():
            got = repr(text) if text is None or isinstance(text, str) else type(text).__name__
            raise ValueError(f"text must be a non-empty string for this model, got {got}")
        if pictures is None or not len(pictures):
            ids = self.text(text)
        else:
            ids = self.text.with_pictures(pictures.cpu(), text)
        taken, held = ids.prompt.shape[1] + self.height * self.width, self.config.max_positions
        if taken > held:
            raise ValueError(f"text and image need {taken} tokens, the model holds {held}")
        device = self.model.device
        return ids._replace(
            prompt=ids.prompt.to(device), unconditional=ids.unconditional.to(device)
        )

    def _read_texts(
        self, text: str | list[str] | Tensor | None, pictures: Sequence[Tensor]
    ) -> list[TextIds]:
        """Return each row's text, behind its picture; [] for a model without text."""
        texts = text if isinstance(text, list) else [text] * len(pictures)
        if len(texts) != len(pictures):
            raise ValueError(f"text must be one, or a list of {len(pictures)}, got {len(texts)}")
        read, told = dict[Any, TextIds | None](), list[TextIds]()
        for one, picture in zip(texts, pictures, strict=True):
            key = one if isinstance(one, str) and not len(picture) else len(read)
            if key not in read:  # once, as it may run a text encoder
                read[key] = self.read_text(one, picture)
            if (ids := read[key]) is not None:
                told.append(ids)
        if told and told[0].vectors is not None and len(read) > 1:
            raise ValueError(
                "text must be the same for all images: this model takes one prompt embedding"
            )
        return told

    def warn_of_foreign(self, prompts: Iterable[Tensor]) -> None:
        """Warn of the first of `prompts` (m, H_px, W_px, 3) unlike the model's training data."""
        source = self.source
        for frames in prompts:
            if source is None or not len(frames):  # in-memory world, or a text alone
                continue
            for note in likeness_notes(self.tokenizer, source.folder, frames[-1]):
                warnings.warn(note, stacklevel=3)
                return

    def _read_prompts(self, rows: Sequence[tuple[Any, Any, Any]]) -> list[Prompt]:
        prompts = []
        for clip, _, between in rows:
            if not isinstance(clip, Prompt):  # a Prompt's reader has its notes
                clip = self.read_prompt(clip, between)
                for note in clip.notes:
                    logger.warning(note)
            elif between is not None:
                raise ValueError("context_actions must be left out: this prompt has its own")
            prompts.append(clip)
        return prompts

    def _read_rows(
        self, rows: Sequence[tuple[Any, Any, Any]]
    ) -> tuple[list[Prompt], list[Tensor], list[Tensor]]:
        """Return each row's prompt, its tokens (P,), and the grids of its context."""
        prompts = self._read_prompts(rows)
        read = [self.prompt(prompt.frames, prompt.context_actions) for prompt in prompts]
        return prompts, [tokens[0] for tokens, _ in read], [grids for _, grids in read]

    def stream(
        self,
        frames: Clip | Prompt,
        actions: Iterable[str],
        *,
        strategy: Strategy | str = "k=1",
        **settings: Any,
    ) -> Iterator[Tensor]:
        """Yield a frame, (H_px, W_px, 3) uint8, for every action, as long as actions come.

        Old frames leave the context when it is full (see `DecodingEngine`). `actions` are names, or
        a string such as `forward*8,left*4`; frames, strategy and settings (context_actions,
        sampling, seed) are those of `generate`. Invalid arguments are a ValueError; an invalid
        action name is one when it comes.
        """
        if (clips := len(rows_of(frames, None, None))) > 1:
            raise ValueError(f"frames of a stream must be one clip, got a batch of {clips}")
        chosen = as_strategy(strategy)
        self.check(chosen, settings.get("sampling"))
        if isinstance(actions, str) and self.vocabulary is not None:
            actions = parse_actions(actions, self.vocabulary)
        if not isinstance(frames, Prompt):
            rows = rows_of(frames, None, settings.pop("context_actions", None))
            (frames,) = self._read_prompts(rows)
            self.warn_of_foreign([frames.frames])
        engine = self.start(frames, **settings)
        ids = (self.action_ids([action], 1, "generated frame") for action in actions)
        grids = (tokens for one in ids for tokens in engine.decode(chosen, one, 1))
        return (self.tokenizer.decode(tokens)[0].cpu() for tokens in grids)

    def start(
        self,
        frames: Clip | Prompt | list[Any],
        *,
        context_actions: Any = None,
        sampling: SamplingOptions | None = None,
        seed: int | list[int] = 0,
    ) -> DecodingEngine:
        """Return an engine with the context frames in its cache, to be driven frame by frame.

        Arguments (frames, context_actions, sampling, seed) are those of `generate`; a batch may
        have a list of seeds. Each frame may have a strategy of its own: `engine.decode("k=1",
        world.action_ids([action], 1, "frame"), 1)` yields its tokens.
        """
        if self.text is not None:
            raise ValueError("this model generates images from text, not a stream: call generate")
        prompts, tokens, contexts = self._read_rows(rows_of(frames, None, context_actions))
        num_context = [len(grids) for grids in contexts]
        max_slots, keep_frames = self._windows(num_context)
        engine = DecodingEngine(
            self.guided(None),
            self.config.frame,
            len(prompts),
            self.sampling(sampling),
            seed,
            max_slots=max_slots,
            keep_frames=keep_frames,
        )
        engine.prefill(tokens, num_context)
        return engine

    def _windows(self, context_frames: list[int]) -> tuple[list[int], int | None]:
        windows = [self.window(count) for count in context_frames]
        return [max_slots for max_slots, _ in windows], windows[0][1]

    def window(self, context_frames: int) -> tuple[int, int | None]:
        """Return the maximum context length in tokens, and `keep_frames` of `DecodingEngine`.

        `context_frames` beyond those remembered are kept nevertheless.
        """
        config, keep_frames = self.config, self.defaults.keep_frames
        if self.remembers is None:
            return config.max_positions, keep_frames
        num_frames, num_actions = max(self.remembers, context_frames + 1), config.num_action_tokens
        taken = num_frames * (config.tokens_per_frame + num_actions) - config.num_leading
        max_slots = min(config.max_positions, config.prefix_length + taken)
        return max_slots, keep_frames and min(keep_frames, num_frames - 1)

    def guided(self, scale: float | None, said: Sequence[TextIds] = ()) -> CausalModel:
        """Return the model with classifier-free guidance of `scale`, for the texts `said`.

        There is one text for each row of a batch. None is the model's own scale, 1 none.
        """
        scale = self.defaults.guidance if scale is None else scale
        model = self.model
        if said and (vectors := said[0].vectors) is not None:
            model = VectorPrompt(model, said[0].prompt[0], vectors, self.config.prefix_length)
        if scale == 1:
            return model
        if said:
            others, scales = [[one.unconditional[0] for one in said]], [scale]
            pictures = [one.picture[0] for one in said if one.picture is not None]
            if pictures:
                others, scales = [pictures, *others], [scale, said[0].picture_scale]
            lengths = [one.prompt.shape[1] for one in said]
            return GuidedModel(model, others, lengths, scales)
        if self.defaults.context_frames or self.vocabulary is None:
            raise ValueError(f"this model takes no guidance, got {scale}")
        return GuidedModel(self.model, self._idle_ids()[0], 1, scale)

    def check(self, strategy: Strategy, sampling: SamplingOptions | None = None) -> None:
        """Raise ValueError if `strategy` or `sampling` does not fit this world."""
        self.sampling(sampling)
        strategy.check(TokenGrid(1, self.height, self.width))

    def sampling(self, options: SamplingOptions | None = None) -> SamplingOptions:
        """Return `options`, or else the defaults, limited to visual ids."""
        given, size = options and options.valid_range, self.tokenizer.codebook_size
        if given is not None and (last := int(torch.as_tensor(given).max())) > size:
            raise ValueError(f"valid_range must be in [0, {size}], got {last}")
        return self.defaults.sampling(options, self.valid_range)

    def num_grids(self, num_frames: int) -> int:
        """Return the grids of `num_frames` generated frames; ValueError for a partial grid."""
        if self.text is not None and num_frames != 1:
            raise ValueError(
                f"num_frames must be 1 for a text, got {num_frames}: for several images give "
                "--images, or [None] * 2 in Python"
            )
        step = self.tokenizer.temporal_compression
        if whole(num_frames, "num_frames") % step:
            raise ValueError(
                f"num_frames must be a multiple of {step}: the tokenizer joins that many frames, "
                f"got {num_frames}"
            )
        check_memory(3 * num_frames * math.prod(self.frame_size_px), f"{num_frames} frames")
        return num_frames // step

    def read_prompt(
        self,
        clip: Clip | None,
        actions: Actions | None = None,
        *,
        context_frames: int | None = None,
        num_frames: int = 0,
    ) -> Prompt:
        """Read a prompt: frames of the model's size, and the actions between them.

        Args:
            clip: a path, or pictures, all of them used (see `read_clip` and `as_frames`), or None
                for an image from an action or a text alone.
            actions: between the frames, instead of those of the file or the idle action.
            context_frames: number of frames to use of a file; the model's default if None.
            num_frames: number of actions after the context to read from a recording.

        Raises:
            FileNotFoundError, ValueError: a missing or damaged file, or no frames or actions.
        """
        wanted, fps = self.defaults.context_frames, self.defaults.fps
        if not wanted and clip is None:
            none = torch.empty(0, *self.frame_size_px, 3, dtype=torch.uint8)
            return Prompt(none, [], [], fps, [])
        if not wanted and (self.text is None or not self.text.takes_pictures):
            given = "actions" if self.text is None else "texts"
            raise ValueError(f"prompt must be left out: this model takes {given} alone")
        per_grid = self.tokenizer.temporal_compression
        count = whole(context_frames or wanted or 1, "context_frames")
        prompt = read_clip(clip, self.vocabulary, count, num_frames, fps, per_grid)
        frames, between, notes = prompt.frames, prompt.context_actions, prompt.notes
        if not wanted and len(frames) > 1:
            raise ValueError(f"frames must be one picture for this model, got {len(frames)}")
        if frames.shape[1:3] != self.frame_size_px:
            given, size = ("x".join(map(str, s)) for s in (frames.shape[1:3], self.frame_size_px))
            notes.append(f"prompt is {given} pixels: centre-cropped and scaled to {size}")
            frames = self.tokenizer.fit_frames(frames, *self.frame_size_px)
        if actions is not None or self.vocabulary is None:
            between = self._named(actions, len(frames) - 1)
        elif between is None:
            idle = idle_action(self.vocabulary)
            between = [idle] * (len(frames) - 1)
            if between:
                where = Path(clip).name if isinstance(clip, str | Path) else "the prompt"
                notes.append(f"{where} has no actions: {idle!r} inserted between its frames")
        return replace(prompt, frames=frames, context_actions=between)

    def prompt(
        self, frames: Tensor, context_actions: Sequence[str] | None
    ) -> tuple[Tensor, Tensor]:
        """Return (1, P) tokens of prefix, frames and actions between; and the grids of the frames.

        `frames` are (m, H_px, W_px, 3) uint8 RGB of `frame_size_px`, with m - 1 `context_actions`.
        """
        if not len(frames):
            none = torch.empty(0, self.height, self.width, dtype=torch.int64)
            return none.view(1, 0), none
        grids = self.tokenizer.encode(frames.to(self.model.device))
        ids = self.action_ids(context_actions, len(grids) - 1, "context frame after the first")
        ids = torch.cat([self._idle_ids(), ids], 1)
        return prompt_tokens(self.config.prefix_ids, grids, ids, self.config.frame), grids

    def _idle_ids(self) -> Tensor:
        idle = None if self.vocabulary is None else [idle_action(self.vocabulary)]
        return self.action_ids(idle, 1, "frame")

    def action_ids(self, actions: Actions | None, count: int, what: str) -> Tensor:
        """Return (1, count, num_tokens) ids of `actions`, no tokens for a model without actions.

        ValueError unless there are `count` known actions, one for each `what`.
        """
        if (names := self._named(actions, count)) is None:
            return torch.empty(1, count, 0, dtype=torch.int64, device=self.model.device)
        if len(names) != count:
            raise ValueError(f"expected {count} actions, one for each {what}, got {len(names)}")
        return self.ids_of(names)

    def ids_of(self, names: Sequence[str]) -> Tensor:
        """Translate actions that the model has to ids, (1, len(names), num_tokens) int64."""
        codec = self.vocabulary
        assert codec is not None
        local = torch.tensor([codec.tokens_of(name) for name in names], dtype=torch.int64)
        ids = local.view(1, len(names), codec.num_tokens) + self.tokenizer.codebook_size
        return ids.to(self.model.device)

    def _named(self, actions: Actions | None, count: int) -> list[str] | None:
        if self.vocabulary is not None:
            return as_actions([] if actions is None else actions, self.vocabulary, count)
        if actions is not None and len(actions):
            raise ValueError("this model takes no actions")
        return None
