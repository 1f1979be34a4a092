// The world in this browser: a worker that runs the kernels (csrc/wasm/world.cpp) frame after
// frame, and the threads that serve it. It is told what the server is told (messages.py), and
// answers alike. Where the browser's GPU writes frames in less time (webgpu.js), the kernels only
// plan and paint them.

import {Gpu} from "./webgpu.js";

const VARIANTS = ["-relaxed-threads", "-threads", "-relaxed", ""]; // the best first
const KERNELS = VARIANTS.map((variant) => `kernels${variant}.wasm`);
const STACK = 2 ** 20; // bytes of a thread
const MAX_PAGES = 16384; // of memory, as the kernels are built
const WINDOW = 2; // frames under way to the page
const MAX_FRAMES = 20000; // of a dream
const TRIAL = 10; // frames that kernels and GPU both write, before one of them is chosen
const PATIENCE_MS = 2000; // with a frame of the GPU in its trial
const FAILURES = {
  1: "The file of the world is damaged, or no file of a world: " +
    "reload the page, or have it exported again.",
  2: "The file of the world was written by another version of diagd: it has to be exported again.",
  3: "The world was asked for what it does not have.",
  4: "There is not enough memory for this world.",
  5: "No token could be drawn: the numbers of the model are broken.",
};

let world = null; // what is known of it (world.json)
let kernels = null; // the exports of the module
let memory = null;
let helpers = [];
let gpu = null; // open, whether or not it is in use
let trial = null; // of the GPU, under way: frames, and milliseconds of both
let get = null; // loads a file of the world
let worldAt = 0; // where its weights lie in memory
let channel = new MessageChannel();

const state = {
  engine: "wasm", // which writes new frames: or "webgpu"
  mayTryGpu: true,
  mayUseGpu: true,
  opening: null,
  writer: "wasm",
  kernelMs: 0,
  controls: null,
  paced: false,
  paused: false,
  seen: 0,
  sent: 0,
  sessions: 0,
  pressed: {action: null, id: 0},
  held: {action: null, id: 0},
  tapped: null,
  pending: null,
  start: null,
  history: [],
  replaying: [],
  replayed: 0,
  differing: 0,
  due: 0,
};

onmessage = ({ data }) => {
  if (data.type === "thread") serve(data);
  else if (data.type === "load") load(data).catch((error) => fail(error));
  else if (world) handle(data);
};

class Sentence extends Error {} // that a page can show

function fail(error) {
  console.error(error);
  const crash = `The world in this browser broke down (${error.message ?? error}).`;
  postMessage({type: "ended", message: error instanceof Sentence ? error.message : crash});
}

/** Check what a call of the kernels returned. */
function must(failure) {
  if (failure) throw new Sentence(FAILURES[failure] ?? `The kernels failed (${failure}).`);
}

function imports(shared) {
  const nothing = new Proxy({}, {get: () => () => 0}); // what an abort would print with
  const env = {now: () => performance.now()};
  return {env: shared ? {...env, memory: shared} : env, wasi_snapshot_preview1: nothing};
}

/** A view that holds until memory grows. */
const bytesAt = (at, count) => new Uint8Array(memory.buffer, at, count);

/** A thread, for as long as the page lives. */
async function serve({module, memory: shared, thread, stack, tls}) {
  const {exports} = await WebAssembly.instantiate(module, imports(shared));
  exports.__stack_pointer.value = stack;
  exports.__wasm_init_tls(tls);
  postMessage("ready");
  exports.serve(thread);
}

