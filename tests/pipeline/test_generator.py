import base64
import json
import re
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diagd
from diagd.data.video import read_video, write_image
from diagd.families.checkpoints import write_defaults
from diagd.families.defaults import GenerationDefaults
from diagd.tokenizers.vq import VQTokenizer
from tests.worlds import (
    HEIGHT,
    HEIGHT_PX,
    NAMES,
    NUM_CODES,
    PROMPT_ACTIONS,
    WALK,
    WIDTH,
    WIDTH_PX,
    smooth_frames,
    write_world,
)

GREEDY = diagd.SamplingOptions()
BETWEEN = ["left", "right"]  # the actions between three context frames


@pytest.fixture(scope="module")
def generator(world):
    return diagd.VideoGenerator.from_pretrained(world)


@pytest.fixture(scope="module")
def context(world):
    return read_video(world / "prompt.mp4").frames[-3:]


def ids_of(names):
    return [NUM_CODES + NAMES.index(name) for name in names]


def by_hand(world, context, schedule, sampling, **options):
    """Tokenize, interleave, generate and decode with the parts, one after the other."""
    tokenizer = VQTokenizer.from_pretrained(world / "tokenizer")
    model = diagd.load_model(world)
    first, second, third = tokenizer.encode(context).flatten(1).tolist()
    left, right = ids_of(BETWEEN)
    out = diagd.generate_tokens(
        model,
        torch.tensor([[*first, left, *second, right, *third]]),
        schedule,
        torch.tensor([ids_of(WALK)])[..., None],
        context_frames=3,
        sampling=sampling,
        **options,
    )
    return out.tokens[0], tokenizer.decode(out.tokens[0])


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        ({}, lambda grid: diagd.DiagonalSchedule.spatial(grid, 1)),
        ({"strategy": "k=2"}, lambda grid: diagd.DiagonalSchedule.spatial(grid, 2)),
        ({"strategy": "k=2,d=4"}, lambda grid: diagd.DiagonalSchedule(grid, 2, 4)),
        ({"strategy": "raster"}, diagd.DiagonalSchedule.raster),
        ({"strategy": "k=1/predecessor"}, diagd.Diagonal(1, None, "predecessor").schedule),
        ({"strategy": "k=1/spatial"}, diagd.Diagonal(1, None, "spatial").schedule),
    ],
    ids=["default", "k=2", "overlap", "raster", "predecessor", "spatial"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_is_tokenize_interleave_generate_tokens_and_decode(
    temperature, flags, schedule, generator, world, context
):
    grid = diagd.TokenGrid(3, HEIGHT, WIDTH)
    sampling = diagd.SamplingOptions(temperature, valid_range=(0, NUM_CODES))
    video = generator.generate(
        context,
        WALK,
        3,
        context_actions=BETWEEN,
        sampling=diagd.SamplingOptions(temperature),
        seed=5,
        **flags,
    )
    tokens, frames = by_hand(world, context, schedule(grid), sampling, seed=5)
    assert torch.equal(video.tokens, tokens)
    assert torch.equal(video.frames, frames)
    assert (video.frames.dtype, video.frames.shape) == (torch.uint8, (3, HEIGHT_PX, WIDTH_PX, 3))
    assert video.stats.num_steps == schedule(grid).num_steps


def test_sampling_is_temperature_1_and_top_p_by_default(generator, context):
    usual = GenerationDefaults().sampling(None, (0, NUM_CODES))
    default = generator.generate(context, WALK, 3, context_actions=BETWEEN, seed=3)
    told = generator.generate(context, WALK, 3, context_actions=BETWEEN, seed=3, sampling=usual)
    assert (usual.temperature, usual.top_p) == (1.0, 0.9)
    assert torch.equal(default.tokens, told.tokens)


def test_only_visual_ids_are_drawn(generator, context):
    hot = diagd.SamplingOptions(temperature=1e6)
    tokens = generator.generate(context, ["left"] * 5, 5, context_actions=BETWEEN, sampling=hot)
    assert tokens.tokens.max() < NUM_CODES
    narrow = diagd.SamplingOptions(temperature=1e6, valid_range=(3, 5))
    tokens = generator.generate(context, ["left"], 1, context_actions=BETWEEN, sampling=narrow)
    assert set(tokens.tokens.flatten().tolist()) == {3, 4}


def test_ids_that_cannot_be_painted_are_refused(generator):
    wide = diagd.SamplingOptions(valid_range=(0, NUM_CODES + 1))
    with pytest.raises(ValueError, match=rf"valid_range must be in \[0, {NUM_CODES}\], got"):
        generator.sampling(wide)


@pytest.mark.parametrize("row_lag", [1, 2, 5])
@pytest.mark.parametrize("sampling", [GREEDY, None], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_frames", [4, 12], ids=["fits", "drops frames"])
def test_a_stream_shows_the_frames_that_generate_makes(
    num_frames, sampling, row_lag, generator, context
):
    actions = [NAMES[frame % 4] for frame in range(num_frames)]
    options = {"context_actions": BETWEEN, "sampling": sampling, "seed": 2}
    options |= {"strategy": f"k={row_lag}"}
    whole = generator.generate(context, actions, num_frames, **options)
    stream = list(generator.stream(context, iter(actions), **options))
    difference = torch.stack(stream).int() - whole.frames.int()
    assert difference.abs().max() <= 1  # frames painted one by one may round differently
    assert bool(whole.stats.num_dropped_frames) == (num_frames == 12)


def test_a_world_that_remembers_less_dreams_as_one_that_holds_less(world, context, tmp_path):
    short = Path(shutil.copytree(world, tmp_path / "short"))
    config = json.loads((world / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_positions": 3 * 16 - 1}))
    copy = shutil.copytree(world, tmp_path / "forgetful")
    write_defaults(copy, GenerationDefaults(remember=3))
    forgetful = diagd.VideoGenerator.from_pretrained(copy)
    held = diagd.VideoGenerator.from_pretrained(short)
    whole = diagd.VideoGenerator.from_pretrained(world)
    found, expected, other = (
        torch.stack(list(one.stream(context[-2:], ["left"] * 7, strategy="k=2", seed=5)))
        for one in (forgetful, held, whole)
    )
    assert torch.equal(found, expected)
    assert not torch.equal(found, other)
    both = (one.generate(context[-2:], "left*7", seed=5) for one in (forgetful, held))
    assert torch.equal(*(video.tokens for video in both))
    given = read_video(world / "prompt.mp4").frames
    assert len(given) > 3  # a longer context is seen whole
    both = (one.generate(given, "left*2", seed=5) for one in (forgetful, whole))
    assert torch.equal(*(video.tokens[:1] for video in both))
    with pytest.raises(ValueError, match="remember must be 2 to"):
        GenerationDefaults(remember=1)


def test_a_stream_takes_a_string_of_actions(generator, context):
    frames = [
        torch.stack(list(generator.stream(context, actions, context_actions=BETWEEN)))
        for actions in ("forward,left*2", ["forward", "left", "left"])
    ]
    assert torch.equal(*frames)


@pytest.mark.parametrize(
    ("actions", "strategy", "message"),
    [
        ("jump*2", "k=1", "unknown action 'jump'"),
        (["left"], "k=9", r"row_lag must be in \[1, width=5\], got 9"),
    ],
)
def test_a_stream_refuses_what_does_not_fit_at_once(actions, strategy, message, generator, context):
    with pytest.raises(ValueError, match=message):
        generator.stream(context, actions, strategy=strategy, context_actions=BETWEEN)


def test_a_stream_keeps_no_record_of_frames_gone_by(generator, context, monkeypatch):
    engines, start = [], generator.start
    monkeypatch.setattr(
        generator, "start", lambda *a, **k: engines.append(start(*a, **k)) or engines[0]
    )
    kept = [
        len(engines[0].stream.verified)
        for _ in generator.stream(context, "left*6", strategy="exact", context_actions=BETWEEN)
    ]
    assert max(kept) <= HEIGHT * WIDTH + 1


def test_a_stream_waits_for_the_next_action(generator, context):
    asked = []

    def actions():
        for name in WALK:
            asked.append(name)
            yield name

    stream = generator.stream(context, actions(), context_actions=BETWEEN)
    for number, _ in enumerate(stream, start=1):
        assert len(asked) == number


def test_one_context_frame_is_enough(generator, context):
    for between in (None, []):
        video = generator.generate(context[-1:], ["left"], 1, context_actions=between)
        assert video.frames.shape == (1, HEIGHT_PX, WIDTH_PX, 3)


@pytest.mark.parametrize("actions", ["forward,left*2", [1, 2, 2], torch.tensor([1, 2, 2])])
def test_actions_come_in_any_form_and_say_how_many_frames(actions, generator, context):
    names = ["forward", "left", "left"]
    told = generator.generate(context, names, 3, context_actions=BETWEEN, seed=1)
    video = generator.generate(context, actions, context_actions="left,right", seed=1)
    assert torch.equal(video.tokens, told.tokens)
    longer = generator.generate(context, "forward,left", 3, context_actions=[2, 3], seed=1)
    assert torch.equal(longer.tokens, told.tokens)


def test_a_path_is_continued_with_its_own_actions_and_rate(generator, world):
    prompt = read_video(world / "prompt.mp4")
    video = generator.generate(world / "prompt.mp4", WALK, seed=1)
    between = PROMPT_ACTIONS[-3:]
    told = generator.generate(prompt.frames[-4:], WALK, context_actions=between, seed=1)
    assert torch.equal(video.tokens, told.tokens)
    assert (video.fps, told.fps) == (8, 8.75)


@pytest.mark.parametrize("sampling", [GREEDY, None], ids=["greedy", "sampled"])
@pytest.mark.parametrize("strategy", ["k=1", "k=2,d=4", "raster", "exact"])
def test_a_batch_is_what_its_clips_are_one_by_one(strategy, sampling, generator, world, context):
    clips = [context, smooth_frames(3, HEIGHT_PX, WIDTH_PX, seed=7).numpy(), list(context.flip(0))]
    actions = ["left*4", ["none", "right", "left", "forward"], [1, 1, 1, 1]]
    between = [BETWEEN, None, "right"]
    options = {"sampling": sampling, "strategy": strategy}
    videos = generator.generate(clips, actions, context_actions=between, seed=4, **options)
    assert len(videos) == 3
    for row, video in enumerate(videos):
        alone = generator.generate(
            clips[row], actions[row], context_actions=between[row], seed=4 + row, **options
        )
        assert torch.equal(video.tokens, alone.tokens)
        assert torch.equal(video.frames, alone.frames)
        assert video.stats is videos[0].stats
    assert len({tuple(video.tokens.flatten().tolist()) for video in videos}) == 3


def test_paths_and_arrays_of_five_axes_are_batches_too(generator, world, context):
    path = world / "prompt.mp4"
    assert len(generator.generate([path, str(path)], ["left", "right"])) == 2
    (video,) = generator.generate(context[None], [WALK], context_actions=[BETWEEN], seed=2)
    alone = generator.generate(context, WALK, context_actions=BETWEEN, seed=2)
    assert torch.equal(video.tokens, alone.tokens)


@pytest.mark.parametrize(
    ("clips", "actions", "message"),
    [
        ([], [], "a batch must hold at least one clip, got an empty list"),
        (2, "left", r"actions of a batch: expected 2, one for each clip, got 'left'"),
        (2, ["left"], r"actions of a batch: expected 2, one for each clip, got 1"),
        (2, ["left*2", ["left"]], "expected 2 actions, one for each generated frame, got 1"),
        (2, None, "expected 16 actions, one for each generated frame, got 0"),
    ],
)
def test_batches_that_do_not_fit_are_refused(clips, actions, message, generator, context):
    with pytest.raises(ValueError, match=message):
        generator.generate([context, context] if clips else [], actions)


@pytest.mark.parametrize("strategy", ["raster", "k=1,d=3", "exact"])
def test_clips_of_unlike_lengths_are_a_batch_beyond_a_full_context_too(
    strategy, generator, context
):
    clips, given = [context[:1], context, context[1:]], {"strategy": strategy, "seed": 3}
    videos = generator.generate(clips, ["left*9", "right*9", "none*9"], **given)
    for row, (video, name) in enumerate(zip(videos, ("left", "right", "none"), strict=True)):
        own = given | {"seed": 3 + row}
        alone = generator.generate(clips[row], f"{name}*9", **own)
        assert torch.equal(video.tokens, alone.tokens)
    assert videos[0].stats.num_dropped_frames


def test_a_world_and_a_video_are_one_line(generator, world, context):
    video = generator.generate(context, WALK, context_actions=BETWEEN)
    seconds = f"{video.stats.seconds:.2f}"
    assert repr(video) == (
        f"GeneratedVideo(3 frames of 24x40 px, 8.75 fps, 21 steps in {seconds} s)"
    )
    assert repr(generator) == f"VideoGenerator({world}: 24x40 px, 3x5 tokens, 4 actions)"


def test_a_video_plays_in_a_notebook_by_itself(generator, context, tmp_path):
    video = generator.generate(context, WALK, context_actions=BETWEEN)
    video.save(tmp_path / "a.mp4")
    tag = re.fullmatch(
        r'<video width="80" controls autoplay loop muted '
        r'src="data:video/mp4;base64,([\w+/=]+)"></video>',
        video._repr_html_(),
    )
    assert tag
    assert base64.b64decode(tag[1]) == (tmp_path / "a.mp4").read_bytes()
    shown = read_video(tmp_path / "a.mp4")
    assert (shown.frames.shape, shown.fps) == (video.frames.shape, Fraction(35, 4))


def test_a_model_without_actions(tmp_path, context):
    generator = diagd.VideoGenerator.from_pretrained(write_world(tmp_path, num_action_tokens=0))
    assert generator.vocabulary is None
    video = generator.generate(context, num_frames=2, sampling=GREEDY)
    prompt = generator.tokenizer.encode(context).flatten()[None]
    schedule = diagd.DiagonalSchedule.spatial(diagd.TokenGrid(2, HEIGHT, WIDTH))
    model = diagd.load_model(tmp_path)
    assert torch.equal(
        video.tokens, diagd.generate_tokens(model, prompt, schedule, context_frames=3).tokens[0]
    )
    with pytest.raises(ValueError, match="this model takes no actions"):
        generator.generate(context, ["left"], num_frames=1)


@pytest.mark.parametrize(
    ("actions", "between", "message"),
    [
        (None, BETWEEN, "expected 2 actions, one for each generated frame, got 0"),
        (["left"], BETWEEN, "expected 2 actions, one for each generated frame, got 1"),
        (["left"] * 3, BETWEEN, "expected 2 actions, one for each generated frame, got 3"),
        (["left", "jump"], BETWEEN, "unknown action 'jump', expected one of: none, forward"),
        (["left"] * 2, ["left"], "one for each context frame after the first, got 1"),
        (["left"] * 2, ["left", "jump"], "unknown action 'jump', expected one of: none, forward"),
    ],
)
def test_actions_that_do_not_fit_are_refused(actions, between, message, generator, context):
    with pytest.raises(ValueError, match=message):
        generator.generate(context, actions, 2, context_actions=between)


def test_actions_between_frames_of_a_prompt_that_was_read_are_refused(generator, world):
    prompt = generator.read_prompt(world / "prompt.mp4")
    for ask in (generator.generate, generator.stream):
        with pytest.raises(
            ValueError, match="context_actions must be left out: this prompt has its own"
        ):
            ask(prompt, "left", context_actions="left*3")


def test_a_strategy_that_does_not_fit_is_refused(generator, context):
    with pytest.raises(ValueError, match=r"row_lag must be in \[1, width=5\], got 6"):
        generator.generate(context, WALK, 3, context_actions=BETWEEN, strategy="k=6")


@pytest.mark.parametrize("num_frames", [2.0, 2.5, "2"])
def test_a_number_of_frames_that_is_not_whole_is_refused(num_frames, generator, context):
    message = rf"^num_frames must be a whole number, got {num_frames!r}$"
    with pytest.raises(ValueError, match=message):
        generator.generate(context, "left*2", num_frames)


def test_frames_of_context_are_a_whole_number_of_numpy_too(generator, world):
    read = generator.read_prompt(world / "prompt.mp4", context_frames=np.int64(2))
    assert len(read.frames) == 2
    with pytest.raises(ValueError, match=r"^context_frames must be a whole number, got 2\.0$"):
        generator.read_prompt(world / "prompt.mp4", context_frames=2.0)


def test_a_stream_of_a_batch_is_refused(generator, context):
    with pytest.raises(
        ValueError, match=r"^frames of a stream must be one clip, got a batch of 2$"
    ):
        generator.stream([context, context], ["left"])


@pytest.mark.parametrize("dtype", ["bf16", "torch.float32", np.float32, "randn"])
def test_a_dtype_that_is_none_is_refused(dtype, world):
    with pytest.raises(ValueError, match="dtype must be a torch dtype or a name such as bfloat16"):
        diagd.VideoGenerator.from_pretrained(world, dtype=dtype)


def test_a_stream_refuses_an_unknown_action_when_it_comes(generator, context):
    stream = generator.stream(context, iter(["left", "jump"]), context_actions=BETWEEN)
    assert next(stream).shape == (HEIGHT_PX, WIDTH_PX, 3)
    with pytest.raises(ValueError, match="unknown action 'jump'"):
        next(stream)


def test_the_example_of_the_guide_runs(world, tmp_path, monkeypatch):
    """As it stands, but for the model and the upload."""
    monkeypatch.chdir(tmp_path)
    write_image("photo.jpg", smooth_frames(1, 50, 70)[0])
    text = (Path(__file__).parents[2] / "docs" / "use.md").read_text()
    code = text.partition("## Pixels in, pixels out")[2].split("```python\n")[1].split("```")[0]
    *lines, last = code.replace('"doom"', repr(str(world))).splitlines()
    assert last == 'world.push_to_hub("user/name")'
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    assert names["video"].frames.shape == (12, HEIGHT_PX, WIDTH_PX, 3)
    assert (tmp_path / "dream.gif").is_file()
    assert [len(video.frames) for video in names["videos"]] == [8, 8]
