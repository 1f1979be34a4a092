"""Compare new kernels with PyTorch's before they are used, and time them.

    python -m diagd.backends.native.self_test LIBRARY

It runs in a separate process, so that kernels that crash or hang only fail the test. The last line
on stdout is a JSON object of the `StepTimes` of `REFERENCE` in float32, `ours` and `pytorch`; the
last line on stderr is the first difference, if any.
"""

import ctypes
import json
import sys
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from diagd.backends.linears import can_pack, merge_linears
from diagd.backends.native.model import NativeModel
from diagd.backends.native.trained_attention import run_backward, run_forward, trained_mask
from diagd.backends.native.weights import NativeDType
from diagd.backends.step_times import REFERENCE, time_steps
from diagd.decoding.sampling import check_draws
from diagd.decoding.visibility import Seen
from diagd.models.attention import attend
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer

WIDTHS = (1, 2, 5, 14, 15, 33)  # lanes per step: around the kernels' tile sizes
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05, "int8": 0.1}  # relative to the largest logit


def check_kernels(library: ctypes.CDLL) -> None:
    """Raise ValueError if steps or draws of the kernels differ from PyTorch's."""
    gated = ModelConfig(
        hidden_size=72,
        intermediate_size=100,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=18,
        vocab_size=90,
        image_vocab_size=80,
        max_positions=sum(WIDTHS),
        grid_height=3,
        grid_width=5,
        qk_norm=True,
        post_norms=True,
    )
    by_head = replace(gated, num_kv_heads=4, head_norm=True, head_size=50, post_norms=False)
    plain = replace(by_head, norm="layer", mlp="gelu", bias=True, position="learned")
    for config in (gated, replace(plain, sliding_window=21, sliding_layers=(1,))):
        model = Transformer.random(config)
        for one in model.parameters():  # logits, attention and norms far from uniform
            one.data = one * 5 if one.dim() > 1 else one + torch.linspace(-0.2, 0.2, len(one))
        if config.norm == "rms":  # with an outlier
            last: Any = model.model.norm
            last.weight.data[5] = 9
        for weights in get_args(NativeDType):
            native = NativeModel(model, weights, library=library)
            _compare_steps(model, native, TOLERANCE[weights])
            check_draws(native.sample, 90)
    if library.attention_trains():
        _compare_gradients(library)


@torch.inference_mode()
def _compare_steps(model: Transformer, native: NativeModel, tolerance: float) -> None:
    count = sum(WIDTHS)
    tokens = torch.randint(90, (2, count), generator=torch.Generator().manual_seed(0))
    cache, logits = native.make_cache(2, count + 1), list[Tensor]()
    for slots in torch.arange(count).split(WIDTHS):
        held = torch.arange(int(slots[-1]) + 1)
        seen = Seen(slots, slots, held, held)
        logits.append(native.forward(tokens[:, slots], slots, slots, seen, cache))
    expected = model.logits(tokens)
    error = (torch.cat(logits, 1) - expected).abs().max() / expected.abs().max()
    if not error <= tolerance:
        raise ValueError(f"logits in {native.weights} differ by {error:.2g}, allowed {tolerance}")


def _compare_gradients(library: ctypes.CDLL) -> None:
    generator, lanes = torch.Generator().manual_seed(0), 70
    visible = torch.rand(lanes, lanes, generator=generator) < 0.5
    visible[40:, :40] = False
    visible |= torch.eye(lanes, dtype=torch.bool)
    given = [torch.randn(2, lanes, heads, 64, generator=generator) for heads in (4, 2, 2, 4)]
    *inputs, out_grad = (one.bfloat16() for one in given)
    mask = trained_mask(visible)
    out, masses = run_forward(library, *inputs, *mask)
    found = out, *run_backward(library, out_grad, out, masses, *inputs, *mask)
    exact = [one.float().requires_grad_() for one in inputs]
    queries, keys, values = (one.transpose(1, 2) for one in exact)
    expected = attend(queries, keys, values, visible).transpose(1, 2)
    expected = expected, *torch.autograd.grad(expected, exact, out_grad.float())
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours - theirs).norm() / theirs.norm()
        if not error <= TOLERANCE["bfloat16"]:
            raise ValueError(f"attention or its gradients differ by {error:.2g} in training")


if __name__ == "__main__":
    try:
        kernels = ctypes.CDLL(sys.argv[1])
        check_kernels(kernels)
        model = Transformer.random(REFERENCE)
        times = time_steps(REFERENCE, {"ours": NativeModel(model, library=kernels)})
        times |= time_steps(REFERENCE, {"pytorch": merge_linears(model, can_pack(model))})
        print(json.dumps(times))
    except (ValueError, OSError, AttributeError) as error:
        sys.exit(str(error))
