"""Time variants of attention at the shapes of diagonal decoding on a GPU; check that they agree.

python runs/attention_gpu.py --out docs/results        # writes attention_gpu.json
"""

import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from attention_variants import efficient_partial, flex, masked, merged
from torch.nn.attention import SDPBackend

from diagd.models.attention import attend

HEADS = {"cosmos (32/8 x 128)": (32, 8, 128), "mc-ar (16/4 x 64)": (16, 4, 64)}
VARIANTS = {
    "sdpa, efficient, mask": masked(SDPBackend.EFFICIENT_ATTENTION),
    "sdpa, cudnn, mask": masked(SDPBackend.CUDNN_ATTENTION),
    "flex": flex(compiled=True),
    "prefix + masked tail, merged": merged(efficient_partial),
}


@dataclass(frozen=True)
class Options:
    """Where to write attention_gpu.json, and over how many runs to take the median."""

    out: Path
    repeats: int = 50


def main(options: Options) -> None:
    """Time every variant at every shape; one that PyTorch cannot run is named with its reason."""
    rows = []
    for (shape, sizes), lanes, keys in itertools.product(
        HEADS.items(), (16, 32, 64), (5120, 12800)
    ):
        heads, kv_heads, size = sizes
        prefix = keys - 2560
        make = {"device": "cuda", "dtype": torch.bfloat16}
        queries = torch.randn(1, heads, lanes, size, **make)
        cached = torch.randn(2, 1, kv_heads, keys, size, **make)
        visible = torch.rand(lanes, keys, device="cuda") < 0.5
        visible[:, :prefix] = True
        expected = attend(queries, *cached, visible).float()
        for name, variant in VARIANTS.items():
            row = {"shape": shape, "lanes": lanes, "keys": keys, "variant": name}
            try:
                run = lambda: variant(queries, *cached, visible, prefix)  # noqa: B023, E731
                row["largest_difference"] = (run().float() - expected).abs().max().item()
                row["microseconds"] = timed(run, options.repeats)
            except RuntimeError as error:
                row["error"] = str(error).splitlines()[0]
            rows.append(row)
            print(row)
    document = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    (options.out / "attention_gpu.json").write_text(
        json.dumps(document, indent=1) + "\n", encoding="utf-8"
    )


def timed(run, repeats: int) -> float:
    """Return the median time of a call, in microseconds, by CUDA events after a warm-up."""
    for _ in range(5):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


if __name__ == "__main__":
    main(tyro.cli(Options))
