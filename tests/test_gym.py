import multiprocessing
import re
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

import diagd
from diagd.data.actions import write_actions
from diagd.data.video import read_video, write_image, write_video
from tests.web.play.serving import serving, wait_until
from tests.worlds import HEIGHT_PX, NAMES, WIDTH_PX, smooth_frames, write_scenes, write_world

ID = "diagd.gym:diagd/World-v0"
PAGE = Path(__file__).parents[1] / "docs" / "gym.md"
SHAPE = (HEIGHT_PX, WIDTH_PX, 3)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a world folder with a prompt of five frames, a clip of three and one of two."""
    folder = write_world(tmp_path_factory.mktemp("place"))
    (folder / "scenes").mkdir()
    for name, length in (("hall", 3), ("red-door", 2)):
        frames = smooth_frames(length, HEIGHT_PX, WIDTH_PX, seed=length)
        write_video(folder / "scenes" / f"{name}.mp4", frames, fps=8)
        write_actions(folder / "scenes" / f"{name}.jsonl", NAMES[:length])
    return folder


@pytest.fixture(scope="module")
def generator(place):
    return diagd.VideoGenerator.from_pretrained(place)


def walk(env, actions, **begin):
    """Return the first frame and those that actions lead to."""
    frames = [env.reset(**begin)[0]]
    return np.stack(frames + [env.step(np.int64(action))[0] for action in actions])


@pytest.mark.parametrize("strategy", ["k=1", "raster", "exact"])
def test_gymnasiums_own_check_finds_nothing(strategy, place):
    env = gymnasium.make(ID, world=str(place), strategy=strategy, render_mode="rgb_array")
    check_env(env.unwrapped)
    env.close()


def test_spaces_and_pace_are_the_models(generator):
    env = diagd.GymEnv(generator)
    assert env.action_space == gymnasium.spaces.Discrete(len(NAMES))
    assert env.observation_space == gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)
    assert env.metadata["render_fps"] == generator.defaults.fps
    assert env.episodes.names == NAMES


def test_an_episode_is_what_the_generator_streams_from_the_scene(generator, place):
    sampling = diagd.SamplingOptions()
    env = diagd.GymEnv(generator, sampling=sampling, strategy="k=2", context_frames=2)
    seen = walk(env, [1, 3, 0, 2], options={"scene": "hall"})
    clip = read_video(place / "scenes" / "hall.mp4").frames[-2:]
    streamed = generator.stream(
        clip,
        iter([NAMES[1], NAMES[3], NAMES[0], NAMES[2]]),
        strategy="k=2",
        context_actions=NAMES[2:3],
        sampling=sampling,
    )
    assert np.array_equal(seen[0], clip[-1])
    assert np.array_equal(seen[1:], torch.stack(list(streamed)))


def test_the_same_seed_repeats_an_episode_beyond_a_full_context_and_another_does_not(generator):
    env, actions = diagd.GymEnv(generator), [1, 2, 3, 0, 1, 1, 2, 3, 0, 0, 2]
    once = walk(env, actions, seed=5)
    assert np.array_equal(once, walk(diagd.GymEnv(generator), actions, seed=5))
    assert not np.array_equal(once, walk(env, actions))  # the next episode of that seed


def test_scenes_begin_with_equally_many_frames_and_are_drawn_or_named(generator):
    env = diagd.GymEnv(generator)
    assert {len(scene.frames) for scene in env.episodes.scenes} == {2}
    assert {len(scene.actions) for scene in env.episodes.scenes} == {1}
    drawn = {env.reset(seed=seed)[1]["scene"] for seed in range(30)}
    assert drawn == {"opening", "hall", "red door"}
    assert env.reset(options={"scene": 2})[1] == {"scene": "red door"}
    with pytest.raises(ValueError, match=r"one of: opening, hall, red door; got 'cellar'"):
        env.reset(options={"scene": "cellar"})


def test_rewards_are_nothing_and_only_the_time_limit_ends_an_episode(place):
    env = gymnasium.make(ID, world=str(place), max_episode_steps=3)
    env.reset(seed=0)
    steps = [env.step(np.int64(1)) for _ in range(3)]
    assert [step[1:4] for step in steps] == [(0.0, False, False)] * 2 + [(0.0, False, True)]


def test_a_step_is_told_with_its_scene_its_action_and_its_number(generator):
    env = diagd.GymEnv(generator)
    for scene in ("hall", "red door"):  # numbers begin anew
        env.reset(options={"scene": scene})
        told = [env.step(np.int64(action))[-1] for action in (2, 0)]
        assert told == [
            {"scene": scene, "action": "left", "frame": 1},
            {"scene": scene, "action": "none", "frame": 2},
        ]


def test_a_world_is_loaded_in_the_dtype_that_is_asked_for(place, generator):
    for dtype, used in (("int8", "int8"), (torch.bfloat16, "bfloat16"), ("float32", "float32")):
        env = gymnasium.make(ID, world=str(place), dtype=dtype)
        assert env.unwrapped.episodes.world.dtype == used  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"dtype must be a torch dtype or a name .*, got 'fast'"):
        diagd.GymEnv(place, dtype="fast")
    with pytest.raises(ValueError, match=r"dtype must be left out: this world is loaded, in "):
        diagd.GymEnv(generator, dtype="int8")


def test_rendering_shows_what_was_seen_last(generator):
    env = diagd.GymEnv(generator, render_mode="rgb_array")
    assert env.render() is None
    for show in (lambda: env.reset(seed=0)[0], lambda: env.step(np.int64(2))[0]):
        frame, shown = show(), env.render()
        assert shown is not None
        assert np.array_equal(frame, shown)
        frame[:] = 0  # the caller's own
        again = env.render()
        assert again is not None
        assert np.array_equal(again, shown)
    assert diagd.GymEnv(generator).render() is None


@pytest.mark.parametrize("strategy", ["k=1", "exact"])
def test_a_batch_shows_what_one_after_the_other_shows(strategy, place):
    """Gymnasium's own vectors of single worlds are the oracle, over the end of an episode."""
    settings = {"world": str(place), "strategy": strategy, "render_mode": "rgb_array"}
    ours, theirs = (
        gymnasium.make_vec(ID, num_envs=2, vectorization_mode=mode, max_episode_steps=3, **settings)
        for mode in ("vector_entry_point", "sync")
    )
    assert isinstance(ours.unwrapped, diagd.GymVectorEnv)
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    assert ours.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"]
    together, apart = ours.reset(seed=7), theirs.reset(seed=7)
    actions = np.random.default_rng(0).integers(len(NAMES), size=(5, 2))
    for row in [*actions]:
        assert np.array_equal(together[0], apart[0])
        assert {k: list(v) for k, v in together[-1].items()} == {
            k: list(v) for k, v in apart[-1].items()
        }
        for mine, reference in zip(together[1:-1], apart[1:-1], strict=True):
            assert np.array_equal(mine, reference)
        assert np.array_equal(np.stack(ours.render() or ()), np.stack(theirs.render() or ()))
        together, apart = ours.step(row), theirs.step(row)


