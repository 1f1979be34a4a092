// The decoder on the visitor's GPU: the shaders of diagd/backends/webgpu. The kernels say which
// lanes a frame feeds (Submission in csrc/wasm/world.cpp), world/webgpu.json what runs
// (backends/webgpu/shader.py).

const BLOCK = 16; // columns of a block of the kernels' weights

export class Gpu {
  /**
   * Open this browser's GPU for a world, or throw the reason why there is none.
   * about: webgpu.json; vectors: Float32Array; words(): the world's file, as it lies in memory
   */
  static async open(about, vectors, words) {
    const adapter = await navigator.gpu?.requestAdapter({powerPreference: "high-performance"});
    if (!adapter) throw new Error("this browser offers none");
    const {maxBufferSize, maxStorageBufferBindingSize} = adapter.limits;
    const requiredLimits = {maxBufferSize, maxStorageBufferBindingSize};
    const device = await adapter.requestDevice({requiredLimits});
    const gpu = new Gpu(device, about);
    const {vendor, architecture, description} = adapter.info ?? {};
    gpu.name = description || [vendor, architecture].filter(Boolean).join(" ");
    await Promise.race([gpu.#compile(), gpu.broken]);
    gpu.#upload(vectors, words());
    return gpu;
  }

  constructor(device, about) {
    Object.assign(this, {device, about, buffers: {}, at: null});
    this.broken = new Promise((_, reject) => { // never resolved
      device.lost.then(({ message }) => reject(new Error(message)));
      device.onuncapturederror = ({ error }) => reject(new Error(error.message));
    });
    this.broken.catch(() => {});
    const visibility = GPUShaderStage.COMPUTE;
    this.layouts = about.bindings.map((kinds) => {
      const buffers = kinds.map((type) => ({ type, hasDynamicOffset: type === "uniform" }));
      const entries = buffers.map((buffer, binding) => ({ binding, visibility, buffer }));
      return device.createBindGroupLayout({ entries });
    });
  }

  async #compile() {
    const {device, about} = this, {dispatches, tiles, code} = about;
    const layout = device.createPipelineLayout({bindGroupLayouts: this.layouts});
    const modules =
      tiles.map((rows) => device.createShaderModule({code: `const ROWS = ${rows}u;\n${code}`}));
    const sizesOf = (x) => (x === "rows" ? [0] : tiles.keys()); // a row has no tile
    const kinds = new Map(dispatches.map(([entry, , [x]]) => [entry, sizesOf(x)]));
    this.pipelines = {};
    const compile = async (entryPoint, tile) => {
      const compute = { module: modules[tile], entryPoint };
      const pipeline = await device.createComputePipelineAsync({ layout, compute });
      (this.pipelines[entryPoint] ??= [])[tile] = pipeline;
    };
    const each = ([entry, sizes]) => [...sizes].map((tile) => compile(entry, tile));
    await Promise.all([...kinds].flatMap(each));
  }

  #upload(vectors, words) {
    let start = 0;
    this.weights = this.about.weights.map(([name, place, shape, length]) => {
      const unpack = name === "embed" ? unpad : unblock;
      const vector = vectors.subarray(start, start += length);
      const matrix = unpack(words.subarray(place / 4), ...shape);
      return [name, this.#filled(matrix), this.#filled(vector)];
    });
  }

  #make(size, usage = GPUBufferUsage.STORAGE) {
    const copied = GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
    return this.device.createBuffer({size, usage: usage | copied});
  }