async function load({manifest, base, threads, engine}) {
  get = async (name) => {
    const answer = await fetch(new URL(name, base)).catch(() => null);
    if (answer?.ok) return answer;
    const [file] = name.split("?");
    throw new Sentence(`${file} could not be loaded: is the folder whole?`);
  };
  const [module, name] = await compile(threads > 1);
  const isShared = name.includes("threads");
  try {
    const sizes = {initial: 64, maximum: MAX_PAGES, shared: true};
    memory = isShared ? new WebAssembly.Memory(sizes) : null;
  } catch {
    throw new Sentence(FAILURES[4]);
  }
  const instance = await WebAssembly.instantiate(module, imports(memory));
  kernels = instance.exports;
  memory ??= kernels.memory;
  kernels._initialize();
  worldAt = await fetchWorld(await get(`world.bin?v=${manifest.version}`), manifest.bytes);
  must(kernels.open_world(worldAt, manifest.bytes));
  const running = isShared ? await startThreads(module, threads) : 1;
  state.controls = {...manifest.controls};
  state.pressed.action = state.held.action = manifest.keyboard.idle;
  state.mayUseGpu = engine !== "wasm";
  state.mayTryGpu = state.mayUseGpu && engine !== "webgpu";
  if (engine === "webgpu") state.engine = engine;
  world = manifest;
  postMessage({type: "welcome", threads: running, kernels: name});
  run().catch(fail);
}

/** The best kernels that this browser can run. */
async function compile(threaded) {
  for (const name of KERNELS) {
    if (name.includes("threads") !== threaded) continue;
    const code = await (await get(name)).arrayBuffer();
    if (!WebAssembly.validate(code)) continue;
    return [await WebAssembly.compile(code), name];
  }
  const missing = "it has no WebAssembly with SIMD. Every browser since 2023 has.";
  throw new Sentence(`This browser is too old for this world: ${missing}`);
}

async function fetchWorld(answer, size) {
  const at = kernels.allocate(size);
  let done = 0;
  for (const reader = answer.body.getReader();;) {
    const {value, done: over} = await reader.read();
    if (over) break;
    if (done + value.length > size) throw new Sentence(FAILURES[1]);
    bytesAt(at + done, value.length).set(value);
    done += value.length;
    postMessage({type: "progress", done, size});
  }
  if (done !== size) throw new Sentence(FAILURES[1]);
  return at;
}

/** Start threads; those that do not come within some seconds are done without. */
async function startThreads(module, count) {
  kernels.set_threads(count); // before they come: they wait for so many
  const tlsSize = kernels.__tls_size.value + kernels.__tls_align.value;
  const start = (thread) => new Promise((resolve, reject) => {
    const helper = new Worker(import.meta.url, { type: "module" });
    helpers.push(helper);
    helper.onmessage = resolve;
    helper.onerror = reject;
    const align = kernels.__tls_align.value || 1;
    const tls = Math.ceil(kernels.allocate(tlsSize) / align) * align;
    const stack = kernels.allocate(STACK) + STACK;
    helper.postMessage({ type: "thread", module, memory, thread, stack, tls });
  });
  const coming = Array.from({length: count - 1}, (_, index) => start(index + 1));
  const late = new Promise((_, reject) => setTimeout(reject, 8000, "too late"));
  try {
    await Promise.race([Promise.all(coming), late]);
    return count;
  } catch {
    for (const helper of helpers) helper.terminate();
    helpers = [];
    kernels.set_threads(1);
    return 1;
  }
}

function handle(message) {
  switch (message.type) {
    case "act":
      press(message);
      break;
    case "adjust": {
      const {type, paced, ...controls} = message;
      Object.assign(state, {controls, paced});
      break;
    }
    case "pause":
      state.paused = message.paused;
      break;
    case "seen":
      state.seen = message.frame;
      break;
    case "begin": {
      const scene = message.scene ?? (state.pending ?? state.start)?.scene ?? 0;
      state.pending = {scene, seed: message.seed, frames: message.frames ?? []};
      break;
    }
    case "log":
      postMessage({type: "log", dream: {...state.start, frames: state.history}});
  }
  channel.port2.postMessage(0);
}

/** Keep the pressed action, and a tap that no frame has seen (player.py). */
function press({action, id}) {
  const last = state.pressed, idle = world.keyboard.idle;
  const words = action.split("+"), before = last.action.split("+");
  const isLess = words.length < before.length && words.every((word) => before.includes(word));
  const letGo = [idle, state.held.action].includes(action) || isLess;
  if (letGo && last !== state.held && last.action !== idle) state.tapped = last;
  state.pressed = {action, id};
}

