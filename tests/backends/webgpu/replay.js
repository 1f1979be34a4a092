// Runs what Python submitted, in a browser: returns the tokens after each submission, and the last
// logits.
async (given) => {
  const adapter = await navigator.gpu?.requestAdapter();
  if (!adapter) return { missing: true };
  const device = await adapter.requestDevice();  // with the limits that every browser has
  device.pushErrorScope("validation");
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const { STORAGE, UNIFORM, COPY_SRC, COPY_DST, MAP_READ } = GPUBufferUsage;
  const make = (size, usage = STORAGE) =>
    device.createBuffer({ size, usage: usage | COPY_SRC | COPY_DST });
  const upload = (text, usage) => {
    const data = bytes(text);
    const buffer = make(data.length, usage);
    device.queue.writeBuffer(buffer, 0, data);
    return buffer;
  };
  const layout = (kinds) => device.createBindGroupLayout({
    entries: kinds.map((type, binding) => ({
      binding,
      visibility: GPUShaderStage.COMPUTE,
      buffer: { type, hasDynamicOffset: type === "uniform" },
    })),
  });
  const bind = (of, buffers, size) => device.createBindGroup({
    layout: of,
    entries: buffers.map((buffer, binding) => ({
      binding,
      resource: { buffer, size: binding === 0 ? size : undefined },
    })),
  });
  const shared = layout(given.shared), own = layout(given.own);
  const whole = device.createPipelineLayout({ bindGroupLayouts: [shared, own] });
  const modules = given.codes.map((code) => device.createShaderModule({ code }));
  const pipelines = {};
  const pipeline = (code, entryPoint) => pipelines[[code, entryPoint]] ??=
    device.createComputePipeline({ layout: whole, compute: { module: modules[code], entryPoint } });
  const caches = given.caches.map((size) => make(size));
  const groups = {};
  for (const [name, layer, matrix, vector] of given.weights)
    groups[name] = bind(own, [upload(matrix), upload(vector), caches[layer]]);

  const read = async (buffer, start, size) => {
    const copy = device.createBuffer({ size, usage: MAP_READ | COPY_DST });
    const encoder = device.createCommandEncoder();
    encoder.copyBufferToBuffer(buffer, start, copy, 0, size);
    device.queue.submit([encoder.finish()]);
    await copy.mapAsync(GPUMapMode.READ);
    return copy.getMappedRange();
  };
  const tokens = [];
  let logits;
  for (const one of given.submissions) {
    const memory = upload(one.memory), arena = make(one.arena);
    const buffers = [upload(one.records, UNIFORM), upload(one.lanes), memory, arena];
    const group = bind(shared, buffers, given.uniform);
    const encoder = device.createCommandEncoder();
    const run = encoder.beginComputePass();
    one.steps.forEach(([code, dispatches], index) => {
      run.setBindGroup(0, group, [index * given.uniform]);
      for (const [entry, weights, x, y] of dispatches) {
        run.setPipeline(pipeline(code, entry));
        run.setBindGroup(1, groups[weights]);
        run.dispatchWorkgroups(x, y);
      }
    });
    run.end();
    device.queue.submit([encoder.finish()]);
    tokens.push([...new Int32Array(await read(memory, 0, 4 * one.tokens))]);
    logits = [...new Float32Array(await read(arena, ...one.logits))];
  }
  const error = await device.popErrorScope();
  return { tokens, logits, error: error?.message };
}
