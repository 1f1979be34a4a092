import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import diagd.cli
from diagd.cli import COMMANDS
from diagd.decoding.generate_tokens import DecodingEngine
from diagd.extras import EXTRAS
from diagd.pipeline import plan

COSMOS = "3x40x64"


def lanes_by_counting(num_frames, height, width, row_lag, frame_lag):
    steps = [
        t * frame_lag + i * row_lag + j
        for t in range(num_frames)
        for i in range(height)
        for j in range(width)
    ]
    return max(map(steps.count, set(steps)))


def test_a_device_out_of_memory_says_in_a_line_what_takes_less(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def planted(*_, **__):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 "
            "GiB of which 5.00 GiB is free. Including non-PyTorch memory, this process has ..."
        )

    monkeypatch.setattr(DecodingEngine, "__init__", planted)
    outcome = command("generate", "--frames", 1)
    assert (outcome.code, outcome.out, list(tmp_path.iterdir())) == (2, "", [])
    assert outcome.err.splitlines()[-1] == (
        "error: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of "
        "79.10 GiB of which 5.00 GiB is free: use fewer frames, a smaller batch, or --dtype "
        "bfloat16 or int8 if available"
    )


def test_a_lost_context_of_a_gpu_is_one_line(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def planted(*_, **__):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\nCUDA kernel ...")

    monkeypatch.setattr(DecodingEngine, "prefill", planted)
    outcome = command("generate", "--frames", 1)
    assert (outcome.code, outcome.out, list(tmp_path.iterdir())) == (2, "", [])
    assert outcome.err.splitlines()[-1].startswith(
        "error: CUDA error: unspecified launch failure: the GPU's context is lost"
    )


def test_so_does_a_processor_out_of_memory(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(DecodingEngine, "__init__", lambda *_, **__: torch.empty(2**60))
    outcome = command("generate", "--frames", 1)
    assert (outcome.code, outcome.out, list(tmp_path.iterdir())) == (2, "", [])
    assert outcome.err.splitlines()[-1].startswith("error: DefaultCPUAllocator: can't allocate me")
    assert "use fewer frames, a smaller batch, or --dtype" in outcome.err


def test_plan_prints_one_json_document_and_its_table_elsewhere(command):
    outcome = command("plan", "--grid", COSMOS, "-k", 1, "-d", 40, "--json")
    assert outcome.code == 0
    assert outcome.document == {
        "grid": COSMOS,
        "row_lag": 1,
        "frame_lag": 40,
        "num_tokens": 7680,
        "num_steps": 183,
        "max_lanes": lanes_by_counting(3, 40, 64, 1, 40),
        "speedup": round(7680 / 183, 3),
    }
    assert "num_steps   183" in outcome.err  # the table for people


def test_frames_do_not_overlap_unless_asked_to(command):
    assert command("plan", "--grid", COSMOS, "-k", 2, "--json").document["frame_lag"] == 142
    for spelled in (("-k", 2, "-d", 80), ("--strategy", "k=2,d=80")):
        document = command("plan", "--grid", COSMOS, *spelled, "--json").document
        assert (document["frame_lag"], document["num_steps"]) == (80, 302)
    raster = command("plan", "--grid", COSMOS, "--strategy", "raster", "--json").document
    assert (raster["num_steps"], raster["max_lanes"], raster["speedup"]) == (7680, 1, 1)


def test_plan_draws_a_small_frame_with_rows_below_each_other(command):
    outcome = command("plan", "--grid", "2x3x5", "-k", 2)
    drawn = [line.split() for line in outcome.out.splitlines()[-3:]]
    assert drawn == [[str(2 * i + j) for j in range(5)] for i in range(3)]


def test_flags_may_be_written_with_an_equals_sign(command):
    outcome = command("plan", f"--grid={COSMOS}", "--row-lag=1", "--json", "--frame-lag=40")
    assert outcome.document["num_steps"] == 183


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_each_of_its_flags(name, command):
    outcome = command(name, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert f"usage: diagd {name}" in outcome.out
    assert f"Examples:\n   diagd {name} " in outcome.out
    assert max(map(len, outcome.out.split("\n")[1:])) <= 80
    assert "--json" in outcome.out
    assert "--threads" in outcome.out
    assert "None" not in outcome.out  # how the parser says that a flag may be left out
    box = re.sub("[│╭╮╰╯─]", " ", outcome.out[outcome.out.index("╭") :])
    for entry in re.split(r"\n  ?(?=[-A-Z])", box)[1:]:
        spelled, _, text = re.sub(r"\s{3,}|\s*\n\s*", "  ", entry.strip()).partition("  ")
        text = re.sub(r"\((default: .*|required)\)", "", text)
        assert text.strip(), f"{spelled} has no help"


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_command(flag, command):
    outcome = command(flag)
    assert (outcome.code, outcome.err) == (0, "")
    for name, (summary, *_) in COMMANDS.items():
        assert any(
            line.split()[:1] == [name] and summary in line for line in outcome.out.split("\n")
        )


def test_no_command_shows_a_short_tour_of_commands_that_exist(command):
    outcome = command()
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert (len(lines) in range(5, 11), max(map(len, lines)) <= 80) == (True, True)
    named = re.findall(r"^  diagd (\S+)", outcome.out, re.MULTILINE)
    assert len(named) == 3
    assert {*named, *re.findall(r"`(\w+)`", outcome.out)} <= set(COMMANDS)


def complete(script, *words):
    """Ask bash what it would complete the last word to."""
    line, quoted = " ".join(words), " ".join(map(repr, words))
    ask = f"""
source {script}
COMP_WORDS=({quoted}) COMP_CWORD={len(words) - 1} COMP_LINE='{line}' COMP_POINT={len(line)}
$(complete -p diagd | sed 's/.*-F //; s/ .*//')
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_flags_and_choices(command, tmp_path):
    script = tmp_path / "diagd.bash"
    script.write_text(command("--completion", "bash").out)
    assert set(complete(script, "diagd", "")) >= set(COMMANDS)
    assert complete(script, "diagd", "ge") == ["generate"]
    assert complete(script, "diagd", "tune", "--tol") == ["--tolerance"]
    assert complete(script, "diagd", "bench", "--dtype", "b") == ["bfloat16"]


def test_zsh_has_a_script_and_other_shells_are_refused(command):
    assert command("--completion", "zsh").out.startswith("#compdef diagd\n")
    message = "--completion must be one of bash, zsh, got '{}'"
    command("--completion", "fish").assert_refused(message.format("fish"))
    command("--completion").assert_refused(message.format(""))


@pytest.mark.parametrize(
    "flags",
    [
        ("plan", "--grid", "3x" * 30_000),
        ("plan", "--grid", "3x4x5", "--strategy", "x" * 60_000),
        ("plan", "--" + "grid" * 20_000),
        ("generate", "--dtype", "float" * 20_000),
        ("evaluate", "--clips", "x", "--out", "x", "--strategy", "k=1," * 20_000),
        ("x" * 60_000,),
    ],
    ids=lambda flags: " ".join(flags)[:12],
)
def test_an_error_does_not_repeat_all_of_a_huge_value(flags, command):
    outcome = command(*flags)
    outcome.assert_refused(r"\.\.\. \[\d+ characters\] \.\.\. ")
    assert len(outcome.err) < 700


def test_a_huge_value_in_a_file_is_not_repeated_either(command, world, tmp_path):
    broken = shutil.copytree(world, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    huge = "left" * 500_000
    for name, document in (
        ("walk.jsonl", {"action": huge}),
        ("config.json", {**config, "vocab_size": huge}),
        ("config.json", {**config, huge: 1}),
    ):
        whole = (broken / name).read_text()
        (broken / name).write_text(json.dumps(document) + "\n")
        outcome = command("generate", "--model", broken, "--output", tmp_path / "dream.mp4")
        outcome.assert_refused("leftleft")
        assert len(outcome.err) < 700
        (broken / name).write_text(whole)


def test_letters_that_the_output_has_not_are_escaped(command, world, tmp_path):
    stdout: Any = sys.stdout
    stdout.reconfigure(encoding="cp1252", errors="strict")
    picture = tmp_path / "кот.png"
    outcome = command("generate", "--model", world, "--frames", 1, "--output", picture)
    assert (outcome.code, picture.is_file()) == (0, True)
    assert r"\u043a\u043e\u0442.png" in outcome.out


@pytest.mark.parametrize("name", ["train", "finetune", "evaluate", "bench", "tune", "generate"])
def test_strategies_are_given_by_one_flag_in_all_commands(name, command):
    assert "--strategy " in command(name, "--help").out
    command(name, "--strategies", "k=1").assert_refused("--strategies: did you mean --strategy")


@pytest.mark.parametrize("name", ["dream", "--grid", ""])
def test_an_unknown_command_lists_the_known_ones(name, command):
    command(name).assert_refused(rf"unknown command '{name}', expected one of: generate, plan, .*")


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_flag_is_named(name, command):
    places = {"convert": ("a", "b"), "check": ("a",)}.get(name, ())
    command(name, *places, "--grit", "3").assert_refused("unknown flag --grit: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), r"--grid"),
        (("--grid",), r"--grid"),
        (("--grid", "3x40"), r"grid must look like TxHxW \(for example 3x40x64\), got '3x40'"),
        (("--grid", "3x40x64x2"), r"grid must look like TxHxW .*, got '3x40x64x2'"),
        (("--grid", "3*40*64"), r"grid must look like TxHxW"),
        (("--grid", "-3x40x64"), r"grid must look like TxHxW"),
        (("--grid", "3x0x64"), r"height must be at least 1, got 0"),
        (
            ("--grid", "1x1x9" + "0" * 20),
            r"the schedule of 1x1x90+ tokens would need .* GB, this machine",
        ),
        (
            ("--grid", "9000x9000x9000"),
            r"the schedule of .* would need 102,060\.0 GB, this machine",
        ),
        (("--grid", "3x40x64", "-k", "0"), r"row_lag must be in \[1, width=64\], got 0"),
        (("--grid", "3x40x64", "-k", "65"), r"row_lag must be in \[1, width=64\], got 65"),
        (
            ("--grid", "3x40x64", "-d", "0"),
            r"frame_lag must be in \[1, \(height - 1\) \* row_lag \+ width=103\], got 0",
        ),
        (("--grid", "3x40x64", "-d", "104"), r"frame_lag must be in \[1, .*=103\], got 104"),
        (("--grid", "3x40x64", "-k", "2", "-d", "143"), r"frame_lag .*=142\], got 143"),
        (("--grid", "3x40x64", "-k", "x"), r"-k/--row-lag: expected a whole number, got 'x'"),
        (("--grid", "3x40x64", "-k", "1.5"), r"--row-lag: expected a whole number, got '1\.5'"),
        (("--grid", "3x40x64", "-k"), r"--row-lag"),
        (("--grid", "3x40x64", "-k", "9" * 6000), r"--row-lag: expected .* at most 4300 digits"),
        (("--grid", "3x40x64", "--no-json"), r"unknown flag --no-json: did you mean --json\?"),
        (("--grid", "3x40x64", "--row-lagg=2"), r"--row-lagg: did you mean --row-lag\?"),
        (("--grid", "3x40x64", "stray"), r"stray"),
        (("--grid", "3x40x64", "--threads", "0"), r"threads must be at least 1, got 0"),
        (("--grid", "3x40x64", "--threads", "x"), r"--threads: .*'x'"),
        (("--grid", "3x40x64", "--threads"), r"Missing value for argument '--threads'"),
    ],
)
def test_a_bad_plan_is_refused_in_one_line(flags, message, command):
    outcome = command("plan", *flags, "--json")
    outcome.assert_refused(message)
    assert outcome.document == {"error": outcome.err.removeprefix("error: ").rstrip("\n")}


@pytest.mark.parametrize("name", ["generate", "bench"])
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:7", r"device 'cuda:7' is not available, got \d CUDA devices"),
        ("gpu", r"device must look like cpu, cuda or cuda:0, got 'gpu'"),
        ("meta", r"device must look like cpu, cuda or cuda:0, got 'meta'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(name, device, message, command, world, tmp_path):
    output = ("--output", tmp_path / "dream.mp4") if name == "generate" else ()
    command(name, "--model", world, "--device", device, *output).assert_refused(message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "module", "extra", "flags"),
    [
        ("train", "accelerate", "train", ("--tokens", "tokens")),
        ("record", "vizdoom", "doom", ("--clips", "1")),
    ],
)
def test_a_missing_extra_is_named(name, module, extra, flags, command, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    outcome = command(name, "--out", tmp_path / "out", *flags)
    outcome.assert_refused(rf"needs {module}: pip install -e '\.\[{extra}\]' in a clone of diagd")
    assert not list(tmp_path.iterdir())


def test_a_module_of_no_extra_that_is_missing_is_our_bug(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    for name in ("console", "pipeline.plan"):
        monkeypatch.delitem(sys.modules, f"diagd.{name}")
    with pytest.raises(ModuleNotFoundError, match=r"rich\.console"):
        command("plan", "--grid", COSMOS)


@dataclass(frozen=True)
class NoOptions:
    """Nothing to choose but where to write."""

    out: Path = Path("out")  # folder


@pytest.mark.parametrize("name", COMMANDS)
def test_with_json_whatever_a_command_prints_goes_to_stderr(name, command, monkeypatch, tmp_path):
    """The commands' own tests read their documents with the same strictness (`Outcome`)."""

    def noisy(options: NoOptions):
        print("a table")
        os.write(1, b"a library in C\n")
        subprocess.run([sys.executable, "-S", "-c", "print('another program')"], check=True)
        return {"name": name, "loss": float("nan")}

    monkeypatch.setattr(diagd.cli, "function_of", lambda name: noisy)
    monkeypatch.setattr(diagd.cli, "options_of", lambda name: NoOptions)
    monkeypatch.chdir(tmp_path)
    for flags in (("--json",), ()):
        outcome = command(name, *flags)
        said, other = (outcome.err, outcome.out) if flags else (outcome.out, outcome.err)
        assert outcome.code == 0
        assert sorted(said.splitlines()) == ["a library in C", "a table", "another program"]
        document = json.dumps({"name": name, "loss": None}) + "\n"
        assert other == (document if flags else "")


def test_with_json_a_defect_is_a_document_beside_its_traceback():
    script = """
import sys
from diagd import cli
from diagd.pipeline import plan

def broken(options):
    print("a table")
    return {}["absent"]

plan.main, sys.argv = broken, ["diagd", "plan", "--grid", "3x14x24", *sys.argv[1:]]
cli.main()
"""
    for flags, printed in ((["--json"], '{"error": "KeyError: \'absent\'"}\n'), ([], "a table\n")):
        run = [sys.executable, "-c", script, *flags]
        done = subprocess.run(run, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, printed)
        assert done.stderr.endswith("KeyError: 'absent'\n")
        assert "Traceback" in done.stderr


def test_with_json_help_goes_to_stderr(command):
    outcome = command("plan", "--json", "--help")
    assert (outcome.code, outcome.out) == (0, "")
    assert "usage: diagd plan" in outcome.err


def test_of_the_processes_of_one_launch_one_prints_the_document(command, monkeypatch):
    flags = ("plan", "--grid", COSMOS, "-k", 1, "--json")
    for rank, printed in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        assert bool(command(*flags).out) == printed


def test_threads_bound_what_computes(command, monkeypatch):
    names = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"
    for name in names:
        monkeypatch.setenv(name, "1")
    seen = []

    def look(options: NoOptions):
        seen.append([torch.get_num_threads(), *(os.environ[name] for name in names)])
        return {}

    monkeypatch.setattr(plan, "main", look)
    monkeypatch.setattr(diagd.cli, "options_of", lambda name: NoOptions)
    before = torch.get_num_threads()
    try:
        assert command("plan", "--threads", 3).code == 0
        assert command("plan", "--threads=2").code == 0
    finally:
        torch.set_num_threads(before)
    assert seen == [[3, "3", "3", "3"], [2, "2", "2", "2"]]


def test_the_version_is_that_of_the_package(command):
    outcome = command("--version")
    assert (outcome.code, outcome.out) == (0, f"diagd {diagd.__version__}\n")


@pytest.mark.parametrize(
    ("typed", "meant"), [("pln", "plan"), ("Plan", "plan"), ("trian", "train")]
)
def test_a_mistyped_command_is_guessed(typed, meant, command):
    command(typed).assert_refused(rf"unknown command '{typed}', did you mean {meant}\?")


def test_a_missing_extra_is_told_before_anything_slow_is_imported():
    names = ["play", "study", "train", "finetune", "report", "record"]
    modules = [module for modules in EXTRAS.values() for module in modules]
    script = f"""
import sys
sys.modules.update(dict.fromkeys({modules}))
from diagd.cli import main
for name in {names}:
    sys.argv = ["diagd", name]
    try:
        main()
    except SystemExit as stop:
        print(name, stop.code, {{"torch", "transformers"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"{name} 2 set()" for name in names]
    for name, line in zip(names, done.stderr.splitlines(), strict=True):
        assert line.startswith(f"error: diagd {name} needs ")


def test_an_interrupted_command_ends_quietly(command, monkeypatch):
    def interrupt(options: plan.PlanOptions):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "main", interrupt)
    outcome = command("plan", "--grid", COSMOS)
    assert (outcome.code, outcome.err) == (130, "")


@pytest.mark.parametrize("flags", ["--help", "plan --grid 3x14x24 --json"])
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(flags):
    script = f"{sys.executable} -m diagd {flags} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert "rror" not in done.stderr


def test_the_package_runs_as_a_module(tmp_path):
    def run(*flags):
        arguments = [sys.executable, "-m", "diagd", "plan", "--grid", COSMOS, *flags]
        return subprocess.run(arguments, capture_output=True, text=True)

    good, bad = run("-k", "1", "-d", "40", "--json"), run("-k", "0")
    assert good.returncode == 0
    assert json.loads(good.stdout)["num_steps"] == 183
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "error: row_lag must be in [1, width=64], got 0\n"


SLOW = [
    *("torch", "transformers", "diffusers", "torchmetrics"),
    *("matplotlib", "accelerate", "ray", "av"),
]
MISTAKES = {
    "dream": "unknown command 'dream'",
    "train --nonsense": "unknown flag --nonsense",
    "check": "Missing.*: PATH",
    "generate --frames x": "--frames: expected a whole number",
    "generate -k 0": "row_lag must be at least 1, got 0",
    "generate --strategy nope": "strategy must look like",
    "generate --strategy exact -k 2 -d 3": "strategy and row_lag exclude each other",
    "generate --compare --strategy raster": "compare needs a strategy other than raster",
    "generate --top-p 2": r"top_p must be in \(0, 1\]",
    "generate --output dream.doc": "output must end in .mp4",
    "plan --grid 3x40": "grid must look like TxHxW",
    "bench --grid 3x40": "grid must look like TxHxW",
    "bench -k 0": "row_lag must be at least 1, got 0",
    "bench --grid 2x3x5 -k 9": r"row_lag must be in \[1, width=5\], got 9",
    "bench --strategy zipar=0": "window must be at least 1, got 0",
    "bench --dtype float8": "float32",
    "bench --device gpu": "device must look like cpu",
    "play --strategy nope": "strategy must look like",
    "study --pairs x --make 2 --strategy k=1 k=1": "expected two or more different systems",
    "evaluate --clips x --out x --strategy sjd": "strategy sjd was removed",
    "finetune --init doom --tokens x --out x --strategy k=0": "row_lag must be at least 1",
    "tune --tokens x -k 0": "row_lag must be at least 1, got 0",
    "train --tokens x --out x --model nope": "model must be one of mc-ar-doom",
    "tokenize --clips x --out y --size 3": "size must be height x width",
    "record --out x --size 3": "size must be height x width",
    "attention --frame 0": "frame must be at least 1, got 0",
    "doctor --seconds -1": "seconds must be 0 or more",
}


ANSWER = f"""
import contextlib, io, json, sys, time
import diagd
answers = []
for call in sys.argv[1:]:
    from diagd.cli import main
    sys.argv = ["diagd", *call.split()]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main()
    except SystemExit as stop:
        slow = sorted(set({SLOW}) & set(sys.modules))
        answers.append((call, stop.code, said.getvalue(), slow))
print(json.dumps((answers, time.process_time())))
"""


def answer(*calls):
    """Call the command line in a fresh process; return what it says and the processor's seconds."""
    command = [sys.executable, "-c", ANSWER, *calls]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_help_and_mistakes_are_answered_without_importing_what_computes():
    helps = [f"{name} --help" for name in COMMANDS]
    answers, _ = answer(*helps, *MISTAKES)
    assert [call for call, *_ in answers] == [*helps, *MISTAKES]
    for call, code, said, slow in answers:
        assert (code, slow) == (0 if call in helps else 2, []), (call, said)
        assert re.search(MISTAKES.get(call, "usage: diagd"), said), call


@pytest.mark.parametrize("call", ["generate --help", "bench -k 0", "train --nonsense"])
def test_help_and_mistakes_take_less_than_a_second_of_the_processor(call):
    (((_, _, _, slow),), seconds) = answer(call)
    assert (slow, seconds < 1) == ([], True), seconds
