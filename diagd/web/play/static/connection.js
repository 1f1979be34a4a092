// The socket to the server: takes messages apart, comes back by itself when the server does.

const RETRY_MS = [300, 600, 1200, 2400, 5000];
const FULL = 1013;
const SILENCE_MS = 20000; // four times what the server lets pass without a word (scheduler.py)

export class Connection {
  /** handlers: welcome(message), frame(header, picture), kept(message), state(name, message) */
  constructor(handlers) {
    this.handlers = handlers;
    this.abilities = new Set(["upload", "record"]);
    this.failures = 0;
    this.open();
  }

  open() {
    clearTimeout(this.timer);
    this.#hangUp();
    this.lastWords = null;
    this.welcomed = false; // before that we wait for a place, and have nothing to say
    const url = new URL("play", document.baseURI); // below whatever path a proxy serves the page
    url.protocol = url.protocol.replace("http", "ws");
    this.socket = new WebSocket(url);
    this.socket.binaryType = "arraybuffer";
    this.socket.onmessage = (event) => { this.#listen(); this.#receive(event.data); };
    this.socket.onclose = (event) => this.#closed(event);
    this.#listen();
  }

  /** Give up a server that hangs: it would not answer a goodbye either. */
  #listen() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => { this.#hangUp(); this.#closed({}); }, SILENCE_MS);
  }

  #hangUp() {
    if (!this.socket) return;
    this.socket.onmessage = this.socket.onclose = null;
    this.socket.close();
  }

  send(message) {
    if (!this.welcomed || this.socket.readyState !== WebSocket.OPEN) return;
    this.socket.send(JSON.stringify(message));
  }

  picture(scene) {
    return `scenes/${scene}.jpg`;
  }

  /** What is kept of the dream: its `video`, or itself as `dream`. */
  async keep(what) {
    const isVideo = what === "video", name = isVideo ? "dream.mp4" : "dream.json";
    const answer = await this.#request(isVideo ? "video.mp4" : "session.json");
    return {name, blob: await answer.blob()};
  }

  /** Begin in a picture of one's own; what there is to say of it. */
  async start(file, seed) {
    const answer = await this.#request(`start?seed=${seed}`, {method: "POST", body: file});
    return (await answer.json()).notes;
  }

  /** Begin a saved dream: its number of frames, and the name of its scene, if it has one. */
  async replay(file) {
    return (await this.#request("replay", {method: "POST", body: file})).json();
  }

  async #request(path, options) {
    const answer = await fetch(`sessions/${this.session}/${path}`, options).catch(() => null);
    if (answer?.ok) return answer;
    const problem = await answer?.json().catch(() => null);
    const isKnown = typeof problem?.detail === "string";
    throw new Error(isKnown ? problem.detail : "the server does not answer");
  }

  #receive(data) {
    if (typeof data !== "string") { // see `pack` in messages.py
      const length = new DataView(data).getUint32(0);
      const header = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
      const picture = new Blob([new Uint8Array(data, 4 + length)], {type: "image/jpeg"});
      return this.handlers.frame(header, picture);
    }
    const message = JSON.parse(data);
    switch (message.type) {
      case "welcome":
        this.failures = 0;
        this.welcomed = true;
        this.handlers.welcome(message); // which asks for the recording of the session before
        this.session = message.session;
        this.handlers.state("live", "");
        break;
      case "waiting":
        this.failures = 0;
        this.handlers.state("waiting", message.message);
        break;
      case "kept":
        this.handlers.kept(message);
        break;
      case "refused":
      case "ended":
        this.lastWords = message; // the socket closes behind it
        break;
      case "alive":
        break;
    }
  }

  #closed(event) {
    clearTimeout(this.silence);
    const said = this.lastWords?.message;
    if (this.lastWords?.type === "ended") return this.handlers.state("ended", said);
    if (event.code === FULL) {
      this.handlers.state("waiting", said ?? "The server is full. Trying again.");
      this.timer = setTimeout(() => this.open(), 3000);
      return;
    }
    this.handlers.state("lost", "The connection to the server was lost. Trying again.");
    const wait = RETRY_MS[Math.min(this.failures++, RETRY_MS.length - 1)];
    this.timer = setTimeout(() => this.open(), wait);
  }
}
