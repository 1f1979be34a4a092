// What is measured in the page: frames a second, time a frame, key to picture.

const WINDOW_MS = 2000;
const NUM_BARS = 96;
const NUM_LATENCIES = 500;

export class Readings {
  constructor(canvas) {
    Object.assign(this, {canvas, times: [], bars: [], latencies: [], presses: [], total: 0});
  }

  /** A key went down now; the frame that has used it says so by its number. */
  pressed(id) {
    this.presses.push({id, time: performance.now()});
  }

  /** The page was paused, or another session has begun: what hangs over does not count. */
  forget() {
    this.presses = [];
    this.times = [];
  }

  /** A frame is on the screen. */
  drawn(header) {
    const now = performance.now();
    this.total++;
    this.times.push(now);
    while (this.times.length > 2 && this.times[0] < now - WINDOW_MS) this.times.shift();
    const {decode_ms, picture_ms, encode_ms, strategy} = header;
    this.bars.push({ms: decode_ms + picture_ms + encode_ms, decode_ms, strategy});
    if (this.bars.length > NUM_BARS) this.bars.shift();
    this.#draw();
    const used = this.presses.filter((press) => press.id <= header.input);
    if (!used.length) return;
    this.presses = this.presses.filter((press) => press.id > header.input);
    this.latencies.push(now - used.at(-1).time);
    if (this.latencies.length > NUM_LATENCIES) this.latencies.shift();
  }

  /** Of the newest two seconds, or the newest two frames; a frame that is late counts as slow. */
  get framesPerSecond() {
    const {times} = this;
    if (times.length < 2) return 0;
    const pace = (1000 * (times.length - 1)) / (times.at(-1) - times[0]);
    return Math.min(pace, 1000 / (performance.now() - times.at(-1)));
  }

  /** The median time of the newest frames of the strategy in use. */
  get frameMs() {
    const strategy = this.bars.at(-1)?.strategy;
    const current = this.bars.slice(-24).filter((bar) => bar.strategy === strategy);
    return quantile(current.map((bar) => bar.ms), 0.5);
  }

  latency(share) {
    return quantile(this.latencies, share);
  }

  #draw() {
    const {canvas, bars} = this;
    const width = Math.round(canvas.clientWidth * devicePixelRatio);
    const height = Math.round(canvas.clientHeight * devicePixelRatio);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, {width, height});
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    const slowest = Math.max(...bars.map((bar) => bar.ms), 1);
    const step = width / NUM_BARS;
    bars.forEach((bar, index) => {
      const tall = Math.max(2, (bar.ms / slowest) * height);
      const isCurrent = bar.strategy === bars.at(-1).strategy;
      context.fillStyle = style.getPropertyValue(isCurrent ? "--accent" : "--line");
      context.fillRect(width - (bars.length - index) * step, height - tall, step * 0.7, tall);
    });
  }
}

export function quantile(values, share) {
  if (!values.length) return null;
  const sorted = [...values].sort((one, other) => one - other);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}
