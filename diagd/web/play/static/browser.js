// The engine in this browser: a worker that runs the world. The page speaks to it as to a server
// (connection.js).

import {check, dreamOf} from "./dream.js";

const BASE = new URL("../world/", import.meta.url);
export const MAX_THREADS = 8;
const VIDEOS = ["video/mp4;codecs=avc1", "video/webm;codecs=vp9", "video/webm"];
const VIDEO = VIDEOS.find((type) => globalThis.MediaRecorder?.isTypeSupported(type));

export class Browser {
  /**
   * handlers: as a `Connection` has (its pictures may be promises, or null), and progress(share),
   * computed(words), notice(message); canvas: what is recorded
   */
  constructor(handlers, canvas) {
    const abilities = new Set(VIDEO ? ["record"] : []);
    Object.assign(this, {handlers, canvas, abilities, recorded: 0, logs: [], hasWorld: false});
    addEventListener("error", (event) => this.#end(`The page broke down (${event.message}).`));
    this.open();
  }

  async open() {
    try {
      if (await isolate()) return; // the page is loaded anew
      const file = new URL("world.json", BASE);
      const answer = await fetch(file, {cache: "no-cache"}).catch(() => null);
      if (!answer?.ok) {
        const problem = await answer?.json().catch(() => null);
        const unread = "world/world.json could not be loaded: is the folder whole?";
        throw new Error(problem?.detail ?? unread);
      }
      this.manifest = await answer.json();
    } catch (error) {
      return this.#end(error.message);
    }
    this.worker?.terminate();
    this.hasWorld = false;
    for (const answer of this.logs.splice(0)) answer(null);
    this.worker = new Worker(new URL("worker.js", import.meta.url), {type: "module"});
    this.worker.onmessage = ({data}) => this.#receive(data);
    this.worker.onerror = ({ message = "its worker could not start" }) => {
      this.#end(`The world in this browser broke down (${message}).`);
    };
    const engine = new URLSearchParams(location.search).get("engine");
    const {manifest} = this;
    this.worker.postMessage(
      {type: "load", manifest, base: BASE.href, threads: numThreads(), engine}
    );
    this.handlers.state("new", "Loading the world");
  }

  #end(message) {
    this.handlers.state("ended", message);
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
      const {scene, seed, frames} = await this.#log();
      const text = JSON.stringify(dreamOf(this.manifest, scene, seed, frames));
      return {name: "dream.json", blob: new Blob([text])};
    }
    if (!this.video) throw new Error("nothing was recorded yet");
    // the dream has ended meanwhile
    if (this.recorder?.state === "recording") this.recorder.stop();
    const blob = await this.video;
    return {name: blob.type.includes("mp4") ? "dream.mp4" : "dream.webm", blob};
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
    const {scene, seed, frames} = dream;
    this.send({type: "begin", scene: this.manifest.scenes.indexOf(scene), seed, frames});
    return {frames: frames.length, scene};
  }

  #receive(data) {
    if (data.type === "frame") {
      const {begun, scene, gpu} = data.header;
      if (!begun && this.recorder?.state === "recording") this.recorded++;
      if (!begun) this.#say(gpu);
      const picture = begun ? this.#pictureOf(scene) : data.picture;
      this.handlers.frame({...data.header, recorded: this.recorded}, picture);
    } else if (data.type === "welcome") {
      Object.assign(this, {threads: data.threads, gpu: null, hasWorld: true});
      const own = {computed: this.#computed(null), threads: data.threads, max_recorded: Infinity};
      this.handlers.welcome({...this.manifest, ...own});
      const seed = Math.floor(Math.random() * 2 ** 20);
      if (!this.wasHere) this.send({type: "begin", scene: 0, seed}); // else the page begins
      this.wasHere = true;
      this.handlers.state("live", "");
    } else if (data.type === "progress") {
      this.handlers.progress(data.done / data.size);
      const [done, size] = [data.done, data.size].map((bytes) => (bytes / 1e6).toFixed(1));
      this.handlers.state("new", `Loading the world: ${done} of ${size} MB`);
    } else if (data.type === "notice") {
      this.handlers.notice(data.message);
    } else if (data.type === "log") {
      this.logs.shift()?.(data.dream);
    } else {
      this.#end(data.message);
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
    const coming = fetch(this.picture(scene)).then((answer) => answer.blob());
    return coming.then(createImageBitmap).catch(() => null);
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
    this.recorder = new MediaRecorder(stream, {mimeType: VIDEO, videoBitsPerSecond: 4e6});
    this.recorder.ondataavailable = (event) => parts.push(event.data);
    this.video = new Promise((resolve) => {
      this.recorder.onstop = () => resolve(new Blob(parts, { type: VIDEO }));
    });
    // else the canvas is captured for ever
    this.video.then(() => stream.getTracks().forEach((track) => track.stop()));
    this.recorder.start();
  }
}

/** One thread less than the cores, for the page needs one, or as many as the address asks for. */
function numThreads() {
  if (!globalThis.crossOriginIsolated) return 1;
  const asked = Number(new URLSearchParams(location.search).get("threads"));
  return Math.max(1, Math.min(MAX_THREADS, asked || (navigator.hardwareConcurrency ?? 2) - 1));
}

/** Let a service worker keep the files, and isolate the page: else there are no threads. */
async function isolate() {
  // else a server isolates it
  const isExported = document.documentElement.dataset.engine === "browser";
  if (!isExported || !globalThis.isSecureContext || !navigator.serviceWorker) return false;
  try {
    await navigator.serviceWorker.register(new URL("../offline.js", import.meta.url));
    if (globalThis.crossOriginIsolated || sessionStorage.getItem("isolated")) return false;
    const late = new Promise((_, reject) => setTimeout(reject, 1500));
    await Promise.race([navigator.serviceWorker.ready, late]);
    sessionStorage.setItem("isolated", "tried");
  } catch {
    return false; // one thread, and nothing kept
  }
  location.reload();
  return true;
}
