"""Time the bundled world in a browser by onnxruntime-web, the baseline of `diagd export-web`.

The model becomes one ONNX graph of a decoding step, in float32 and with weights quantized to int8,
and a headless Chromium decodes frame after frame by the same plan as diagd, greedily. The cache is
as fast as the WebAssembly provider permits: it has no tensor that outlives a run, and copies every
input, so keys and values of all slots travel into each step (`copy_ms` is what that takes) and
only those of the lanes come out; the graph attends to both parts without joining them. Tokens are
compared with those of diagd in float32. Nothing else should run on the machine.

    pip install -e '.[test]' onnx onnxscript onnxruntime    # and Chromium and npm
    python runs/browser_onnx.py --out docs/results/browser_onnx.json
"""

import functools
import http.server
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from diagd.backends.linears import merge_linears
from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.schedule import SCRATCH, DiagonalSchedule, make_plan
from diagd.families.checkpoints import model_path
from diagd.files import write_json
from diagd.models.attention import split_heads
from diagd.models.rotary import rotate
from diagd.models.transformer import Transformer
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.world_folder import load_parts
from diagd.system import provenance, settings_of
from diagd.web.play.welcome import start_scenes

try:
    import onnxscript  # noqa: F401  (which torch.onnx needs)
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from playwright.sync_api import Browser, sync_playwright
except ImportError as error:
    raise SystemExit(
        f"error: no {error.name}: pip install onnx onnxscript onnxruntime playwright"
    ) from None

CHECKED = 4  # frames whose tokens must be those of diagd, in float32
# A worker's text. It keeps slots and visibility as diagd.decoding.engine and visibility do.
WORKER = """
import * as ort from "./dist/ort.wasm.min.mjs";
const NEVER = 2 ** 31 - 1, PREFILL = 256;
onmessage = ({ data }) => bench(data).then(postMessage, (error) => postMessage({ error: `${error.message}` }));

async function bench({ plan, model, threads, prompt, actions }) {
  ort.env.wasm.numThreads = threads;
  const session = await ort.InferenceSession.create(model, { executionProviders: ["wasm"], graphOptimizationLevel: "all" });
  const { layers, heads, size, ring, perFrame, vocabulary, codes } = plan;
  const cache = Array.from({ length: 2 * layers }, () => new Float32Array(heads * ring * size));
  const names = cache.map((_, i) => `${i % 2 ? "values" : "keys"}_${i >> 1}`);
  const tokens = new Array(ring).fill(0), held = new Int32Array(ring).fill(-1), fedAt = new Int32Array(ring).fill(NEVER);
  const ints = (list) => new ort.Tensor("int64", BigInt64Array.from(list, BigInt), [list.length]);

  /** Feed lanes [position, source, output, step], and write what they predict; all are absolute. */
  async function feed(lanes) {
    const slots = lanes.map(([position]) => position % ring), width = ring + lanes.length;
    const mask = new Float32Array(lanes.length * width);
    lanes.forEach(([position, , , step], lane) => {
      const sees = (slot) => held[slot] === position || (fedAt[slot] <= step && held[slot] <= position);
      const row = mask.subarray(lane * width, (lane + 1) * width);
      for (let slot = 0; slot < ring; slot++) row[slot] = sees(slot) ? 0 : -1e30;
      slots.forEach((slot, other) => { row[slot] = -1e30; row[ring + other] = sees(slot) ? 0 : -1e30; });
    });
    const feeds = {
      tokens: ints(lanes.map(([, source]) => tokens[source % ring])).reshape([1, lanes.length]),
      positions: ints(lanes.map(([position]) => position)),
      mask: new ort.Tensor("float32", mask, [lanes.length, width]),
    };
    cache.forEach((data, i) => { feeds[names[i]] = new ort.Tensor("float32", data, [1, heads, ring, size]); });
    const found = await session.run(feeds);
    cache.forEach((data, i) => {
      const fresh = found[`new_${names[i]}`].data;
      for (let head = 0; head < heads; head++) slots.forEach((slot, lane) => {
        const from = (head * lanes.length + lane) * size;
        data.set(fresh.subarray(from, from + size), (head * ring + slot) * size);
      });
    });
    const logits = found.logits.data;
    lanes.forEach(([, , output], lane) => {
      if (output === null) return;
      let best = lane * vocabulary;
      for (let id = best, end = best + codes; id < end; id++) if (logits[id] > logits[best]) best = id;
      tokens[output % ring] = best - lane * vocabulary;
    });
  }

  prompt.forEach((token, slot) => { tokens[slot] = token; held[slot] = slot; fedAt[slot] = -1; });
  for (let start = 0; start < prompt.length - 1; start += PREFILL) {
    const count = Math.min(PREFILL, prompt.length - 1 - start);
    await feed(Array.from({ length: count }, (_, i) => [start + i, start + i, null, 0]));
  }
  const frames = [], frameMs = [];
  for (let used = prompt.length; frames.length < actions.length; used += perFrame) {
    const started = performance.now();
    for (let slot = 0; slot < ring; slot++) fedAt[slot] = held[slot] < 0 ? NEVER : -1;
    plan.fedAt.forEach((step, i) => { held[(used + i) % ring] = used + i; fedAt[(used + i) % ring] = step; });
    actions[frames.length].forEach((id, i) => { tokens[(used + i) % ring] = id; });
    for (const step of plan.steps) await feed(step.map(([position, source, output, at]) => [used + position, used + source, output === null ? null : used + output, at]));
    frameMs.push(performance.now() - started);
    const first = used + perFrame - plan.area;
    frames.push(Array.from({ length: plan.area }, (_, i) => tokens[(first + i) % ring]));
  }
  const goal = cache.map((data) => data.slice()), copies = frameMs.map(() => {
    const started = performance.now();
    cache.forEach((data, i) => goal[i].set(data));
    return performance.now() - started;
  });
  return { frames, frameMs, copyMs: copies, isolated: crossOriginIsolated, versions: ort.env.versions };
}
"""
RUN = """(job) => new Promise((resolve) => {
  const worker = new Worker("worker.mjs", { type: "module" });
  worker.onmessage = ({ data }) => { worker.terminate(); resolve(data); };
  worker.onerror = ({ message }) => resolve({ error: message || "worker.mjs could not be loaded" });
  worker.postMessage(job);
})"""


