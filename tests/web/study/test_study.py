import json
import shutil
import socket

import pytest
import torch

from diagd.backends import prepare
from diagd.data.actions import ActionVocabulary, read_actions, write_actions
from diagd.data.video import read_video, write_video
from diagd.web.study.pairs import find_pairs
from diagd.web.study.store import StudyStore
from tests.backends.candidates import BFLOAT16, FLOAT32, candidates_of
from tests.golden import FIXTURES
from tests.processes import interrupt_a_server
from tests.web.study.cases import write_pairs
from tests.worlds import HEIGHT_PX, NAMES, PROMPT_ACTIONS, WIDTH_PX, smooth_frames

CONTEXT, FRAMES = 3, 4


@pytest.fixture
def make(command, world, tmp_path):
    def run(*flags, folder="pairs"):
        sizes = ("--frames", FRAMES, "--context-frames", CONTEXT)
        base = ("study", "--pairs", tmp_path / folder, "--model", world, *sizes)
        return command(*base, "--make", 2, *flags, "--json")

    return run


def frames_of(folder, system, number=0):
    return read_video(folder / system / f"pair_{number:03d}.mp4").frames


def test_pairs_are_dreamt_and_can_be_asked_about(make, tmp_path):
    folder = tmp_path / "my pairs"
    outcome = make("--strategy", "raster", "k=1", "k=2", folder="my pairs")
    assert outcome.code == 0, outcome.err
    assert f"ask: diagd study --pairs '{folder}'" in outcome.said
    assert outcome.document["systems"] == ["raster", "k=1", "k=2"]
    pairs = find_pairs(folder, ("k=1:raster", "k=2:raster"))
    assert list(pairs.clips) == ["pair_000", "pair_001"]
    assert "controllability" in pairs.questions
    for number, actions in enumerate(pairs.clips.values()):
        frames = frames_of(folder, "k=1", number)
        assert frames.shape == (CONTEXT + FRAMES, HEIGHT_PX, WIDTH_PX, 3)
        assert actions is not None
        assert actions[:CONTEXT] == PROMPT_ACTIONS[-CONTEXT:]
        assert set(actions[CONTEXT:]) <= set(NAMES[1:])


def test_systems_share_the_prompt_and_pairs_differ(make, tmp_path):
    make()
    raster, k1 = (frames_of(tmp_path / "pairs", name).float() for name in ("raster", "k=1"))
    other = frames_of(tmp_path / "pairs", "k=1", 1).float()
    assert (raster[0] - k1[0]).abs().mean() < 4  # levels of 256: the codec's doing
    assert (raster[CONTEXT:] - k1[CONTEXT:]).abs().mean() > 4
    assert (other[CONTEXT:] - k1[CONTEXT:]).abs().mean() > 4


def test_clips_that_are_there_are_kept_and_the_same_flags_repeat_the_rest(make, tmp_path):
    make()
    kept, lost = (tmp_path / "pairs" / "k=1" / f"pair_00{n}.mp4" for n in (0, 1))
    marked, before = kept.stat().st_mtime_ns, lost.read_bytes()
    lost.unlink()
    make()
    assert (kept.stat().st_mtime_ns, lost.read_bytes()) == (marked, before)
    make("--seed", 1).assert_refused(r"holds pairs made with other options .*made\.json")
    (tmp_path / "pairs" / "made.json").write_text('{"mod')
    make().assert_refused(r"made\.json: not valid JSON")


def test_a_backend_that_was_chosen_once_makes_all_clips(make, tmp_path, monkeypatch):
    for costs in (BFLOAT16, FLOAT32):
        monkeypatch.setattr(
            prepare, "time_candidates", lambda _, costs=costs: candidates_of(*costs)
        )
        assert make().code == 0
        made = json.loads((tmp_path / "pairs" / "made.json").read_text())
        assert made["backends"] == {"raster": "eager", "k=1": "eager"}


