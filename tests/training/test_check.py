import pytest

from diagd.data.recorders.recording import RecordOptions, clip_paths, record

GAME = "tests.data.recorders.scroller:Scroller-v0"


@pytest.fixture
def clips(tmp_path):
    """Record a little of a game."""
    record(RecordOptions(tmp_path / "clips", GAME, clips=10, frames=40, repeat=1, size="32x64"))
    return tmp_path / "clips"


def test_the_command_says_what_is_there_and_which_row_led_to_which_frame(command, clips):
    outcome = command("check", clips, "--json")
    assert outcome.code == 0, outcome
    document = outcome.document
    assert (document["clips"], document["frames"]) == (10, 400)
    assert (document["size_px"], document["fps"]) == ([32, 64], 30)
    assert document["timing"]["found"] == 0
    assert set(document["actions"]) == {"none", "left", "right", "look_up"}
    assert sum(use["share"] for use in document["actions"].values()) == pytest.approx(1)
    told = command("check", clips).out
    assert "10 clips, 400 frames of 32x64 px, 30 frames/s: 0:13 minutes" in told
    assert "Row t led to frame t, as expected." in told


def test_the_frames_shown_are_about_a_change_of_action(command, clips):
    rows = clip_paths(clips, 0)[1].read_text().splitlines()
    change = next(t for t in range(2, len(rows)) if rows[t] != rows[t - 1])
    shown = [line for line in command("check", clips).out.splitlines() if line[:6] == "  row "]
    assert len(shown) == 6
    assert any(line.startswith(f"  row {change}: frame {change - 1} -> ") for line in shown)


def test_problems_end_in_one_line_and_exit_code_2(command, clips):
    for path in clips.glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[1:] + lines[-1:]))
    command("check", clips).assert_refused("row t - 1 led to frame t, so row t is the action taken")
    clip_paths(clips, 3)[1].write_text("")
    outcome = command("check", clips)
    outcome.assert_refused(r"expected 40 actions, got 0 \(and 1 more, see above\)")
    assert "problem: row t - 1 led to frame t" in outcome.out


def test_the_command_reports_mistakes_in_one_line(command, tmp_path):
    command("check", tmp_path).assert_refused(r"no clips .* in")
    command("check", tmp_path / "nowhere").assert_refused("folder of clips not found")
