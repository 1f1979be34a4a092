import ctypes
import os

import pytest
import torch

from diagd.backends.native import compiler


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Build into an empty cache folder, whatever this process has loaded already."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return compiler.load_library.__wrapped__


def test_kernels_are_built_once_and_kept(build, tmp_path, monkeypatch):
    numbers = torch.arange(1000.0)
    library = build()
    library.stream.restype = ctypes.c_float
    assert library.stream(ctypes.c_void_p(numbers.data_ptr()), ctypes.c_int64(256), 2) == 32640
    (built,) = (tmp_path / "cache" / "diagd").iterdir()
    monkeypatch.setattr(compiler.subprocess, "run", None)  # would fail if it were called
    build()
    assert list(built.parent.iterdir()) == [built]


def test_other_sources_or_flags_are_another_build(tmp_path, monkeypatch):
    path = compiler.find_compiler()
    assert path is not None
    first = compiler._fingerprint(path)
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-g"))
    assert compiler._fingerprint(path) != first
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    assert compiler._fingerprint(path) != first


def test_the_compiler_of_the_environment_comes_first(monkeypatch, tmp_path):
    own = tmp_path / "my-c++"
    own.touch(mode=0o755)
    monkeypatch.setenv("CXX", str(own))
    assert compiler.find_compiler() == str(own)


def test_no_compiler_is_an_error_that_says_what_to_do(build, monkeypatch):
    monkeypatch.setattr(compiler, "find_compiler", lambda: None)
    with pytest.raises(OSError, match=r"no C\+\+ compiler found \(set CXX, or install g\+\+\)"):
        build()


def test_a_failing_compiler_is_quoted_and_leaves_nothing(build, tmp_path, monkeypatch):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    os.chmod(broken, 0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(OSError, match=r"could not build the kernels: .*error: no such thing"):
        build()
    assert not list((tmp_path / "cache" / "diagd").iterdir())
