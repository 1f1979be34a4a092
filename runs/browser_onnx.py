"""Time the bundled world in a browser: diagd's own kernels, and onnxruntime-web as a baseline.

For the baseline the model becomes one ONNX graph of a decoding step, in float32 and with weights
quantized to int8. A headless Chromium decodes by the same plan, greedily; the tokens are compared
with those of diagd in float32. The cache is handled as well as the WebAssembly provider permits:
tensors do not outlive a run, and every input is copied, so all keys and values travel into each
step (`copy_ms` is what a copy of them takes) and only those of the lanes come out; attention reads
both parts without joining them. Nothing else should run on the machine, which two threads need
whole: onnxruntime's spin.

    pip install -e '.[test]' onnx onnxscript onnxruntime    # and Chromium, and npm
    python runs/browser_onnx.py --out docs/results/browser_onnx.json
"""

import functools
import http.server
import json
import logging
import os
import shutil
import subprocess
import tarfile
import tempfile
import threading
from collections import defaultdict
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

from diagd.backends.devices import DTypeName
from diagd.backends.linears import merge_linears
from diagd.decoding.generate_tokens import DecodingEngine
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.schedule import SCRATCH, DiagonalSchedule, FrameFormat, make_plan
from diagd.families.checkpoints import model_path
from diagd.files import write_bytes, write_json, write_text
from diagd.models.attention import split_heads
from diagd.models.rotary import grid_coordinates, rotate
from diagd.models.transformer import Transformer
from diagd.pipeline.generator import VideoGenerator
from diagd.pipeline.scenes import model_scenes
from diagd.pipeline.world_folder import load_parts
from diagd.system import provenance, settings_of
from diagd.web.play.export import WORLD_FILE, pack, page_files
from diagd.web.play.options import ExportWebOptions

try:
    import onnxscript  # noqa: F401  (which torch.onnx needs)
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from playwright.sync_api import Browser, sync_playwright
except ImportError as error:
    raise SystemExit(
        f"error: no {error.name}: pip install onnx onnxscript onnxruntime playwright"
    ) from None

