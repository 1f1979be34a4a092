"""What is in the cache of kernels is whole and tested, or it is built again, or it is one line."""

import ctypes
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch._inductor.config  # it reads CXX when it is imported, once

from diagd.backends import prepare as backends
from diagd.backends.devices import cpu_features
from diagd.backends.native import compiler, library
from diagd.backends.step_times import StepTimes
from tests.models.tiny import tiny_model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the folder of an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "zig", lambda: None)  # takes a minute, and has a test of its own
    library._library.cache_clear()
    yield library.cache_folder()
    library._library.cache_clear()


@pytest.fixture(scope="module")
def whole_build():
    """Return the path and the content of a build that is right."""
    path = library.find_or_make()
    return path, path.read_bytes()


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch, folder):
    """Return a function that makes a shell script the compiler; "$out" is what it has to write."""

    def fake(script):
        path = tmp_path / "my-c++"
        path.write_text(f"#!/bin/sh\nfor out; do :; done\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return fake


def test_other_sources_or_flags_are_another_build(tmp_path, monkeypatch):
    first = library._choice()
    monkeypatch.setenv("DIAGD_CXXFLAGS", "-g")
    assert library._choice() != first
    monkeypatch.delenv("DIAGD_CXXFLAGS")
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    assert library._choice() != first


def test_the_compiler_of_the_environment_comes_first(monkeypatch, tmp_path):
    own = tmp_path / "my-c++"
    own.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(own))
    assert compiler.find_compiler() == str(own)


@pytest.fixture
def kept_build(folder, whole_build, fake_compiler):
    """Put the right build into the cache, where the compiler copies it, for speed."""
    path, content = whole_build
    fake_compiler(f'sleep 0.$$; cp "{path}" "$out"')
    folder.mkdir(parents=True)
    kept = folder / f"kernels-{library._choice()}-built-{library._digest(content)}.so"
    kept.write_bytes(content)
    return kept


def test_a_damaged_build_is_not_loaded(kept_build, whole_build, caplog):
    assert library.find_or_make() == kept_build
    content = whole_build[1]
    middle = len(content) // 2
    flipped = bytes([content[middle] ^ 1])
    for damaged in (b"", content[:middle], content[:middle] + flipped + content[middle + 1 :]):
        kept_build.write_bytes(damaged)
        caplog.clear()
        assert library.find_kept() is None
        assert f"{kept_build}: damaged, rebuilding the kernels" in caplog.text
    kept_build.rename(kept_build.with_name(kept_build.name.replace("-built-", "-zig-")))
    assert library.find_or_make() == kept_build  # made again under another name, and it is alone
    assert [path.suffix for path in kept_build.parent.glob("kernels-*.so")] == [".so"]


def test_builders_at_the_same_time_leave_one_build_for_a_damaged_one_and_it_is_kept(
    folder, kept_build, whole_build, monkeypatch
):
    kept_build.write_bytes(b"")
    built, build = [], library.build
    monkeypatch.setattr(library, "build", lambda *given: built.append(given) or build(*given))
    found = []
    builders = [
        threading.Thread(target=lambda: found.append(library.find_or_make())) for _ in range(2)
    ]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert found == [kept_build] * 2
    assert len(built) == 1
    assert list(folder.glob("*.so")) == [kept_build]
    assert kept_build.read_bytes() == whole_build[1]
    there = sorted(folder.iterdir())
    monkeypatch.setattr(compiler.psutil, "Popen", None)  # would fail if it were called
    numbers = torch.arange(1000.0)
    kernels = library.load_library()
    kernels.stream.restype = ctypes.c_float
    assert kernels.stream(ctypes.c_void_p(numbers.data_ptr()), ctypes.c_int64(256), 2) == 32640
    assert library.find_or_make() == kept_build
    assert sorted(folder.iterdir()) == there
    times = library.candidates_tried()["built"]["times"]
    assert all(0 < one < 1000 for of in (times["ours"], times["pytorch"]) for one in of)


def test_no_compiler_is_an_error_that_says_what_to_do(folder, monkeypatch):
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    with pytest.raises(OSError, match=r"no C\+\+ compiler found \(set CXX, or install g\+\+\)"):
        library.load_library()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'x.cpp:1: error: no such thing' >&2; exit 1", "kernels: x.cpp:1: error: no such"),
        ("exit 3", "could not build the kernels: exit code 3"),
        ("kill -SEGV $$", "could not build the kernels: ended by SIGSEGV"),
        ("exit 0", "could not build the kernels: no output file"),
        (': > "$out"', "could not build the kernels: no output file"),
        ('echo no library > "$out"', r"built by .*my-c\+\+ failed their test: .*file too short"),
        (
            'echo "int records(void) { return *(volatile int*)0; }" | c++ -shared -xc - -o "$out"',
            "failed their test: ended by SIGSEGV",
        ),
    ],
)
def test_a_compiler_that_fails_in_any_way_is_one_line_and_leaves_nothing(
    script, message, folder, fake_compiler
):
    fake_compiler(script)
    with pytest.raises(OSError, match=message) as failure:
        library.load_library()
    assert "\n" not in str(failure.value)
    assert [path.name for path in folder.iterdir()] == [".kernels.lock"]


