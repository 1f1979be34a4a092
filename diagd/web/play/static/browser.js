// The engine in this browser: a worker that runs the world. The page speaks to it as to a server
// (connection.js).

const BASE = new URL("../world/", import.meta.url);
export const MAX_THREADS = 8;
const VIDEO = ["video/mp4;codecs=avc1", "video/webm;codecs=vp9", "video/webm"].find((type) => globalThis.MediaRecorder?.isTypeSupported(type));
const MAX_SHARED = 6000; // characters of a link

export class Browser {
  /** handlers: welcome(document), frame(header, picture, or a promise of it or of null), kept(document), progress(share), computed(words), notice(message), state(name, message); canvas: what is recorded */
  constructor(handlers, canvas) {
    Object.assign(this, { handlers, canvas, recorded: 0, logs: [], hasWorld: false, abilities: new Set(VIDEO ? ["share", "record"] : ["share"]) });
    addEventListener("hashchange", () => location.reload()); // a link to a dream, pasted over this one
    addEventListener("error", (event) => handlers.state("ended", `The page broke down (${event.message}).`));
    this.open();
  }

  async open() {
    try {
      if (await isolate()) return; // the page is loaded anew
      const answer = await fetch(new URL("world.json", BASE), { cache: "no-cache" }).catch(() => null);
      if (!answer?.ok) throw new Error((await answer?.json().catch(() => null))?.detail ?? "world/world.json could not be loaded: is the folder whole?");
      this.manifest = await answer.json();
    } catch (error) {
      return this.handlers.state("ended", error.message);
    }
    this.worker?.terminate();
    this.hasWorld = false;
    for (const answer of this.logs.splice(0)) answer(null);
    this.worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    this.worker.onmessage = ({ data }) => this.#take(data);
    this.worker.onerror = (event) => this.handlers.state("ended", `The world in this browser broke down (${event.message ?? "its worker could not start"}).`);
    this.worker.postMessage({ type: "load", manifest: this.manifest, base: BASE.href, threads: numThreads(), engine: new URLSearchParams(location.search).get("engine") });
    this.handlers.state("new", "Loading the world");
  }

  send(message) {
    if (message.type === "record") return this.#record(message.on);
    this.worker?.postMessage(message);
  }

  picture(scene) {
    return new URL(`${scene}.jpg`, BASE).href;
  }

  /** What is kept of the dream: its `video`, or itself as `dream`. */
  async keep(what) {
    if (what === "dream") {
      const dream = await this.#log();
      return { name: "dream.json", blob: new Blob([JSON.stringify({ format: "diagd-dream-1", model: this.manifest.model, ...dream })]) };
    }
    if (!this.video) throw new Error("nothing was recorded yet");
    if (this.recorder?.state === "recording") this.recorder.stop(); // the dream has ended meanwhile
    const blob = await this.video;
    return { name: blob.type.includes("mp4") ? "dream.mp4" : "dream.webm", blob };
  }

  start() {
    throw new Error("a picture of your own needs the model's encoder: diagd play has it");
  }

  /** Begin a saved dream; how many frames it has. */
  async replay(file) {
    let dream = null;
    try {
      dream = JSON.parse(await file.text());
    } catch {} // said below
    this.#check(dream);
    this.worker.postMessage({ type: "begin", scene: dream.scene, seed: dream.seed, frames: dream.frames });
    return dream.frames.length;
  }

  /** A link that plays this dream again: where it begins, its seed, and runs of equal choices. */
  async link() {
    const { scene, seed, frames } = await this.#log();
    const runs = [];
    for (const [action, strategy, temperature, top_p, , ...engine] of frames) {
      const choice = [this.manifest.actions.indexOf(action), strategy, temperature, top_p, ...engine];
      if (runs.length && String(runs.at(-1).slice(1)) === String(choice)) runs.at(-1)[0]++;
      else runs.push([1, ...choice]);
    }
    const text = btoa(JSON.stringify([scene, seed, runs, frames.at(-1)?.[4]])).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
    if (text.length > MAX_SHARED) throw new Error("the dream is too long for a link: save it");
    return `${location.href.split("#")[0]}#dream=${text}`;
  }