# Frames whose tokens must be those of diagd, in float32; two of them stand behind a full context.
CHECKED = 6
# The text of a worker, with slots and visibility as diagd.decoding.engine and visibility have them.
WORKER = """
import * as ort from "./dist/ort.wasm.min.mjs";
const NEVER = 2 ** 31 - 1, HIDDEN = -1e30, PREFILL_LANES = 256;
onmessage = ({ data }) =>
  bench(data).then(postMessage, ({ message }) => postMessage({ error: message }));

async function bench({ plan, model, threads, prompt, actions }) {
  ort.env.wasm.numThreads = threads;
  const session = await ort.InferenceSession.create(model, { executionProviders: ["wasm"] });
  const { layers, heads, size, ring, window, vocabulary, codes } = plan;
  const cache = Array.from({ length: 2 * layers }, () => new Float32Array(heads * ring * size));
  const names = cache.map((_, i) => `${i % 2 ? "values" : "keys"}_${i >> 1}`);
  const tokens = new Array(ring).fill(0);
  const held = new Int32Array(ring).fill(-1), fedAt = new Int32Array(ring).fill(NEVER);
  const ints = (list, dims) => new ort.Tensor("int64", BigInt64Array.from(list, BigInt), dims);

  /** Feed lanes [position, source, output, step], and write what they predict. */
  async function feed(lanes) {
    const count = lanes.length, width = ring + count, slots = lanes.map(([at]) => at % ring);
    const mask = new Float32Array(2 * count * width).fill(HIDDEN); // the second: sliding
    lanes.forEach(([at, , , step], lane) => {
      for (let slot = 0; slot < ring; slot++) {
        const isVisible = fedAt[slot] <= step && held[slot] <= at;
        if (!isVisible && held[slot] !== at) continue;
        mask[lane * width + slot] = 0;
        if (at - held[slot] < window) mask[(count + lane) * width + slot] = 0;
      }
      for (const row of [lane, count + lane]) slots.forEach((slot, other) => {
        mask[row * width + ring + other] = mask[row * width + slot]; // not in the cache yet
        mask[row * width + slot] = HIDDEN;
      });
    });
    const feeds = {
      tokens: ints(lanes.map(([, source]) => tokens[source % ring]), [1, count]),
      positions: ints(lanes.map(([at]) => at), [count]),
      mask: new ort.Tensor("float32", mask, [2, count, width]),
    };
    const dims = [1, heads, ring, size];
    cache.forEach((data, i) => { feeds[names[i]] = new ort.Tensor("float32", data, dims); });
    const found = await session.run(feeds);
    cache.forEach((data, i) => {
      const fresh = found[`new_${names[i]}`].data;
      for (let head = 0; head < heads; head++) slots.forEach((slot, lane) => {
        const from = (head * count + lane) * size;
        data.set(fresh.subarray(from, from + size), (head * ring + slot) * size);
      });
    });
    lanes.forEach(([, , output], lane) => {
      if (output === null) return;
      const logits = found.logits.data.subarray(lane * vocabulary, lane * vocabulary + codes);
      let best = 0;
      for (let id = 1; id < codes; id++) if (logits[id] > logits[best]) best = id;
      tokens[output % ring] = best;
    });
  }

  prompt.forEach((token, at) => { tokens[at] = token; held[at] = at; fedAt[at] = -1; });
  const known = prompt.slice(1).map((_, at) => [at, at, null, 0]); // the last is fed at step 0
  while (known.length) await feed(known.splice(0, PREFILL_LANES));
  const frames = [], frameMs = [], copyMs = [];
  for (let used = prompt.length; frames.length < actions.length; used += plan.fedAt.length) {
    const started = performance.now();
    held.forEach((at, slot) => { fedAt[slot] = at < 0 ? NEVER : -1; });
    plan.fedAt.forEach((step, i) => {
      held[(used + i) % ring] = used + i;
      fedAt[(used + i) % ring] = step;
    });
    actions[frames.length].forEach((id, i) => { tokens[(used + i) % ring] = id; });
    for (const lanes of plan.steps) await feed(lanes.map(([at, source, output, step]) =>
      [used + at, used + source, output === null ? null : used + output, step]));
    frameMs.push(performance.now() - started);
    frames.push(plan.fedAt.map((_, i) => tokens[(used + i) % ring]).slice(actions[0].length));
  }
  const goal = cache.map((data) => data.slice());
  for (const _ of frames) {
    const started = performance.now();
    cache.forEach((data, i) => goal[i].set(data));
    copyMs.push(performance.now() - started);
  }
  return { frames, frameMs, copyMs };
}
"""
RUN = """(job) => new Promise((resolve) => {
  const worker = new Worker("worker.mjs", { type: "module" });
  const end = (found) => { worker.terminate(); resolve(found); };
  worker.onmessage = ({ data }) => end(data);
  worker.onerror = ({ message }) => end({ error: message });
  worker.postMessage(job);
})"""
PLAY = """async ({ threads, actions, strategy }) => {
  const base = new URL("diagd/world/", location.href).href;
  const manifest = await (await fetch(`${base}world.json`)).json(), frameMs = [];
  const worker = new Worker("diagd/static/worker.js", { type: "module" });
  const controls = { ...manifest.controls, strategy, temperature: 0, paced: false };
  return new Promise((resolve) => {
    const end = (found) => { worker.terminate(); resolve(found); };
    worker.onerror = ({ message }) => end({ error: message });
    worker.onmessage = ({ data: { type, header, message, threads: running } }) => {
      if (type === "ended" || (type === "welcome" && running !== threads))
        return end({ error: message ?? "too few threads" });
      if (type === "welcome") {
        worker.postMessage({ type: "adjust", ...controls });
        worker.postMessage({ type: "begin", scene: 0, seed: 0 });
      }
      if (type !== "frame") return;
      worker.postMessage({ type: "seen", frame: header.frame });
      if (!header.begun) frameMs.push(header.decode_ms);
      if (frameMs.length === actions.length) end({ frameMs });
    };
    worker.postMessage({ type: "load", manifest, base, threads });
  });
}"""


@dataclass(frozen=True)
class Options:
    """Decode the world doom in a browser, by diagd and by onnxruntime-web."""

    out: Path | None = None  # a JSON file
    frames: int = 12  # timed, each at a full context
    warm_up: int = 3  # frames before them, behind those that fill the context
    rounds: int = 3  # of all rows, one after the other; told are medians of rounds
    threads: tuple[int, ...] = (1, 2)
    row_lag: int = 1
    package: str = "onnxruntime-web@1.30.0"  # of the npm registry
    chromium: str = shutil.which("chromium") or "chromium"


