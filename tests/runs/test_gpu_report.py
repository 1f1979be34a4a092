"""runs/gpu_report.py rehearsed on the CPU with a tiny world: killed, gone on, and a piece fails."""

import json
import runpy
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from diagd.families.presets import PRESETS
from diagd.files import read_json_lines
from runs import gpu_report
from runs.gpu_report import Options, measured_before, reason_of, run_python, why_too_large
from tests.processes import kill

SCRIPT = Path(gpu_report.__file__)
TESTS = """
import pytest
pytestmark = pytest.mark.gpu
def test_good(): pass
def test_bad(): assert False
@pytest.mark.skip
def test_not_here(): pass
"""
FACTS = {
    "machine": {"processor": "a CPU", "torch": "2.13", "memory_available_bytes": 2**40},
    "gpu": {"name": "a GPU", "memory_free_bytes": 24 * 2**30},
    "choices": {"dtype": {"name": "bfloat16"}},
    "commit": "1a2b3c",
}


@pytest.fixture(scope="module")
def rehearsal(world, tmp_path_factory):
    """Kill a run after its first piece, and run again.

    Returns the folder, the lines after both, what the second said, and whether all went well.
    """
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "test_some.py").write_text(TESTS)
    tests, out = folder / "test_some.py", folder / "out"
    options = Options(out, "cpu", (str(world),), ("triton", "exact"), (), str(tests))
    flags = ["--device", "cpu", "--models", world, "--rows", "triton", "exact", "--shared"]
    flags += ["--tests", tests, "--out", out]
    process = subprocess.Popen([sys.executable, *map(str, (SCRIPT, *flags))], text=True)
    lines = []
    while len(lines) < 2 and process.poll() is None:
        time.sleep(0.05)
        lines = read_json_lines(out / "pieces.jsonl") if (out / "pieces.jsonl").exists() else []
    kill(process)
    assert "## Benchmark" not in (out / "REPORT.md").read_text()
    with redirect_stdout(StringIO()) as said:
        went_well = gpu_report.main(options)
    return out, lines, read_json_lines(out / "pieces.jsonl"), said.getvalue(), went_well


def test_a_killed_run_goes_on_behind_what_is_done(rehearsal):
    out, before, after, said, _ = rehearsal
    assert [line["piece"] for line in before] == ["machine", "tests"]
    assert after[1] == before[1]  # with its seconds: it did not run again
    assert "2 of 3:" in said
    assert "1 of 3:" not in said
    assert {path.name for path in out.iterdir()} == {"REPORT.md", "pieces.jsonl"}


def test_a_piece_that_fails_stops_no_other_and_is_told_in_a_line(rehearsal, world):
    out, _, lines, _, went_well = rehearsal
    pieces = {line["piece"].removeprefix(f"{world}, "): line for line in lines}
    assert list(pieces) == ["machine", "tests", "triton", "exact"]
    reason = "backend triton: device must be cuda, got cpu"
    assert pieces["triton"]["failed"] == reason
    rows = pieces["exact"]["document"]["rows"]
    assert {row["strategy"] for row in rows} == {"raster", "k=1", "exact"}
    assert f"- {world}, triton: failed: {reason}" in (out / "REPORT.md").read_text().splitlines()
    assert not went_well


def test_the_report_names_the_machine_counts_tests_and_fits_a_terminal(rehearsal):
    out, _, lines, *_ = rehearsal
    text = (out / "REPORT.md").read_text()
    facts, found = lines[0]["document"], lines[1]["document"]
    assert text.startswith(f"# diagd on {facts['machine']['processor']}\n")
    assert f"torch {facts['machine']['torch']}" in text
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert "\n| passed | failed | skipped | seconds |\n| - | - | - | - |\n| 1 | 1 | 1 | " in text
    assert "\n- test_bad\n" in text
    assert "test_good" not in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert max(map(len, tables)) <= 80
    row = next(row for row in lines[-1]["document"]["rows"] if row["strategy"] == "k=1")
    assert f" | {row['steps']} | {row['ms_per_step']:.2f} | {row['frames_per_second']:.2f}" in text
    assert "Attention by " in " ".join(text.split())
    end = " ".join(text.split("## How to send it to us")[1].split())
    assert "Open an issue" in end
    assert "attach this file" in end


def test_what_many_share_is_a_table(tmp_path, monkeypatch):
    flags = "--model iris --sequences 1 3 --strategies raster k=1 --repeats 1 --dtype float32"
    monkeypatch.setitem(gpu_report.SHARED, "players of iris", flags)
    options = Options(tmp_path, "cpu", (), (), ("players of iris",), "")
    with redirect_stdout(StringIO()):
        assert gpu_report.main(options)
    text = (tmp_path / "REPORT.md").read_text()
    assert "### players of iris\n\nfloat32, backend " in text
    rows = read_json_lines(tmp_path / "pieces.jsonl")[-1]["document"]["rows"]
    assert [(row["sequences"], row["strategy"], row["steps"]) for row in rows] == [
        *((1, "raster", 32), (1, "k=1", 14)),
        *((3, "raster", 32), (3, "k=1", 14)),
    ]
    for row in rows:
        assert row["frames_per_second"] == pytest.approx(
            row["sequences"] * row["frames_per_second_each"]
        )
        assert f"| {row['sequences']} | {row['strategy']} | {row['steps']} | " in text