  #filled(numbers) {
    const buffer = this.#make(numbers.byteLength);
    this.device.queue.writeBuffer(buffer, 0, numbers);
    return buffer;
  }

  #bind(layout, buffers, size) {
    const sizeOf = (binding) => (binding ? undefined : size);
    const resources = buffers.map((buffer, binding) => ({buffer, size: sizeOf(binding)}));
    const entries = resources.map((resource, binding) => ({binding, resource}));
    return this.device.createBindGroup({layout: this.layouts[layout], entries});
  }

  /** Make buffers of a stream anew where they are too small. */
  #fit(sizes, slots) {
    if (!this.groups) {
      const {layers, slot_floats} = this.about;
      const caches = Array.from({length: layers}, () => this.#make(4 * slots * slot_floats));
      const cacheOf = (name) => caches[Number(name.split(" ")[1] ?? 0)];
      const groupOf = ([name, ...parts]) => [name, this.#bind(1, [...parts, cacheOf(name)])];
      this.groups = Object.fromEntries(this.weights.map(groupOf));
      const usage = GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST;
      this.back = this.device.createBuffer({size: 4 * slots, usage});
    }
    const small = Object.keys(sizes).filter((name) => !(this.buffers[name]?.size >= sizes[name]));
    for (const name of small) {
      this.buffers[name]?.destroy();
      this.buffers[name] =
        this.#make(sizes[name], name === "tasks" ? GPUBufferUsage.UNIFORM : undefined);
    }
    if (small.length) this.group = this.#bind(0, Object.values(this.buffers), this.about.uniform);
  }

  /** Run a submission; if it draws, return the tokens by slot once they are there. */
  async run({steps, slots, capacity, tasks, lanes, memory}, draws) {
    const {device, about} = this, {tiles, uniform} = about;
    const sizes = {
      tasks: tasks.length,
      lanes: lanes.length,
      memory: memory.length,
      arena: 4 * capacity * about.row_floats,
    };
    this.#fit(sizes, slots);
    for (const [name, content] of Object.entries({tasks, lanes, memory})) {
      device.queue.writeBuffer(this.buffers[name], 0, content);
    }
    const encoder = device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    const numbers = new DataView(tasks.buffer, tasks.byteOffset);
    for (let step = 0; step < steps; step++) {
      const rows = numbers.getUint32(step * uniform + 4, true);
      const tile = tiles.findIndex((size) => rows <= size || size === tiles.at(-1));
      const count = {rows, tiles: Math.ceil(rows / tiles[tile])};
      count.kept = count.tiles; // logits of all
      pass.setBindGroup(0, this.group, [step * uniform]);
      for (const [entry, weights, [x, y]] of about.dispatches) {
        if (!draws && entry === "predict") break; // what follows has no use
        pass.setPipeline(this.pipelines[entry][x === "rows" ? 0 : tile]);
        pass.setBindGroup(1, this.groups[weights]);
        pass.dispatchWorkgroups(count[x] ?? x, count[y] ?? y);
      }
    }
    pass.end();
    if (draws) encoder.copyBufferToBuffer(this.buffers.memory, 0, this.back, 0, 4 * slots);
    device.queue.submit([encoder.finish()]);
    if (!draws) return null;
    await Promise.race([this.back.mapAsync(GPUMapMode.READ), this.broken]);
    const tokens = new Int32Array(this.back.getMappedRange()).slice();
    this.back.unmap();
    return tokens;
  }

  close() {
    this.device.destroy();
  }
}

/**
 * A matrix as the shaders read it, (rows / 4, columns), of blocks, which `parts` of columns begin.
 */
function unblock(words, rows, parts) {
  const columns = parts.reduce((sum, part) => sum + part), turns = 16 * Math.ceil(rows / 64);
  const matrix = new Uint32Array((rows / 4) * columns);
  let at = BLOCK, first = 0; // a block begins with sums that are of no use here
  for (const part of parts) {
    for (let column = 0; column < part; column += BLOCK, at += (1 + turns) * BLOCK) {
      for (let k = 0; k < rows / 4; k++) {
        const from = at + k * BLOCK;
        const block = words.subarray(from, from + Math.min(BLOCK, part - column));
        matrix.set(block, k * columns + first + column);
      }
    }
    first += part;
  }
  return matrix;
}

/** Rows of bfloat16 without what pads them. */
function unpad(words, rows, columns) {
  const matrix = new Uint32Array((rows * columns) / 2);
  const used = columns / 2, stride = (BLOCK / 2) * Math.ceil(columns / BLOCK);
  for (let row = 0; row < rows; row++) {
    matrix.set(words.subarray(row * stride, row * stride + used), row * used);
  }
  return matrix;
}