class StepGraph(nn.Module):
    """A decoding step as a function: caches come in whole, keys and values of the lanes go out."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.stack, self.lm_head = model.model, model.lm_head
        self.sliding_layers = model.config.sliding_layers

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, *cache: Tensor) -> Any:
        """Run tokens (1, L) at positions (L,), which see slots and lanes by masks (2, L, M + L)."""
        x, fresh, num_slots = self.stack.embed_tokens(tokens), list[Tensor](), cache[0].shape[2]
        coordinates = grid_coordinates(self.stack.rotary.config, positions)
        cos, sin = self.stack.rotary(positions, coordinates, x.dtype)
        for index, (block, old_keys, old_values) in enumerate(
            zip(self.stack.layers, cache[::2], cache[1::2], strict=True)
        ):
            attention, seen = block.self_attn, mask[int(index in self.sliding_layers)]
            projected = attention.qkv_proj(block.input_layernorm(x)).split(attention.widths, -1)
            queries, keys, values = (split_heads(part, attention.head_dim) for part in projected)
            queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
            fresh += [keys, values]
            queries = queries * attention.head_dim**-0.5
            parts = queries @ old_keys.transpose(2, 3), queries @ keys.transpose(2, 3)
            weights = F.softmax(torch.cat(parts, -1) + seen, -1)
            out = weights[..., :num_slots] @ old_values + weights[..., num_slots:] @ values
            x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
            x = x + block.mlp(block.post_attention_layernorm(x))
        return self.lm_head(self.stack.norm(x)), *fresh


def main(options: Options) -> None:
    """Export, decode in the browser, compare and print."""
    for program in ("npm", options.chromium):
        if shutil.which(program) is None:
            raise SystemExit(f"error: no {program}: install it")
    logging.disable(logging.WARNING)  # exporters tell what they do not need
    job, expected = reference(options, "float32")
    _, own = reference(options, "int8")  # which the page draws, too: test_browser_engine.py
    num_steps, found = len(job["plan"]["steps"]), defaultdict[tuple[str, str, int], list[Any]](list)
    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name)
        fetch_package(options.package, folder)
        sizes = {("diagd", "int8"): export_diagd(folder, job["strategy"])}
        sizes |= export_onnx(folder, job["plan"]["ring"])
        arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=options.chromium, args=arguments)
        handler = functools.partial(Isolated, directory=str(folder))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{server.server_port}/"
            cases = list(product(sizes, options.threads))
            for (engine, dtype), threads in cases * options.rounds:
                task = job | {"model": f"{url}{dtype}.onnx", "threads": threads}
                run = decode(browser, url, PLAY if engine == "diagd" else RUN, task)
                found[engine, dtype, threads].append(run)
            server.shutdown()
        chromium = browser.version
        browser.close()
    rows = []
    for (engine, dtype, threads), runs in found.items():
        frame_ms = median(median(run["frameMs"][-options.frames :]) for run in runs)
        tokens = own if engine == "diagd" else torch.tensor(runs[0]["frames"])
        equal = tokens == expected
        if dtype == "float32" and not equal[:CHECKED].all():
            raise SystemExit("error: the tokens of the first frames are not those of diagd")
        copies = [median(run["copyMs"]) for run in runs if "copyMs" in run]
        rows.append(
            {
                "engine": engine,
                "dtype": dtype,
                "threads": threads,
                "file_bytes": sizes[engine, dtype],  # diagd's with tokenizer and start frames
                "frame_ms": frame_ms,
                "step_ms": frame_ms / num_steps,
                "copy_ms": median(copies) if copies else 0.0,  # of the cache, in each step
                "equal_tokens": equal.float().mean().item(),  # to those of diagd in float32
                "equal_tokens_first_frame": equal[0].float().mean().item(),
            }
        )
    tools = {"chromium": chromium, "onnxruntime": version("onnxruntime")}  # which quantized
    work = {"strategy": job["strategy"], "steps": num_steps, "slots": job["plan"]["ring"]}
    machine = provenance(torch.device("cpu"))
    document = {"options": settings_of(options), **machine, **tools, **work, "rows": rows}
    print_rows(rows)
    if options.out is not None:
        write_json(options.out, document, indent=1)
    print(json.dumps(document))


def reference(options: Options, dtype: DTypeName) -> tuple[dict[str, Any], Tensor]:
    """Return what the browser is told, and the tokens (T, height * width) that diagd decodes."""
    world = VideoGenerator.from_pretrained("doom", dtype=dtype)
    config, codec = world.config, world.vocabulary
    assert codec is not None
    scene = model_scenes(model_path("doom"), world, config.frames_held - 1)[0]
    prompt, grids = world.prompt(scene.frames, scene.actions)
    num_frames = config.frames_held - len(grids) + options.warm_up + options.frames
    names = [codec.names[frame // 4 % len(codec.names)] for frame in range(num_frames)]
    actions = world.action_ids(names, num_frames, "frame")
    assert actions is not None
    sizes = world.height, world.width
    sampling = world.sampling(SamplingOptions())
    engine = DecodingEngine(world.model, FrameFormat(*sizes, 1), sampling=sampling)
    engine.prefill(prompt, len(grids))
    strategy = f"k={options.row_lag}"
    frames = torch.cat(list(engine.decode(strategy, actions)))
    layout = engine.stream.frame.layout(1, 2)  # stand-ins reach 2 frames back
    plan = make_plan(DiagonalSchedule.spatial(layout.grid, options.row_lag), layout, pad=False)
    lanes = [
        (position, source, None if output == SCRATCH else output, step)
        for position, _, source, output, step, *_ in plan.lanes
    ]
    told = {
        "steps": [lanes[start:end] for start, end in pairwise(plan.starts)],
        "fedAt": plan.fed_at,
        "ring": engine.stream.window * layout.slots_per_frame,
        "window": config.sliding_window,
        "layers": config.num_layers,
        "heads": config.num_kv_heads,
        "size": config.head_dim,
        "vocabulary": config.vocab_size,
        "codes": config.image_vocab_size,
    }
    ids = {"prompt": prompt[0].tolist(), "actions": actions[0].tolist()}
    return {"strategy": strategy, "plan": told, **ids}, frames.flatten(1)


def fetch_package(package: str, folder: Path) -> None:
    """Unpack `dist` of an npm package into a folder, with our page and worker beside it."""
    done = subprocess.run(["npm", "pack", package], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        told = (done.stderr.splitlines() or ["no reason given"])[0]
        raise SystemExit(f"error: npm could not fetch {package}: {told}")
    with tarfile.open(folder / done.stdout.split()[-1]) as archive:
        archive.extractall(folder, filter="data")
    (folder / "package" / "dist").rename(folder / "dist")
    write_text(folder / "index.html", "<!doctype html><title>onnxruntime-web</title>")
    write_text(folder / "worker.mjs", WORKER)


def export_diagd(folder: Path, strategy: str) -> int:
    """Write the page of diagd; return the bytes of its world."""
    target = folder / "diagd"
    for name, content in (page_files() | pack(ExportWebOptions(target, strategy=strategy))).items():
        write_bytes(target / name, content)
    return (target / "world" / WORLD_FILE).stat().st_size


@torch.inference_mode()
def export_onnx(folder: Path, num_slots: int) -> dict[tuple[str, str], int]:
    """Write float32.onnx and int8.onnx into a folder; return the bytes of each."""
    model = load_parts("doom").model
    layers, some = range(model.config.num_layers), torch.export.Dim.DYNAMIC
    names = [f"{kind}_{i}" for i in layers for kind in ("keys", "values")]
    empty = model.make_cache(1, num_slots)
    cache = [part for layer in zip(empty.keys, empty.values, strict=True) for part in layer]
    tokens, mask = torch.zeros(1, 14, dtype=torch.int64), torch.zeros(2, 14, num_slots + 14)
    files = {dtype: folder / f"{dtype}.onnx" for dtype in ("float32", "int8")}
    torch.onnx.export(
        StepGraph(merge_linears(model, pack=False)).eval(),
        (tokens, tokens[0], mask, *cache),
        files["float32"],
        input_names=["tokens", "positions", "mask", *names],
        output_names=["logits", *(f"new_{name}" for name in names)],
        dynamic_shapes=({1: some}, {0: some}, {1: some, 2: some}, ({2: some},) * len(cache)),
        external_data=False,
        verbose=False,
    )
    how = {"per_channel": True, "weight_type": QuantType.QInt8}
    quantize_dynamic(*files.values(), op_types_to_quantize=["MatMul", "Gather"], **how)
    return {("onnxruntime-web", dtype): path.stat().st_size for dtype, path in files.items()}


class Isolated(http.server.SimpleHTTPRequestHandler):
    """Serve files with the headers that threads in WebAssembly need."""

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def decode(browser: Browser, url: str, script: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a script in a page of its own; return its answer."""
    page = browser.new_page()
    page.goto(url)
    isolated = page.evaluate("crossOriginIsolated")
    found = page.evaluate(script, job) if isolated else {"error": "no threads here"}
    page.close()
    if "error" in found:
        raise SystemExit(f"error: in the browser: {found['error']}")
    return found


def print_rows(rows: list[dict[str, Any]]) -> None:
    names = (
        "",
        "weights",
        "threads",
        "MB",
        "ms a frame",
        "ms a step",
        "of it copying",
        "equal tokens",
    )
    table = Table(*names, box=SIMPLE)
    for row in rows:
        cells = [row["engine"], row["dtype"], str(row["threads"]), f"{row['file_bytes'] / 1e6:.1f}"]
        cells += [f"{row['frame_ms']:.0f}", f"{row['step_ms']:.1f}", f"{row['copy_ms']:.1f}"]
        table.add_row(*cells, f"{row['equal_tokens']:.1%}")
    Console(stderr=True, width=120).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