  /** The dream of the address, or null. */
  #shared() {
    const text = /^#dream=([\w-]+)$/.exec(location.hash)?.[1];
    if (!text) return null;
    let dream = null;
    try {
      const [scene, seed, runs, checksum] = JSON.parse(atob(text.replaceAll("-", "+").replaceAll("_", "/")));
      const frames = runs.flatMap(([count, action, strategy, temperature, top_p, ...engine]) =>
        Array(Math.min(count, 20000)).fill([this.manifest.actions[action], strategy, temperature, top_p, null, ...engine]));
      if (frames.length) frames.push(Object.assign([...frames.pop()], { 4: checksum })); // of the last frame, which depends on all
      dream = { format: "diagd-dream-1", model: this.manifest.model, scene, seed, frames };
    } catch {} // said below
    this.#check(dream);
    return dream;
  }

  #check(dream) {
    const { actions, strategies, scenes, max_seed, model } = this.manifest;
    if (dream?.format !== "diagd-dream-1" || !Array.isArray(dream.frames)) throw new Error("this is no dream that a browser saved");
    if (dream.model !== model) throw new Error(`this is a dream of the world ${String(dream.model).slice(0, 40)}, and here is ${model}`);
    const isNumber = (value, low, high) => typeof value === "number" && value >= low && value <= high;
    const isGood = ([action, strategy, temperature, top_p, , engine]) => [undefined, "webgpu"].includes(engine) && actions.includes(action) && strategies.some(([name]) => name === strategy) && isNumber(temperature, 0, 5) && isNumber(top_p, 0.01, 1);
    const whole = Number.isInteger(dream.scene) && Number.isInteger(dream.seed) && isNumber(dream.scene, 0, scenes.length - 1) && isNumber(dream.seed, 0, max_seed - 1);
    if (!whole || dream.frames.length > 20000 || !dream.frames.every((frame) => Array.isArray(frame) && isGood(frame))) throw new Error("this dream asks for what this world does not have");
  }

  #take(data) {
    if (data.type === "frame") {
      if (data.header.begun) return this.handlers.frame({ ...data.header, recorded: this.recorded }, this.#pictureOf(data.header.scene));
      if (this.recorder?.state === "recording") this.recorded++;
      this.#say(data.header.gpu);
      this.handlers.frame({ ...data.header, recorded: this.recorded }, data.picture);
    } else if (data.type === "welcome") {
      Object.assign(this, { threads: data.threads, gpu: null, hasWorld: true });
      this.handlers.welcome({ ...this.manifest, computed: this.#computed(null), threads: data.threads, max_recorded: Infinity });
      this.handlers.state("live", "");
      this.#begin();
    } else if (data.type === "progress") {
      this.handlers.progress(data.done / data.size);
      this.handlers.state("new", `Loading the world: ${(data.done / 1e6).toFixed(1)} of ${(data.size / 1e6).toFixed(1)} MB`);
    } else if (data.type === "notice") {
      this.handlers.notice(data.message);
    } else if (data.type === "log") {
      this.logs.shift()?.(data.dream);
    } else {
      this.handlers.state("ended", data.message);
    }
  }

  /** What computes: the GPU of that name, or, where that is null, the processor. */
  #computed(gpu) {
    const threads = `, ${this.threads} ${this.threads > 1 ? "threads" : "thread"}`;
    return ["int8", `this browser${gpu === null ? threads : `'s GPU${gpu && ` (${gpu})`}`}`];
  }

  #say(gpu) {
    if (gpu === (this.gpu ?? null)) return;
    this.gpu = gpu;
    this.handlers.computed(this.#computed(gpu));
  }

  /** Begin the dream of the address, or a new one. */
  #begin() {
    if (this.wasHere) return; // begun again by the page
    this.wasHere = true;
    let dream = null;
    try {
      dream = this.#shared();
    } catch (error) {
      this.handlers.kept({ message: `That did not work: ${error.message}.`, controls: this.manifest.controls });
    }
    dream ??= { scene: 0, seed: Math.floor(Math.random() * 2 ** 20) };
    this.worker.postMessage({ ...dream, type: "begin" });
  }

  /** The picture of a start, or null if the host has lost it. */
  #pictureOf(scene) {
    return fetch(this.picture(scene)).then((answer) => answer.blob()).then(createImageBitmap).catch(() => null);
  }

  async #log() {
    const dream = this.hasWorld && await new Promise((resolve) => {
      this.logs.push(resolve);
      this.worker.postMessage({ type: "log" });
    });
    if (!dream) throw new Error("the dream is gone");
    return dream;
  }

  #record(on) {
    if (!on) return this.recorder?.stop();
    this.recorded = 0;
    const parts = [], stream = this.canvas.captureStream();
    this.recorder = new MediaRecorder(stream, { mimeType: VIDEO, videoBitsPerSecond: 4e6 });
    this.recorder.ondataavailable = (event) => parts.push(event.data);
    this.video = new Promise((resolve) => { this.recorder.onstop = () => resolve(new Blob(parts, { type: VIDEO })); });
    this.video.then(() => stream.getTracks().forEach((track) => track.stop())); // else the canvas is captured for ever
    this.recorder.start();
  }
}

/** One thread less than the cores, which the page itself needs, or as many as the address asks for. */
function numThreads() {
  if (!globalThis.crossOriginIsolated) return 1;
  const asked = Number(new URLSearchParams(location.search).get("threads"));
  return Math.max(1, Math.min(MAX_THREADS, asked || (navigator.hardwareConcurrency ?? 2) - 1));
}

/** Let a service worker keep the files, and isolate the page, without which there are no threads. */
async function isolate() {
  const isExported = document.documentElement.dataset.engine === "browser"; // else a server isolates it
  if (!isExported || !globalThis.isSecureContext || !navigator.serviceWorker) return false;
  try {
    await navigator.serviceWorker.register(new URL("../offline.js", import.meta.url));
    if (globalThis.crossOriginIsolated || sessionStorage.getItem("isolated")) return false;
    await Promise.race([navigator.serviceWorker.ready, new Promise((_, reject) => setTimeout(reject, 1500))]);
    sessionStorage.setItem("isolated", "tried");
  } catch {
    return false; // one thread, and nothing kept
  }
  location.reload();
  return true;
}