function nextAct() {
  if (!state.tapped) return (state.held = state.pressed);
  const {tapped} = state;
  state.tapped = null;
  return tapped;
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Write frames for as long as the page lives; between two of them, messages come in. */
async function run() {
  channel.port1.onmessage = () => wake?.();
  let wake = null;
  const messages = () => new Promise((resolve) => { wake = resolve; });
  for (;;) {
    channel.port2.postMessage(0);
    await messages();
    const wait = state.due - performance.now();
    if (state.sent - state.seen >= WINDOW)
      await messages();
    else if (state.pending)
      begin();
    else if (!state.start || (state.paused && !state.replaying.length))
      await messages();
    else if (!state.replaying.length && wait > 0)
      await Promise.race([messages(), sleep(wait)]);
    else
      await advance();
  }
}

/** Open the GPU, unless this browser or this world has none. */
async function openGpu() {
  try {
    if (!world.gpu) throw new Error("the shaders cannot run this world");
    const files = ["json", "bin"].map((kind) => get(`webgpu.${kind}?v=${world.version}`));
    const [about, vectors] = await Promise.all(files);
    const words = () => new Uint32Array(memory.buffer, worldAt, world.bytes >> 2);
    gpu = await Gpu.open(await about.json(), new Float32Array(await vectors.arrayBuffer()), words);
    gpu.broken.catch(lose);
    if (state.mayTryGpu) trial = {frames: -1, gpu: 0, kernels: 0};
  } catch (error) {
    if (state.engine === "webgpu") {
      notice(`No GPU writes this dream (${error.message}): the processor does.`);
    }
    state.engine = "wasm";
  }
}

/** Go on without the GPU. */
function lose(error) {
  if (!gpu) return;
  const reason = error.message || "no reason was given";
  if (!trial || state.writer === "webgpu") {
    notice(`The GPU was lost (${reason}): the processor goes on with the dream.`);
  }
  leave();
}

function leave() {
  gpu?.close();
  gpu = trial = null;
  state.engine = "wasm";
}

const notice = (message) => postMessage({type: "notice", message});

/** What the kernels say that a GPU has to run. */
function submission(at) {
  const [steps, laneWords, memoryWords, slots, capacity, ...places] =
    new Uint32Array(memory.buffer, at, 8);
  const sizes = [gpu.about.uniform * steps, 4 * laneWords, 4 * memoryWords];
  const [tasks, lanes, held] = places.map((place, index) => bytesAt(place, sizes[index]));
  return {steps, slots, capacity, tasks, lanes, memory: held};
}

/** Have the GPU write the next frame: its tokens, and where the kernels expect them. */
async function draw(order) {
  const place = `${state.sessions} ${state.history.length}`;
  if (gpu.at !== place) await gpu.run(submission(kernels.describe_context()), false);
  gpu.at = `${state.sessions} ${state.history.length + 1}`;
  const told = submission(kernels.describe_frame(...order));
  return {to: told.memory.byteOffset, tokens: await gpu.run(told, true)};
}

/** Write a frame with the GPU; if that fails, nothing has happened. */
async function writeOnGpu(order) {
  try {
    const {to, tokens} = await draw(order);
    new Int32Array(memory.buffer, to, tokens.length).set(tokens);
    if (kernels.accept_frame()) throw new Error("its numbers are broken");
    return true;
  } catch (error) {
    lose(error);
    return false;
  }
}

/** Write a frame with the kernels; while the GPU is tried, it writes the same before. */
async function writeHere(order, isTried) {
  const ms = isTried ? await tryGpu(order) : null;
  must(kernels.read_context());
  const started = performance.now();
  must(kernels.advance(...order));
  state.kernelMs = performance.now() - started;
  if (ms !== null && trial) compareEngines(ms, state.kernelMs);
}

/** How long the GPU takes for a frame, which nobody sees. */
async function tryGpu(order) {
  const started = performance.now();
  const patience = Math.max(PATIENCE_MS, 3 * state.kernelMs);
  const late = new Promise((resolve) => setTimeout(resolve, patience, null));
  const drawn = await Promise.race([draw(order).catch(() => null), late]);
  return drawn ? performance.now() - started : Infinity;
}

/** The first frame warms up; then the GPU is chosen if it needs less time for ten frames. */
function compareEngines(gpuMs, kernelMs) {
  if (++trial.frames) {
    trial.gpu += gpuMs;
    trial.kernels += kernelMs;
  }
  // it will not make that up
  if (gpuMs === Infinity || trial.gpu > (TRIAL * trial.kernels) / trial.frames) return leave();
  if (trial.frames < TRIAL) return;
  if (trial.gpu >= trial.kernels) return leave();
  [state.engine, trial, gpu.at] = ["webgpu", null, null]; // its cache has the trial's tokens
}

function begin() {
  const started = performance.now();
  const {scene, seed, frames} = state.pending;
  must(kernels.begin(scene, seed));
  Object.assign(state, {
    start: {scene, seed},
    pending: null,
    history: [],
    replaying: [...frames],
    replayed: 0,
    differing: 0,
    tapped: null,
    due: 0,
  });
  state.sessions++;
  send({begun: true, scene, decode_ms: performance.now() - started, encode_ms: 0});
}

async function advance() {
  if (state.history.length >= MAX_FRAMES) {
    throw new Sentence(`This dream has lasted ${MAX_FRAMES} frames, which is the longest.`);
  }
  const record = state.replaying.shift();
  const isForGpu = state.mayUseGpu && (record ?? state).engine === "webgpu";
  if (isForGpu) await (state.opening ??= openGpu());
  const act = record ? {action: record.action, id: state.pressed.id} : nextAct();
  const {strategy, temperature, top_p} = (record ?? state).controls;
  const number = world.strategies.findIndex(([name]) => name === strategy);
  const order = [world.actions.indexOf(act.action), number, temperature, temperature ? top_p : 1];
  let started = performance.now();
  const isDrawn = isForGpu && gpu && await writeOnGpu(order);
  if (!isDrawn) {
    await writeHere(order, trial && !record);
    started = performance.now() - state.kernelMs;
    if (state.mayTryGpu) state.opening ??= openGpu();
  }
  state.writer = isDrawn ? "webgpu" : "wasm";
  const decoded = performance.now();
  const [height, width] = world.size_px, [rows, columns] = world.grid;
  const checksum = crc32(bytesAt(kernels.newest_tokens(), 4 * rows * columns));
  // a copy: what is shared cannot be shown
  const pixels = new Uint8ClampedArray(bytesAt(kernels.paint(), 4 * height * width));
  const painted = performance.now();
  const used = {strategy, temperature, top_p}, engine = isDrawn ? {engine: "webgpu"} : {};
  state.history.push({action: act.action, controls: used, checksum, ...engine});
  if (record) {
    state.replayed++;
    state.differing += record.checksum != null && record.checksum !== checksum;
  }
  state.due = state.paced ? Math.max(state.due + 1000 / world.fps, started) : 0;
  const header = {
    action: act.action,
    strategy,
    input: act.id,
    steps: world.strategies[number][1],
    written_at: world.written_at[number],
    decode_ms: decoded - started,
    picture_ms: painted - decoded,
    encode_ms: 0,
    checksum,
    gpu: isDrawn ? gpu?.name ?? "" : null,
  };
  send(header, new ImageData(pixels, width, height));
}

function send(header, picture = null) {
  const common = {
    frame: ++state.sent,
    session_number: state.sessions,
    length: state.history.length,
    seed: state.start.seed,
    held: kernels.held_frames(),
    holds: kernels.window_frames(),
    send_ms: 0,
    received: state.pressed.id,
    replay: [state.replayed, state.replayed + state.replaying.length, state.differing],
  };
  const moved = picture ? [picture.data.buffer] : [];
  postMessage({type: "frame", header: {...common, ...header}, picture}, moved);
}

const TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = byte & 1 ? 0xedb88320 ^ (byte >>> 1) : byte >>> 1;
  return byte;
});
function crc32(bytes) {
  let sum = 0xffffffff;
  for (const byte of bytes) sum = TABLE[(sum ^ byte) & 255] ^ (sum >>> 8);
  return (sum ^ 0xffffffff) >>> 0;
}