@dataclass(frozen=True)
class Options:
    """Decode the world doom in a browser by onnxruntime-web."""

    out: Path | None = None  # a JSON file
    frames: int = 12  # timed, each at a full context
    warm_up: int = 3  # frames before them, behind those that fill the context
    threads: tuple[int, ...] = (1, 2)
    row_lag: int = 1
    rounds: int = 3  # of all rows, one after the other; told are medians of rounds
    package: str = "onnxruntime-web@1.30.0"  # of the npm registry
    chromium: str = shutil.which("chromium") or "chromium"


class StepGraph(nn.Module):
    """A decoding step as a function: caches come in whole, keys and values of the lanes go out."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.stack, self.lm_head = model.model, model.lm_head

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor, *cache: Tensor
    ) -> tuple[Tensor, ...]:
        """Run tokens (1, L) at positions (L,), which see slots and lanes by a mask (L, M + L)."""
        x, fresh, num_slots = self.stack.embed_tokens(tokens), list[Tensor](), cache[0].shape[2]
        cos, sin = self.stack.rotary(positions, x.dtype)
        for block, old_keys, old_values in zip(
            self.stack.layers, cache[::2], cache[1::2], strict=True
        ):
            attention = block.self_attn
            projected = attention.qkv_proj(block.input_layernorm(x)).split(attention.widths, -1)
            queries, keys, values = (split_heads(part, attention.head_dim) for part in projected)
            queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
            fresh += [keys, values]
            queries = queries * attention.head_dim**-0.5
            parts = queries @ old_keys.transpose(2, 3), queries @ keys.transpose(2, 3)
            weights = F.softmax(torch.cat(parts, -1) + mask, -1)
            out = weights[..., :num_slots] @ old_values + weights[..., num_slots:] @ values
            x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.post_attention_layernorm(x))
        return self.lm_head(self.stack.norm(x)), *fresh


def main(options: Options) -> None:
    """Export, decode in the browser, compare and print."""
    for program in ("npm", options.chromium):
        if shutil.which(program) is None:
            raise SystemExit(f"error: no {program}: install it")
    job, expected = reference(options)
    num_steps = len(job["plan"]["steps"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fetch_package(options.package, folder)
        sizes = export(load_parts("doom").model, folder, job["plan"]["ring"])
        (folder / "index.html").write_text("<!doctype html><title>onnxruntime-web</title>")
        (folder / "worker.mjs").write_text(WORKER)
        with serving(folder) as url, sync_playwright() as driver:
            arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
            browser = driver.chromium.launch(executable_path=options.chromium, args=arguments)
            turns = list(product(sizes, options.threads)) * options.rounds
            found = [(*turn, decode(browser, url, job, *turn)) for turn in turns]
            chromium = browser.version
            browser.close()
    rows = []
    for dtype, threads in product(sizes, options.threads):
        runs = [run for *turn, run in found if turn == [dtype, threads]]
        equal = torch.tensor(runs[0]["frames"]) == expected.flatten(1)
        if dtype == "float32" and not equal[:CHECKED].all():
            raise SystemExit("error: the tokens of the first frames are not those of diagd")
        frame_ms = median(median(run["frameMs"][-options.frames :]) for run in runs)
        rows.append(
            {
                "dtype": dtype,
                "threads": threads,
                "file_bytes": sizes[dtype],
                "frame_ms": frame_ms,
                "step_ms": frame_ms / num_steps,
                "copy_ms": median(median(run["copyMs"]) for run in runs),  # of a step
                "equal_tokens": equal.float().mean().item(),  # to diagd's in float32
                "equal_tokens_first_frame": equal[0].float().mean().item(),
            }
        )
    print_rows(rows)
    document = {
        "options": settings_of(options),
        **provenance(torch.device("cpu")),
        "chromium": chromium,
        "onnxruntime": version("onnxruntime"),  # which quantized
        "strategy": f"k={options.row_lag}",
        "steps": num_steps,
        "slots": job["plan"]["ring"],
        "rows": rows,
    }
    if options.out is not None:
        write_json(options.out, document, indent=1)
    print(json.dumps(document))


def reference(options: Options) -> tuple[dict[str, Any], Tensor]:
    """Return what the browser is told, and the frames (T, height, width) that diagd decodes."""
    world = VideoGenerator.from_pretrained("doom", dtype="float32")
    config, codec, names = world.config, world.vocabulary, list[str]()
    assert codec is not None
    scene = start_scenes(model_path("doom"), None, world, config.frames_held - 1)[0]
    prompt, grids = world.prompt(scene.frames, scene.actions)
    num_frames = config.frames_held - len(grids) + options.warm_up + options.frames
    names = [codec.names[frame // 4 % len(codec.names)] for frame in range(num_frames)]
    actions = world.action_ids(names, num_frames, "frame")
    assert actions is not None
    engine = DecodingEngine(
        world.model,
        world.height,
        world.width,
        num_action_tokens=config.num_action_tokens,
        sampling=world.sampling(SamplingOptions()),
    )
    engine.prefill(prompt, len(grids))
    frames = torch.cat(list(engine.decode(f"k={options.row_lag}", actions, num_frames)))
    layout = engine.stream.layout(1, 2)  # frames that stand-ins reach back
    plan = make_plan(DiagonalSchedule.spatial(layout.grid, options.row_lag), layout, pad=False)
    lanes = [
        (position, source, None if output == SCRATCH else output, step)
        for position, _, source, output, step, *_ in plan.lanes
    ]
    job = {
        "plan": {
            "steps": [lanes[start:end] for start, end in pairwise(plan.starts)],
            "fedAt": plan.fed_at,
            "ring": engine.stream.window * layout.slots_per_frame,
            "perFrame": layout.slots_per_frame,
            "area": layout.grid.tokens_per_frame,
            "layers": config.num_layers,
            "heads": config.num_kv_heads,
            "size": config.head_dim,
            "vocabulary": config.vocab_size,
            "codes": config.image_vocab_size,
        },
        "prompt": prompt[0].tolist(),
        "actions": actions[0].tolist(),
    }
    return job, frames


def fetch_package(package: str, folder: Path) -> None:
    """Unpack `dist` of an npm package into a folder."""
    done = subprocess.run(["npm", "pack", package], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: npm could not fetch {package}: {done.stderr.strip()[-200:]}")
    with tarfile.open(folder / done.stdout.split()[-1]) as archive:
        archive.extractall(folder, filter="data")
    (folder / "package" / "dist").rename(folder / "dist")


@torch.inference_mode()
def export(model: Transformer, folder: Path, num_slots: int) -> dict[str, int]:
    """Write float32.onnx and int8.onnx into a folder; return the bytes of each."""
    config, dynamic = model.config, torch.export.Dim.DYNAMIC
    names = [f"{kind}_{i}" for i in range(config.num_layers) for kind in ("keys", "values")]
    cache = model.make_cache(1, num_slots)
    slots = [part for pair in zip(cache.keys, cache.values, strict=True) for part in pair]
    num_lanes = config.grid_height  # any number but those of other sizes
    tokens = torch.zeros(1, num_lanes, dtype=torch.int64)
    mask = torch.zeros(num_lanes, num_slots + num_lanes)
    torch.onnx.export(
        StepGraph(merge_linears(model, pack=False)).eval(),
        (tokens, tokens[0], mask, *slots),
        folder / "float32.onnx",
        input_names=["tokens", "positions", "mask", *names],
        output_names=["logits", *(f"new_{name}" for name in names)],
        dynamic_shapes=({1: dynamic}, {0: dynamic}, {0: dynamic, 1: dynamic}, ({2: dynamic},) * 12),
        external_data=False,
        dynamo=True,
        verbose=False,
    )
    quantize_dynamic(
        folder / "float32.onnx",
        folder / "int8.onnx",
        op_types_to_quantize=["MatMul", "Gather"],
        per_channel=True,
        weight_type=QuantType.QInt8,
    )
    return {dtype: (folder / f"{dtype}.onnx").stat().st_size for dtype in ("float32", "int8")}


class Isolated(http.server.SimpleHTTPRequestHandler):
    """Serve files with the headers that threads in WebAssembly need."""

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    handler = functools.partial(Isolated, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def decode(
    browser: Browser, url: str, job: dict[str, Any], dtype: str, threads: int
) -> dict[str, Any]:
    """Run the worker in a page of its own; return its answer."""
    page = browser.new_page()
    page.goto(url)
    found = page.evaluate(RUN, job | {"model": f"{url}{dtype}.onnx", "threads": threads})
    page.close()
    if "error" in found or not found["isolated"]:
        raise SystemExit(f"error: in the browser: {found.get('error', 'no threads')}")
    return found


def print_rows(rows: list[dict[str, Any]]) -> None:
    names = "weights", "threads", "MB", "ms a frame", "ms a step", "of it copying", "equal tokens"
    table = Table(*names, box=SIMPLE)
    for row in rows:
        cells = f"{row['file_bytes'] / 1e6:.1f}", f"{row['frame_ms']:.0f}", f"{row['step_ms']:.2f}"
        last = f"{row['copy_ms']:.2f}", f"{row['equal_tokens']:.1%}"
        table.add_row(row["dtype"], str(row["threads"]), *cells, *last)
    Console(stderr=True).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
