import shutil
import sys

import pytest

from diagd.data.actions import write_actions
from diagd.data.video import write_video
from diagd.decoding.strategies.table import Diagonal
from diagd.families.checkpoints import write_defaults
from diagd.families.defaults import GenerationDefaults
from diagd.web.guard import listen
from diagd.web.play.server import PlayOptions, load
from diagd.web.play.session import Controls
from tests.golden import FIXTURES
from tests.processes import interrupt_a_server
from tests.worlds import smooth_frames, write_world


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max-sessions", 0), "max_sessions must be at least 1, got 0"),
        (("--context-frames", 0), "context_frames must be at least 1, got 0"),
        (("--port", 70000), r"port must be in \[0, 65536\), got 70000"),
        (("--idle-seconds", 0), "idle_seconds must be above 0, got 0"),
        (("--scenes", "nowhere"), "folder of scenes not found: nowhere"),
        (("--recordings", "nowhere"), "folder for recordings not found: nowhere"),
        (("--scenes", "."), r"no clip or image in \."),
        (
            ("--host", "0.0.0.0"),
            r"host 0\.0\.0\.0 needs --api-key or --api-keys, or --allow-anyone",
        ),
        (("--host", "256.0.0.1", "--allow-anyone"), "cannot listen on '256.0.0.1'"),
        (("--device", "cuda:99"), "device 'cuda:99' is not available"),
    ],
)
def test_bad_flags_are_refused(flags, message, command, world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command("play", "--model", world, "--no-open", "--port", 0, *flags).assert_refused(message)


def test_a_model_without_actions_cannot_be_played(command, tmp_path):
    model = write_world(tmp_path / "still", num_action_tokens=0)
    outcome = command("play", "--model", model, "--no-open", "--port", 0)
    outcome.assert_refused("takes no actions, so there is nothing to play: diagd generate shows")


def test_a_model_without_a_start_says_what_to_do(command, tmp_path):
    model = write_world(tmp_path / "bare")
    (model / "prompt.mp4").unlink()
    outcome = command("play", "--model", model, "--no-open", "--port", 0)
    outcome.assert_refused("nowhere to start: .*bare has no prompt.mp4, name a folder by --scenes")


def test_a_model_that_is_one_file_starts_from_the_prompt_beside_it(tmp_path):
    shutil.copy(FIXTURES / "wham_tiny" / "config.json", tmp_path)
    model = shutil.copy(FIXTURES / "wham_tiny" / "model.ckpt", tmp_path)
    write_video(tmp_path / "prompt.mp4", smooth_frames(4, 60, 80), fps=10)
    write_actions(tmp_path / "prompt.jsonl", ["none"] * 4)
    scheduler, _ = load(PlayOptions(model=str(model), dtype="float32"))
    assert [scene.name for scene in scheduler.scenes] == ["opening"]


@pytest.mark.parametrize("defaults", [{"temperature": 6.0}, {"top_p": 0.005}])
def test_sampling_that_no_page_can_ask_for_is_refused(defaults, command, tmp_path):
    model = write_world(tmp_path / "hot")
    write_defaults(model, GenerationDefaults(**defaults))
    message = r"hot: temperature must be in \[0, 5\] and top_p in \[0\.01, 1\] to be played, got"
    command("play", "--model", model, "--no-open", "--port", 0).assert_refused(message)


def test_the_world_s_own_sampling_and_context_are_where_a_dream_begins(tmp_path):
    model = write_world(tmp_path / "warm")
    defaults = GenerationDefaults(context_frames=2, temperature=0.5, top_p=None, decoding="k=2")
    write_defaults(model, defaults)
    scheduler, _ = load(PlayOptions(model=str(model), dtype="float32"))
    assert scheduler.controls == Controls(Diagonal(2), 0.5, 1.0)
    assert len(scheduler.scenes[0].frames) == 2
    scheduler, _ = load(PlayOptions(model=str(model), dtype="float32", context_frames=3))
    assert len(scheduler.scenes[0].frames) == 3


def test_a_world_that_remembers_fewer_frames_starts_with_fewer(tmp_path):
    model = write_world(tmp_path / "short")
    write_defaults(model, GenerationDefaults(context_frames=4, keep_frames=4))
    scheduler, _ = load(PlayOptions(model=str(model), dtype="float32", remember=3))
    assert len(scheduler.scenes[0].frames) == 2
    engine = scheduler.world.start(scheduler.scenes[0].frames)
    for frame in range(4):
        list(engine.decode("k=1", scheduler.world.action_ids(["left"], 1, "frame"), 1))
        assert engine.stream.num_held == min(3 + frame, 3)


def test_a_port_in_use_is_named(command, world):
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        outcome = command("play", "--model", world, "--no-open", "--port", port)
        outcome.assert_refused(rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use")


def test_it_serves_until_it_is_interrupted_and_says_what_happened(world, spawn):
    """The command as people run it: it names its address, and Ctrl-C is a clean end."""
    flags = ("play", "--model", world, "--no-open", "--port", 0, "--json")
    process = spawn("-m", "diagd", *flags, PYTHONUNBUFFERED="1", COLUMNS="200")
    url, out, err = interrupt_a_server(process)
    assert (process.returncode, err) == (0, "")
    assert out == f'{{"url": "{url}", "sessions": 0, "frames": 0}}\n'


@pytest.mark.parametrize("module", ["fastapi", "uvicorn"])
def test_the_extra_that_is_missing_is_named(module, command, monkeypatch):
    for name in [
        name for name in sys.modules if name.startswith(("diagd.web.", "diagd.commands."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    command("play").assert_refused(rf"play needs {module}: pip install -e '\.\[web\]' .*")