def test_flags_that_were_refused_do_not_bind_the_next_ones(make):
    make("--context-frames", 6).assert_refused(r"expected at least 6 frames .*, got 5")
    assert make().code == 0


def test_a_model_that_is_one_file_has_its_prompt_beside_it(make, tmp_path):
    shutil.copy(FIXTURES / "wham_tiny" / "config.json", tmp_path)
    model = shutil.copy(FIXTURES / "wham_tiny" / "model.ckpt", tmp_path)
    write_video(tmp_path / "prompt.mp4", smooth_frames(4, 60, 80), fps=10)
    write_actions(tmp_path / "prompt.jsonl", ["none"] * 4)
    outcome = make("--model", model, "--strategy", "k=1", "k=2", "--make", 1, "--frames", 2)
    assert outcome.code == 0, outcome.err
    assert len(frames_of(tmp_path / "pairs", "k=1")) == CONTEXT + 2


def test_an_invented_walk_does_something_wherever_idle_stands_among_the_actions(
    make, world, tmp_path
):
    other = shutil.copytree(world, tmp_path / "other")
    ActionVocabulary(("left", "none", "right", "forward")).save(other / "actions.json")
    make("--model", other, "--make", 1, "--frames", 40)
    actions = read_actions(tmp_path / "pairs" / "k=1" / "pair_000.jsonl", ActionVocabulary(NAMES))
    assert set(actions[CONTEXT:]) == {"left", "right", "forward"}


def test_recorded_clips_are_continued_with_their_own_actions(make, tmp_path):
    clips = tmp_path / "clips"
    clips.mkdir()
    write_video(clips / "a.mp4", smooth_frames(9, HEIGHT_PX, WIDTH_PX, seed=3), fps=8)
    taken = ["none", "left", "right", "forward", "left", "left", "right", "forward", "none"]
    write_actions(clips / "a.jsonl", taken)
    assert make("--clips", clips).code == 0
    path = tmp_path / "pairs" / "raster" / "pair_001.jsonl"
    actions = read_actions(path, ActionVocabulary(NAMES))
    length = CONTEXT + FRAMES
    starts = [n for n in range(len(taken) - length + 1) if taken[n : n + length] == actions]
    assert len(starts) == 1
    shown = frames_of(tmp_path / "pairs", "raster", 1)[0].float()
    source = read_video(clips / "a.mp4").frames[starts[0]].float()
    assert (shown - source).abs().mean() < 4