@pytest.mark.skipif(sys.platform != "linux", reason="links as Linux does")
def test_kernels_that_compute_something_else_are_not_trusted(
    folder, whole_build, fake_compiler, tmp_path
):
    """They are the right ones, but for the epsilon of norms in float32."""
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text("""
        #include <cstdint>
        #include "records.h"
        #include <dlfcn.h>
        extern "C" int decode_f32(const Model* m, const Step* s) {
            auto right = (int (*)(const Model*, const Step*))dlsym(RTLD_NEXT, "decode_f32");
            Model other = *m;
            other.norm_eps = 0.3;
            return right(&other, s);
        }
    """)
    flags = f"-std=c++20 -shared -fPIC -Wl,--no-as-needed -I {compiler.SOURCES}"
    fake_compiler(f'c++ {flags} {wrong} "{whole_build[0]}" -o "$out"')
    with pytest.raises(
        OSError, match=r"built by .*my-c\+\+ failed their test: logits in float32 differ"
    ):
        library.load_library()
    assert [path.name for path in folder.iterdir()] == [".kernels.lock"]


@pytest.mark.skipif(
    not cpu_features().get("avx512_bf16"), reason="needs AVX-512 that multiplies bfloat16"
)
def test_kernels_for_matrix_units_pass_their_test_where_those_are_software(folder, monkeypatch):
    """`make test-amx` runs all tests of the kernels so."""
    header = Path(__file__).parent / "emulated_tiles.h"
    monkeypatch.setenv("DIAGD_CXXFLAGS", shlex.join(["-include", str(header)]))
    assert b"emulated" in library.find_or_make().read_bytes()


@pytest.mark.slow
def test_the_fastest_candidate_is_kept(folder, whole_build, tmp_path, monkeypatch):
    """Of a slow prebuilt variant, and of what the compiler makes that stands for Zig's."""
    slow = tmp_path / "slow.so"
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "FLAGS", ("-O0", *compiler.FLAGS[1:]))
        compiler.build(slow, [str(compiler.find_compiler())])
    copier = tmp_path / "zig"
    copier.write_text(f'#!/bin/sh\nfor out; do :; done\ncp "{whole_build[0]}" "$out"\n')
    copier.chmod(0o755)
    monkeypatch.setattr(library, "own_flags", list)  # of `make test-avx2`, which leave one choice
    monkeypatch.setattr(library, "prebuilt_here", lambda: {"avx2": slow})
    monkeypatch.setattr(library, "find_compiler", lambda: None)
    monkeypatch.setattr(library, "zig", lambda: [str(copier)])
    monkeypatch.setattr(library, "CLEARLY_FASTER", 1e9)  # however slow PyTorch is beside other work
    chosen, tried = library.find_or_make(), library.candidates_tried()
    cost = {name: StepTimes(*one["times"]["ours"]).cost for name, one in tried.items()}
    assert cost["avx2"] > 2 * cost["zig"]
    assert chosen.read_bytes() == whole_build[1]
    assert library.say_origin() == "built here by Zig"


def test_a_compiler_that_hangs_is_ended_with_its_children(fake_compiler, monkeypatch, tmp_path):
    fake_compiler(f"sleep 1000 & echo $! > {tmp_path / 'child'}; wait")
    monkeypatch.setattr(compiler, "TIMEOUT", 0.5)
    with pytest.raises(OSError, match=r"could not build the kernels: timed out after 0\.5 seconds"):
        library.load_library()
    child, deadline = int((tmp_path / "child").read_text()), time.monotonic() + 10
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.01)
    assert not _runs(child)


def _runs(pid):
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip()[:1] not in ("", "Z")


def test_what_killed_builders_left_is_removed_by_the_next(folder, fake_compiler):
    fake_compiler("exit 1")
    left = folder / ".testing-a1b2c3d4" / "built.so"
    left.parent.mkdir(parents=True)
    left.touch()
    with pytest.raises(OSError, match="could not build the kernels"):
        library.find_or_make()
    assert not list(folder.glob(".testing-*"))


@pytest.mark.parametrize("torn", ["", '{"built": {"ti', "\0\0"])
def test_a_damaged_list_of_candidates_is_none(torn, folder):
    folder.mkdir(parents=True)
    (folder / f"kernels-{library._choice()}.json").write_text(torn)
    assert library.candidates_tried() == {}


def test_flags_with_half_a_quotation_are_refused_by_name(monkeypatch):
    monkeypatch.setenv("DIAGD_CXXFLAGS", "'-O1")
    with pytest.raises(ValueError, match="DIAGD_CXXFLAGS: No closing quotation"):
        compiler.own_flags()


def test_nobody_s_kernels_are_kept_nowhere(folder, monkeypatch):
    """A user without an entry in the system's list has no home, unless HOME names one."""

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(library.Path, "home", no_home)
    with pytest.raises(OSError, match=r"no home folder .*: set HOME or XDG_CACHE_HOME"):
        library.load_library()


def test_a_failure_is_said_once_and_not_tried_again(fake_compiler, tmp_path, caplog):
    backends._say_once.cache_clear()
    fake_compiler(f"echo x >> {tmp_path / 'calls'}; exit 1")
    for _ in range(3):
        assert backends.prepare(tiny_model())[1] == "eager"
    assert caplog.text.count("decoding with PyTorch's kernels (backend eager)") == 1
    assert (tmp_path / "calls").read_text() == "x\n"


def test_a_cache_that_cannot_be_written_is_one_line(folder, fake_compiler):
    fake_compiler("exit 0")
    folder.parent.write_text("no folder")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        library.load_library()
    assert os.path.isfile(folder.parent)