def test_a_script_that_writes_a_file_is_a_table(tmp_path, monkeypatch):
    flags = "runs.serve_load --parts closed --shape tiny --grid 3x5 --clients 1 2 --out {folder}"
    monkeypatch.setitem(gpu_report.WRITTEN, "clients", f"{flags} --strategies k=1")
    with redirect_stdout(StringIO()):
        assert gpu_report.main(Options(tmp_path, "cpu", (), (), ("clients",), ""))
    text = (tmp_path / "REPORT.md").read_text()
    assert "### clients\n\n| strategy | batch | clients | images_per_minute |" in text
    assert "| k=1 | on | 2 | " in text


def test_when_time_is_over_no_piece_is_begun_and_the_next_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "document_of", lambda *_: pytest.fail("a piece was begun"))
    options = Options(tmp_path, "cpu", (), (), ("players of doom",), "", total_minutes=-1)
    with redirect_stdout(StringIO()):
        assert gpu_report.main(options)
    text = (tmp_path / "REPORT.md").read_text()
    assert "- players of doom: skipped: time was over" in text


def test_what_tells_most_comes_first():
    asked = list(gpu_report.pieces(Options(device="cpu"), FACTS))
    assert asked[:5] == ["tests", *(f"{name}, triton" for name in Options.models)]
    assert asked.index("doom, int8") < asked.index("players of doom") < asked.index("doom, hf")


def test_the_widest_row_of_a_gpu_fits_a_terminal():
    row = {
        **{"backend": "cuda-graph", "strategy": "k=1,d=40", "context_frames": 2, "disturbed": True},
        **{"dtype": "bfloat16", "steps": 7680, "ms_per_step": 123.456, "speedup": 123.4},
        **{"frames_per_second": 123.456, "efficiency": 0.5, "bandwidth_share": 0.5},
        **{"capture_seconds": 123.4, "attention": "efficient_attention"},
    }
    document = {
        "options": {"model": "cosmos-4b", "repeats": 1},
        **{"rows": [row], "parameters": 4e9, "grid": [3, 40, 64], "peak_memory_bytes": 2**34},
        "ceilings": {"bfloat16": {"bytes_per_second": 3e12}},
    }
    lines = gpu_report.describe_model([document])
    assert max(map(len, lines)) <= 80
    assert "efficient_attention (cuda-graph)" in " ".join(lines)
    assert any(line.startswith("| cuda-graph k=1,d=40 ! | 7680 | 123.46 |") for line in lines)


def test_without_a_gpu_it_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--device", "cuda:99", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith("error: device 'cuda:99' is not available, got ")
    assert not out.exists()


def test_an_unknown_model_is_refused_before_any_work(tmp_path):
    with pytest.raises(OSError, match="no model at 'nowhere'"):
        gpu_report.main(Options(tmp_path / "out", "cpu", ("nowhere",)))
    assert not (tmp_path / "out").exists()


def test_pieces_of_another_machine_or_commit_are_refused(tmp_path):
    path = tmp_path / "pieces.jsonl"
    path.write_text(json.dumps({"piece": "machine", "document": FACTS}) + "\n")
    assert list(measured_before(path, FACTS)) == ["machine"]
    for change, words in (
        ({"gpu": {"name": "another"}}, "device a GPU, here it is another"),
        ({"commit": "4d5e6f"}, "commit 1a2b3c, here it is 4d5e6f"),
    ):
        with pytest.raises(ValueError, match=f"{words}: remove it, or choose another --out"):
            measured_before(path, FACTS | change)


def test_what_cannot_fit_is_skipped_with_the_reason():
    assert why_too_large(PRESETS["cosmos-4b"], FACTS) is None
    reason = why_too_large(PRESETS["cosmos-12b"], FACTS)
    assert reason == "it needs 24.5 GiB, 24.0 GiB are free"
    never = gpu_report.Piece(lambda: pytest.fail("it was tried"), reason)
    assert never.outcome() == {"skipped": reason}


def test_a_process_that_ends_badly_has_a_reason():
    options = Options(minutes=0.5)
    for program, reason in (
        ("raise RuntimeError('CUDA out of memory')", "RuntimeError: CUDA out of memory"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL"),
        ("exit(3)", "exit code 3"),
    ):
        assert reason_of(run_python(options, ["-c", program])) == reason
    with pytest.raises(OSError, match=r"took more than 0\.005 minutes"):
        run_python(Options(minutes=0.005), ["-c", "import time; time.sleep(60)"])
