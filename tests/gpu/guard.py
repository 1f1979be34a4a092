"""Let a CPU build of torch believe in `cuda:0` and `cuda:1`.

Torch asks a device's guard which device of its kind is current; without one `.to("cuda")` ends
before any Python is asked. This guard, a few lines of C++ against torch's own headers, keeps a
number for each thread and does nothing else. It is built once into the cache of the native kernels.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from diagd.backends.native.compiler import find_compiler
from diagd.backends.native.library import cache_folder

NUM_DEVICES = 2
SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>

constexpr auto CUDA = c10::DeviceType::CUDA;
thread_local c10::DeviceIndex current = 0;

struct Guard : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device getDevice() const override { return {CUDA, current}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before{CUDA, current};
    current = device.index() < 0 ? current : device.index();
    return before;
  }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchangeDevice(device); }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
};

extern "C" void install() { c10::impl::registerDeviceGuard(CUDA, new Guard); }
extern "C" int exchange(int index) {
  int before = current;
  if (index >= 0) current = static_cast<c10::DeviceIndex>(index);
  return before;
}
"""


@cache
def exchange_device() -> Callable[[int], int]:
    """Install the guard; return the function that sets the thread's device and tells the old one.

    Raises:
        OSError: no compiler, or it fails.
    """
    library = ctypes.CDLL(str(_built()))
    library.install()
    return library.exchange


def _built() -> Path:
    root, compiler = Path(torch.__file__).parent, find_compiler()
    if compiler is None:
        raise OSError("no C++ compiler found (set CXX, or install g++)")
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", f"-DNUM_DEVICES={NUM_DEVICES}"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10"]
    name = hashlib.sha256(" ".join([torch.__version__, compiler, SOURCE, *flags]).encode())
    built = cache_folder() / f"pretended-cuda-{name.hexdigest()[:16]}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            fresh = Path(folder) / built.name
            command = [compiler, "-x", "c++", "-", *flags, "-o", str(fresh)]
            done = subprocess.run(command, input=SOURCE, text=True, capture_output=True)
            if done.returncode:
                raise OSError(f"{compiler} could not build the guard: {done.stderr}")
            os.replace(fresh, built)
    return built
