"""Let Inductor fuse a step for a GPU that is not there, and compile what it writes; nothing runs.

    python -m tests.backends.triton.fusing mc-ar-300m 14 1024 90     # one line of JSON

A step over fake tensors, which have shapes and no numbers, is compiled as on CUDA, with two layers
and with three, which tells what a layer adds. Its Triton kernels are then compiled for the
capability; products stay cuBLAS'.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import contextlib
import dataclasses
import importlib.util
import json
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.config as inductor
import torch._inductor.runtime.triton_helpers as helpers
import triton
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.compiler import ASTSource

from diagd.backends.linears import merge_linears
from diagd.backends.replay import compile_for_one_shape
from diagd.backends.triton import model as with_kernels
from diagd.backends.triton.attention import attend_slots, rotate_and_store
from diagd.backends.triton.model import Kernels
from diagd.backends.triton.sampling import draw
from diagd.decoding.model import CausalModel, Drawing, Step
from diagd.decoding.sampling import SamplingOptions, ValidRanges
from diagd.decoding.step import run_step
from diagd.families.presets import PRESETS
from diagd.models.transformer import Transformer
from tests.backends.triton.compiling import Absent
from tests.gpu.guard import exchange_device

GPU = {  # of an H100; what Inductor asks to choose sizes of blocks
    "name": "a GPU that is not there",
    "multi_processor_count": 132,
    "total_memory": 80 << 30,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 101376,
    "shared_memory_per_multiprocessor": 102400,
    "L2_cache_size": 50 << 20,
    "gcnArchName": "",
    "uuid": "0",
}
OWN = {"attend_slots": 2, "draw": 1}  # launches of our operators


class Stopped(BaseException):
    """Inductor has written its code; there is nothing to run it on."""


class Inductor:
    """Compile for a GPU of a capability, and keep the code that comes out."""

    def __init__(self, capability: int) -> None:
        self.capability, self.code = capability, ""
        exchange_device()
        major, minor = divmod(capability, 10)
        properties = SimpleNamespace(major=major, minor=minor, **GPU)
        driver: Any = Absent(capability)
        driver.is_active = lambda: True
        driver.get_active_torch_device = lambda: torch.device("cuda", 0)
        driver.get_device_interface = lambda: torch.cuda
        driver.set_current_device = lambda _: None
        driver.utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 101376})
        triton.runtime.driver.set_active(driver)
        answers = {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda _: None,
            "_exchange_device": lambda _: 0,
            "_maybe_exchange_device": lambda _: 0,
            "synchronize": lambda *_: None,
            "current_stream": lambda *_: SimpleNamespace(cuda_stream=0, stream_id=0),
            "get_device_properties": lambda *_: properties,
            "get_device_capability": lambda *_: (major, minor),
            "get_device_name": lambda *_: properties.name,
            "is_bf16_supported": lambda *_, **__: True,
            "is_tf32_supported": lambda: True,
            "get_rng_state": lambda *_: torch.zeros(1),
            "set_rng_state": lambda *_: None,
        }
        for name, answer in answers.items():
            setattr(torch.cuda, name, answer)
        for name in ("get_device_properties", "is_available", "current_device", "device_count"):
            setattr(CudaInterface, name, staticmethod(answers[name]))
        worker: Any = CudaInterface.Worker
        worker.get_device_properties = staticmethod(answers["get_device_properties"])
        worker.current_device = staticmethod(answers["current_device"])
        CudaInterface.get_compute_capability = staticmethod(lambda *_: capability)
        torch.version.cuda = "13.0"
        FakeTensorMode.avoid_device_init = property(lambda _: True)
        helpers.set_driver_to_gpu = lambda: None
        inductor.compile_threads = 1
        inductor.fx_graph_cache = inductor.shape_padding = False
        inductor.joint_graph_constant_folding = False

        def stop(graph: Any) -> None:
            self.code = graph.codegen()[0].value
            raise Stopped

        lowering: Any = GraphLowering
        lowering.compile_to_module = stop

    def launches(
        self, model: CausalModel, step: Step, lanes: Tensor, num_slots: int
    ) -> dict[str, int]:
        """Compile a step as backend `compiled-graph` does; return launches by who wrote them."""
        with contextlib.suppress(Stopped):
            compile_for_one_shape(run_step)(model, step, lanes, num_slots)
        body = self.code[self.code.index("def call(") :]
        own = re.findall(r"= torch\.ops\.diagd\.(\w+)\.default\(", body)
        return {
            "fused": len(re.findall(r"triton_\w+\.run\(", body)),
            "library": len(re.findall(r"(?:extern_kernels|torch\.ops\.aten)\.\w+", body)),
            "own": sum(OWN[name] for name in own),
        }

    def compile(self) -> int:
        """Compile every kernel that Inductor wrote for the newest step; return how many."""
        pattern = r"(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)'''"
        sizes: list[int] = []
        for name, source in re.findall(pattern, self.code, re.DOTALL):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"{name}.py"
                path.write_text(source, encoding="utf-8")
                spec = importlib.util.spec_from_file_location(name, path)
                assert spec is not None
                assert spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                tuner = getattr(module, name)
                config, meta = tuner.configs[0], tuner.triton_meta
                constants = {**meta["constants"], **config.kwargs}
                signature = {**meta["signature"], **dict.fromkeys(constants, "constexpr")}
                kernel = triton.compile(
                    ASTSource(tuner.fn, signature, constants, meta["configs"][0]),
                    target=Absent(self.capability).target,
                    options={
                        "num_warps": config.num_warps,
                        "num_stages": config.num_stages,
                        "enable_fp_fusion": True,
                    },
                )
                sizes.append(len(kernel.asm["cubin"]))
        return len(sizes)


def main(preset: str, lanes: int, slots: int, capability: int) -> None:
    """Fuse a sampled step of a preset in bfloat16, and print what it became."""
    compiler, config, counts = Inductor(capability), PRESETS[preset], list[dict[str, int]]()
    with_kernels.load_kernels = lambda *_: Kernels(attend_slots, rotate_and_store, draw)
    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for layers in (2, 3):
            shape = dataclasses.replace(config, num_layers=layers)
            with torch.device("cuda"):
                plain = Transformer(shape)
            for module in plain.modules():  # angles are computed on the CPU; `to` needs the device
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, torch.empty_like(buffer, device="cuda"))
            model: CausalModel = with_kernels.TritonModel(merge_linears(plain, pack=False))
            space = model.make_buffers(1, slots + 1, None)
            ranges = ValidRanges(0, config.image_vocab_size, None)
            step = Step(space, (Drawing(1, SamplingOptions(1.0, top_p=0.8), ranges),))
            fields = 11 if config.on_grid else 8
            packed = torch.zeros(fields, 1, lanes, dtype=torch.int64, device="cuda")
            counts.append(compiler.launches(model, step, packed, slots))
    whole = {
        who: counts[0][who] + (config.num_layers - 2) * (counts[1][who] - counts[0][who])
        for who in counts[0]
    }
    print(json.dumps({"launches": whole, "compiled": compiler.compile()}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