def walk_of(world):
    return walk(diagd.GymEnv(world), [1, 2], seed=3)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_waits_for_no_threads(place):
    """As in gymnasium's AsyncVectorEnv, which makes a world of its own before it forks."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = walk_of(place)
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert np.array_equal(pool.apply_async(walk_of, [place]).get(timeout=20), expected)
    finally:
        torch.set_num_threads(before)


def test_worlds_of_a_batch_have_seeds_and_scenes_of_their_own(generator):
    many = diagd.GymVectorEnv(generator, num_envs=3)
    frames, info = many.reset(seed=[4, None, 4])
    assert np.array_equal(frames[0], frames[2])
    assert info["scene"][0] == info["scene"][2]
    counted, _ = many.reset(seed=4)
    same: list[Any] = [np.int64(4), np.arange(4, 7), [4, np.uint8(5), 6]]
    for seed in same:
        assert np.array_equal(many.reset(seed=seed)[0], counted)
    frames, info = many.reset(options={"scene": "hall", "reset_mask": np.ones(3, bool)})
    assert list(info["scene"]) == ["hall"] * 3
    cases: list[tuple[dict[str, Any], str]] = [
        ({"options": {"reset_mask": np.array([True, False, True])}}, "start together"),
        ({"seed": [1, 2]}, "expected 3 seeds, got 2"),
        ({"seed": [1, 2, 2.5]}, "seed must be a whole number, got 2.5"),
        ({"options": {"scene": 3}}, "a number below 3"),
    ]
    for bad, message in cases:
        with pytest.raises(ValueError, match=message):
            many.reset(**bad)


def test_a_folder_of_scenes_stands_in_place_of_the_models(generator, tmp_path):
    write_image(tmp_path / "a_view.png", smooth_frames(1, 60, 60)[0])
    env = diagd.GymEnv(generator, scenes=tmp_path)
    assert env.reset()[1] == {"scene": "a view"}
    with pytest.raises(ValueError, match=r"no start scene: .*none has no clip or image"):
        diagd.GymEnv(generator, scenes=tmp_path / "none")


def test_what_does_not_fit_is_refused_before_anything_is_generated(generator, tmp_path):
    env, many = diagd.GymEnv(generator), diagd.GymVectorEnv(generator, num_envs=2)
    cases: list[tuple[Any, Any]] = [(env, np.int64(1)), (many, np.array([0, 1]))]
    for one, action in cases:
        with pytest.raises(ResetNeeded, match="reset must be called before step"):
            one.step(action)
        one.reset(seed=0)
    cases = [(env, 4), (env, -1), (env, "forward"), (many, [0, 4]), (many, [1])]
    for one, action in cases:
        with pytest.raises(ValueError, match="action must be in"):
            one.step(action)
    for make, message in (
        (lambda: diagd.GymEnv(generator, strategy="k=9"), "row_lag must be in"),
        (lambda: diagd.GymEnv(generator, context_frames=0), "context_frames must be at least 1"),
        (lambda: diagd.GymEnv(generator, render_mode="human"), "render_mode must be rgb_array"),
        (lambda: diagd.GymVectorEnv(generator, 0), "num_envs must be at least 1"),
        (lambda: diagd.GymEnv(write_world(tmp_path / "still", 0)), "takes no actions"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("name", ["num_envs", "max_episode_steps"])
def test_numbers_that_are_not_whole_are_refused(name, generator):
    wrong: dict[str, Any] = {name: 2.5}
    with pytest.raises(ValueError, match=rf"^{name} must be a whole number, got 2\.5$"):
        diagd.GymVectorEnv(generator, **wrong)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Serve a world with a prompt and four pictures to start from, to two players."""
    folder = write_scenes(write_world(tmp_path_factory.mktemp("served")))
    with serving(folder, max_sessions=2) as served:
        yield served


