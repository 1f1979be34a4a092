// The engine in this browser: a worker that runs the world. The page speaks to it as to a server
// (connection.js).

import { check, dreamOf } from "./dream.js";

const BASE = new URL("../world/", import.meta.url);
export const MAX_THREADS = 8;
const VIDEO = ["video/mp4;codecs=avc1", "video/webm;codecs=vp9", "video/webm"].find((type) => globalThis.MediaRecorder?.isTypeSupported(type));

export class Browser {
  /** handlers: welcome(message), frame(header, picture, or a promise of it or of null), progress(share),
   * computed(words), notice(message), state(name, message); canvas: what is recorded */
  constructor(handlers, canvas) {
    Object.assign(this, { handlers, canvas, recorded: 0, logs: [], hasWorld: false, abilities: new Set(VIDEO ? ["record"] : []) });
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
    this.worker.onmessage = ({ data }) => this.#receive(data);
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
      const { scene, seed, frames } = await this.#log();
      return { name: "dream.json", blob: new Blob([JSON.stringify(dreamOf(this.manifest, scene, seed, frames))]) };
    }
    if (!this.video) throw new Error("nothing was recorded yet");
    if (this.recorder?.state === "recording") this.recorder.stop(); // the dream has ended meanwhile
    const blob = await this.video;
    return { name: blob.type.includes("mp4") ? "dream.mp4" : "dream.webm", blob };
  }

  start() {
    throw new Error("a picture of your own needs the model's encoder: diagd play has it");
  }

  /** Begin a saved dream: its number of frames, and the name of its scene. */
  async replay(file) {
    let dream = null;
    try {
      dream = JSON.parse(await file.text());
    } catch {} // said below
    check(dream, this.manifest);
    const { scene, seed, frames } = dream;
    this.send({ type: "begin", scene: this.manifest.scenes.indexOf(scene), seed, frames });
    return { frames: frames.length, scene };
  }

  #receive(data) {
    if (data.type === "frame") {
      if (data.header.begun) return this.handlers.frame({ ...data.header, recorded: this.recorded }, this.#pictureOf(data.header.scene));
      if (this.recorder?.state === "recording") this.recorded++;
      this.#say(data.header.gpu);
      this.handlers.frame({ ...data.header, recorded: this.recorded }, data.picture);
    } else if (data.type === "welcome") {
      Object.assign(this, { threads: data.threads, gpu: null, hasWorld: true });
      this.handlers.welcome({ ...this.manifest, computed: this.#computed(null), threads: data.threads, max_recorded: Infinity });
      if (!this.wasHere) this.send({ type: "begin", scene: 0, seed: Math.floor(Math.random() * 2 ** 20) }); // else the page begins
      this.wasHere = true;
      this.handlers.state("live", "");
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
