// The newest frame as its grid of tokens, filling in the order in which the model wrote it.

const TRAIL = 3; // steps that glow behind the newest
const SLOW_MS = 60; // a step takes so long while the session is paused
// from one drawing to the next, or a third of a frame: the model needs the processor more
const REDRAW_MS = 45;

export class TokenGrid {
  constructor(canvas, caption) {
    Object.assign(this, {canvas, caption, paused: false, header: null, colours: []});
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.small = new OffscreenCanvas(1, 1);
  }

  use([rows, columns]) {
    Object.assign(this, {rows, columns, colours: [], before: [], header: null});
    this.small.width = columns;
    this.small.height = rows;
  }

  show(image, header) {
    const context = this.small.getContext("2d", {willReadFrequently: true});
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, this.columns, this.rows);
    const pixels = context.getImageData(0, 0, this.columns, this.rows).data;
    this.before = this.colours;
    this.colours = [];
    for (let place = 0; place < pixels.length; place += 4) {
      this.colours.push(`rgb(${pixels[place]} ${pixels[place + 1]} ${pixels[place + 2]})`);
    }
    this.header = header.begun ? null : header;
    this.writtenAt = header.written_at ?? []; // the step that wrote each place
    this.since = performance.now();
    if (this.header && !this.paused) {
      const ms = (header.decode_ms / header.steps).toFixed(2);
      const tokens = (this.rows * this.columns / header.steps).toFixed(1);
      this.caption.textContent = `${header.steps} steps, ${ms} ms each, ${tokens} tokens a step`;
    }
    this.#draw();
  }

  pause(paused) {
    this.paused = paused;
    this.since = performance.now();
    if (paused && this.header)
      this.caption.textContent = "paused: the last frame being written, slowly";
    this.#draw();
  }

  /** Draw what has been written by now, and again until all is. */
  #draw() {
    clearTimeout(this.next);
    if (!this.colours.length) return;
    const {canvas, rows, columns} = this;
    const width = Math.round(canvas.clientWidth * devicePixelRatio);
    const height = Math.round(canvas.clientHeight * devicePixelRatio);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, {width, height});
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    const newest = this.#newestStep();
    const accent = getComputedStyle(canvas).getPropertyValue("--accent");
    const cell = [width / columns, height / rows];
    const gap = Math.max(1, Math.round(devicePixelRatio * 0.75));
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const place = row * columns + column;
        const step = this.writtenAt[place] ?? 0;
        const left = Math.round(column * cell[0]), top = Math.round(row * cell[1]);
        const right = Math.round((column + 1) * cell[0]), bottom = Math.round((row + 1) * cell[1]);
        const box = [left, top, right - left - gap, bottom - top - gap];
        const written = step <= newest;
        context.globalAlpha = written ? 1 : 0.22;
        context.fillStyle = (written ? this.colours : this.before)[place] ?? "gray";
        context.fillRect(...box);
        if (written && newest - step < TRAIL && newest < Infinity) {
          context.globalAlpha = 1 - (newest - step) / TRAIL;
          context.fillStyle = accent;
          context.fillRect(...box);
        }
      }
    }
    context.globalAlpha = 1;
    if (newest === Infinity) return;
    const wait = Math.max(REDRAW_MS, this.paused ? 0 : this.header.decode_ms / 3);
    this.next = setTimeout(() => this.#draw(), wait);
  }

  /** The step that is being shown now. */
  #newestStep() {
    if (!this.header || this.still.matches) return Infinity;
    const {steps, decode_ms} = this.header;
    const passed = performance.now() - this.since;
    if (this.paused) return Math.floor(passed / SLOW_MS) % (steps + 20);
    const newest = Math.floor(passed / (decode_ms / steps));
    return newest >= steps + TRAIL ? Infinity : newest;
  }
}