def test_a_system_may_have_a_checkpoint_of_its_own(make, world, tmp_path):
    outcome = make("--strategy", "k=1", f"k=1@{world}")
    assert outcome.document["systems"] == ["k=1", f"k=1-{world.name}"]
    both = [frames_of(tmp_path / "pairs", name) for name in outcome.document["systems"]]
    assert torch.equal(*both)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--strategy", "raster", "naive"),
            r"strategy must look like raster, k=2, .*, got 'naive'",
        ),
        (("--strategy", "k=1"), r"expected two or more different systems, got k=1"),
        (("--strategy", "raster", "k=9"), r"row_lag must be in \[1, width=5\], got 9"),
        (("--context-frames", "6"), r"prompt\.mp4: expected at least 6 frames .*, got 5"),
        (("--clips", "nowhere"), r"folder of clips not found: nowhere"),
        (("--clips", "."), r"no clips \(.*\) in \."),
        (("--model", "nowhere"), r"nowhere"),
        (("--frames", "0"), r"frames must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_dreamt_is_refused(flags, message, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(*flags).assert_refused(message)


def test_clips_too_short_to_continue_are_named(make, tmp_path):
    write_video(tmp_path / "a.mp4", smooth_frames(6, HEIGHT_PX, WIDTH_PX), fps=8)
    write_actions(tmp_path / "a.jsonl", ["none"] * 6)
    make("--clips", tmp_path).assert_refused(r"a\.mp4: expected at least 7 frames .*, got 6")


@pytest.fixture
def answered(tmp_path):
    """Ann finds k=1 better on every clip, Bob sees no difference."""
    folder = write_pairs(tmp_path / "pairs")
    store = StudyStore(folder / "study.db", find_pairs(folder, questions=("quality",)))
    for name in ("ann [b]", "bob"):
        number, _ = store.rater(store.enrol(name, 0)[0]) or (0, "")
        for trial in store.trials(number):
            better = "left" if trial.first_is_left else "right"
            store.answer(number, trial.number, "quality", better if name != "bob" else "tie")
    store.close()
    return folder


def test_results_are_a_table_and_one_json_document(command, answered):
    outcome = command("study", "--pairs", answered, "--results", "--json")
    assert outcome.code == 0, outcome.err
    (comparison,) = outcome.document["comparisons"]
    assert (comparison["first"], comparison["second"]) == ("k=1", "raster")
    cell = comparison["questions"]["quality"]
    assert [cell["overall"][name] for name in ("win", "tie", "lose", "win_rate")] == [3, 3, 0, 1]
    assert cell["overall"]["sign_test"] == 0.25
    assert cell["raters"]["bob"]["win_rate"] is None
    assert "ann [b]" in outcome.said
    assert "the sign test, exact and two-sided; ties are dropped" in outcome.said


def test_the_chart_shows_the_shares_in_the_colours_of_the_outcomes(command, answered, tmp_path):
    chart = tmp_path / "study.png"
    assert command("study", "--pairs", answered, "--results", "--chart", chart).code == 0
    pixels = read_video(chart).frames[0].flatten(0, 1)
    areas = {}
    for name, colour in (("win", "2f7d5b"), ("tie", "77736a"), ("lose", "b3512c")):
        rgb = torch.tensor(list(bytes.fromhex(colour)), dtype=torch.uint8)
        areas[name] = int((pixels == rgb).all(1).sum())
    assert areas["win"] == pytest.approx(areas["tie"], rel=0.1)
    assert areas["lose"] < areas["win"] / 20  # its key in the legend
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), r"folder of pairs not found: nowhere"),
        (("--results",), r"no answers yet: nowhere/study\.db not found"),
        (("--results", "--make", "2"), r"choose one of --make and --results"),
        (("--chart", "a.png"), r"a chart needs --results"),
        (("--results", "--chart", "a.svg"), r"chart must end in \.png, got a\.svg"),
        (("--make", "-1"), r"make must be at least 0, got -1"),
        (("--host", "0.0.0.0"), r"host 0\.0\.0\.0 lets others in: say under which --names"),
        (("--questions", "beauty"), r"beauty"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags, message, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command("study", "--pairs", "nowhere", "--port", 0, *flags).assert_refused(message)
    assert not list(tmp_path.iterdir())


def test_a_chart_that_cannot_be_written_is_refused(command, answered, tmp_path):
    flags = ("--results", "--chart", tmp_path / "nowhere" / "a.png")
    command("study", "--pairs", answered, *flags).assert_refused(r"nowhere")


def test_a_taken_port_is_refused(command, tmp_path):
    folder = write_pairs(tmp_path, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = command("study", "--pairs", folder, "--port", port)
    outcome.assert_refused(rf"cannot listen on 127\.0\.0\.1:{port}: .*in use")
    assert not (folder / "study.db").exists()  # the port is looked at first


def test_ctrl_c_is_a_clean_end_with_its_document(tmp_path, spawn):
    folder = write_pairs(tmp_path, 1)
    flags = ("study", "--pairs", folder, "--port", 0, "--json")
    process = spawn("-m", "diagd", *flags, PYTHONUNBUFFERED="1", COLUMNS="200")
    address, out, _ = interrupt_a_server(process)
    assert process.returncode == 0
    assert json.loads(out) == {"address": address, "answers": str(folder / "study.db")}