def test_gymnasiums_own_check_finds_nothing_in_a_world_elsewhere(served):
    env = gymnasium.make(ID, url=served.url, render_mode="rgb_array")
    check_env(env.unwrapped)
    env.close()
    wait_until(lambda: not served.scheduler.players)


def test_a_world_elsewhere_is_the_world_here_to_the_pixel(served):
    world, begin = served.scheduler.world, {"seed": 5, "options": {"scene": "view 4"}}
    here = diagd.GymEnv(world, strategy="k=2")
    there = diagd.GymEnv(url=served.url, strategy="k=2")
    for name in ("action_space", "observation_space"):
        assert getattr(here, name) == getattr(there, name), name
    assert here.episodes.names == there.episodes.names
    actions = [1, 2, 3, 0, 1, 1, 2, 3, 0, 0, 2]  # beyond a full context
    assert np.array_equal(walk(here, actions, **begin), walk(there, actions, **begin))
    assert here.step(np.int64(1))[1:] == there.step(np.int64(1))[1:]
    with pytest.raises(ValueError, match=r"one of: opening, view 3, .* got 'cellar'"):
        there.reset(options={"scene": "cellar"})
    there.close()


def test_a_batch_elsewhere_is_a_batch_here(served):
    begin, seen = {"seed": [3, 9], "options": {"scene": 1}}, []
    for settings in ({"world": served.scheduler.world}, {"url": served.url}):
        env = gymnasium.make_vec(ID, num_envs=2, max_episode_steps=2, **settings)
        frames, info = env.reset(**begin)
        told = [env.step(np.array(actions)) for actions in ([1, 2], [3, 0], [0, 0])]
        seen.append([frames, info["scene"], *(one[0] for one in told[:2]), told[1][3]])
        assert told[2][0].shape == frames.shape  # the next episode begins
        env.close()
    for one, other in zip(*seen, strict=True):
        assert np.array_equal(one, other)


def test_what_a_server_decides_is_left_to_it(served):
    for settings in ({"dtype": "int8"}, {"world": "maze"}, {"sampling": diagd.SamplingOptions()}):
        given: dict[str, Any] = settings
        with pytest.raises(ValueError, match=r"^world, .* and dtype must be left out: the server"):
            diagd.GymEnv(url=served.url, **given)
    with pytest.raises(ValueError, match="row_lag must be in"):
        diagd.GymEnv(url=served.url, strategy="k=9")
    env = diagd.GymEnv(url=served.url)
    with pytest.raises(ResetNeeded, match="reset must be called before step"):
        env.step(np.int64(1))
    env.close()


def test_without_gymnasium_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "diagd.gym")
    monkeypatch.delitem(vars(diagd), "GymEnv", raising=False)
    message = r"^diagd\.gym needs gymnasium: pip install -e '\.\[gym\]'$"
    with pytest.raises(ModuleNotFoundError, match=message):
        _ = diagd.GymEnv


def test_the_page_about_it_runs(capsys):
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(code, {})
    assert len(capsys.readouterr().out.splitlines()) == 4
