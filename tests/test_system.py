import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diagd.system import fingerprint, only_writer, usable_cores, usable_memory
from tests.worlds import clips_of, write_shard

HOLD = (
    "import sys, pathlib\n"
    "from diagd.system import only_writer\n"
    "with only_writer(pathlib.Path(sys.argv[1])):\n"
    "    print('locked', flush=True)\n"
    "    sys.stdin.read()\n"
)


@pytest.fixture
def holder(tmp_path):
    """Start another process that is the only writer of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_a_folder_is_made_and_no_lock_is_left_in_it(tmp_path):
    folder = tmp_path / "new" / "Füße 走る"
    with only_writer(folder):
        (folder / "model").touch()
    assert [path.name for path in folder.iterdir()] == ["model"]


def test_what_was_made_for_nothing_is_removed_and_what_was_there_stays(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="bad tokens"), only_writer(tmp_path / "there/a/b"):
        raise ValueError("bad tokens")
    with only_writer(tmp_path / "there"):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_a_second_writer_is_refused_until_the_first_ends(holder, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"out is being written by another process"):
        only_writer(out).__enter__()
    holder.communicate("")
    with only_writer(out):
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="NO KILL TEST: needs SIGKILL")
def test_a_killed_writer_leaves_no_lock_that_holds(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with only_writer(tmp_path / "out"):
        (tmp_path / "out" / "model").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_what_a_killed_writer_left_half_written_is_removed_by_the_next(tmp_path):
    (tmp_path / ".model.safetensors.0a1b2c3d.partial").touch()
    (tmp_path / ".hidden").touch()
    with only_writer(tmp_path, "results.jsonl"):
        assert len(list(tmp_path.glob(".*.partial"))) == 1  # others may be writing it
    with only_writer(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [".hidden"]


def test_what_a_killed_writer_left_in_subfolders_is_removed_unless_another_writes_there(tmp_path):
    """Shards go to out/train, the files of a page to out/static and out/world."""
    for folder in ("train", "world/scenes", "busy/videos"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / ".0.safetensors.0a1b2c3d.partial").touch()
    with only_writer(tmp_path / "busy", "results.jsonl"), only_writer(tmp_path):
        pass
    (left,) = tmp_path.rglob("*.partial")
    assert left.parent == tmp_path / "busy/videos"
    with only_writer(tmp_path, "results.jsonl"), only_writer(tmp_path):
        assert left.exists()
    with only_writer(tmp_path):
        assert not left.exists()


def test_files_of_one_folder_have_writers_of_their_own(tmp_path):
    with (
        only_writer(tmp_path, "results.jsonl"),
        only_writer(tmp_path, "teacher_forced.jsonl"),
        pytest.raises(ValueError, match=r"results\.jsonl is being written"),
    ):
        only_writer(tmp_path, "results.jsonl").__enter__()
    assert not list(tmp_path.iterdir())


def test_processes_of_one_launch_are_one_writer(holder, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with only_writer(tmp_path / "out"):
        pass


def test_a_model_is_its_weights_and_configs_not_what_is_made_in_its_folder(world, tmp_path):
    folder = shutil.copytree(world, tmp_path / "training" / "world")
    before = fingerprint(folder)
    assert before == fingerprint(world)
    made = "training/run.json", "training/state.pt", "tune.json", "dreams/a.json", "dreams/a.mp4"
    for name in made:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"{}")
    (folder / "model.mp4").touch()  # a video of that name hides no weights
    assert fingerprint(folder) == before
    for name in ("actions.json", "model.safetensors", "tokenizer/config.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b" ")
        assert fingerprint(folder) != before
        (folder / name).write_bytes(content)
    assert fingerprint(folder) == before


_PEAK = """
import numpy
from diagd.system import process_peak_bytes
before = process_peak_bytes()
block = numpy.ones(before // 8 + 2**24)  # float64: 128 MiB more than ever before
print(before, process_peak_bytes() - before)
"""


def test_the_peak_of_memory_grows_with_what_is_held():
    """The true unit: neither kilobytes nor pages."""
    # a process begins with the peak of the one that starts it, which should not be the tests'
    start = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    )
    command = [sys.executable, "-c", start, _PEAK]
    done = subprocess.run(command, capture_output=True, check=True)
    before, more = map(int, done.stdout.split())
    assert 5 * 2**20 < before < 2**33
    assert more > 100 * 2**20


@pytest.mark.parametrize("name", ["train", "finetune", "tokenize", "record", "convert"])
def test_a_second_command_with_the_same_out_is_one_line(name, holder, command, world, tmp_path):
    out, shards = tmp_path / "out", write_shard(tmp_path / "shards", clips_of())
    flags: dict[str, list[str | Path]] = {
        "train": ["--tokens", shards, "--out", out],
        "finetune": ["--tokens", shards, "--init", world, "--out", out],
        "tokenize": ["--clips", world, "--tokenizer", world / "tokenizer", "--out", out],
        "record": ["--out", out],
        "convert": [world, out],
    }
    command(name, *flags[name]).assert_refused(f"{out} is being written by another process.*")
    assert [path.name for path in out.iterdir()] == [".diagd.lock"]


_FAULTS = """
import os, resource
import torch
from diagd.system import keep_freed_memory
if os.fork():
    os.wait()
else:
    keep_freed_memory()
def faults():
    for _ in range(5):
        torch.ones(16_000_000)  # 64 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
faults()
print(-faults() + faults(), flush=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_memory_that_is_kept_is_not_mapped_anew():
    """The child keeps it, and prints first."""
    done = subprocess.run([sys.executable, "-c", _FAULTS], check=True, capture_output=True)
    kept, usual = map(int, done.stdout.split())
    assert kept * 10 < usual


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),  # as a container sees itself
        (
            "3:cpu,cpuacct:/a\n0::/x\n",
            {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        (
            "3:cpu,cpuacct:/gone\n",
            {"cpu/cpu.cfs_quota_us": "60000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            1,
        ),
    ],
)
def test_no_more_threads_than_a_container_may_use(tmp_path, groups, files, cores):
    free = usable_cores(tmp_path)
    write_groups(tmp_path, groups, files)
    assert usable_cores(tmp_path) == (cores or free)


@pytest.mark.parametrize(
    ("groups", "files", "memory"),
    [
        ("0::/a\n", {"a/memory.max": "max\n"}, None),
        ("0::/a\n", {"a/memory.max": "max\n", "memory.max": "268435456\n"}, 2**28),
        ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "268435456\n"}, 2**28),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_no_more_memory_than_a_container_may_use(tmp_path, groups, files, memory):
    whole = usable_memory(tmp_path)
    write_groups(tmp_path, groups, files)
    assert usable_memory(tmp_path) == (memory or whole) <= whole


def write_groups(root, groups, files):
    """Write the control groups of a process and their limits, as a system shows them."""
    told = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {"proc/self/cgroup": groups, **told}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
