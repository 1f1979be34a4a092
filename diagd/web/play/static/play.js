// The page of `diagd play`: what comes from the engine is shown, what is done here is said to it.
// The engine is a server, or this browser itself where the page was written by `diagd export-web`.

import {Browser, MAX_THREADS} from "./browser.js";
import {Connection} from "./connection.js";
import {dreamOfAddress, linkOf} from "./dream.js";
import {useGamepad} from "./gamepad.js";
import {Keyboard} from "./keyboard.js";
import {Readings} from "./readings.js";
import {TokenGrid} from "./token-grid.js";

const $ = (id) => document.getElementById(id);
const stage = $("stage").getContext("2d");
const grid = new TokenGrid($("grid"), $("grid-caption"));
const readings = new Readings($("bars"));
globalThis.diagd = {readings}; // for whoever drives this page by a script (runs/play.py)
const SLOW = 2; // frames a second below which the page says what would be faster
const state = {
  scene: 0,
  session: 0,
  paused: false,
  recording: false,
  recorded: 0,
  seed: 0,
  inputs: 0,
  pressed: 0,
};
let about = null; // what the engine said when it let us in
let controls = null;
let drawing = Promise.resolve(); // frames are drawn one after the other

const keyboard = new Keyboard($("pad"), $("words"), (action, isPress) => {
  state.inputs++;
  if (isPress) {
    if (state.paused) setPaused(false);
    readings.pressed(state.inputs);
    state.pressed = state.inputs;
    showAction(action, true); // at once, however long its picture takes
  }
  connection.send({ type: "act", action, id: state.inputs });
});
const handlers = {
  welcome,
  frame: (header, picture) => {
    drawing = drawing.then(() => drawFrame(header, picture)).catch(breakOff);
  },
  kept,
  progress: showProgress,
  computed: showComputed,
  notice: (message) => toast(message, true),
  state: setState,
};
const isExported = document.documentElement.dataset.engine === "browser";
const engine = new URLSearchParams(location.search).get("engine");
const isHere = isExported || ["browser", "wasm", "webgpu"].includes(engine);
const connection = isHere ? new Browser(handlers, stage.canvas) : new Connection(handlers);
useGamepad(keyboard);

function welcome(message) {
  const before = about;
  if (before && state.recording) download("video"); // of the dream that was lost
  about = message;
  controls ??= {...message.controls};
  state.recording = false;
  state.recorded = state.pressed = 0;
  readings.forget();
  grid.use(message.grid);
  const [height, width] = [stage.canvas.height, stage.canvas.width] = message.size_px;
  document.documentElement.style.setProperty("--ratio", width / height);
  showComputed(message.computed);
  keyboard.use(message.keyboard);
  drawStrategies();
  drawScenes();
  $("own-caption").hidden = !can("upload");
  showControls();
  showRecording(0);
  if (before) {
    adjust({});
    begin(about.scenes[state.scene] ? state.scene : 0, askedSeed());
    toast("Connected again. The old dream is gone, so this one starts anew.");
  }
  setPaused(document.hidden); // nobody sees a tab in the background
}

async function drawFrame(header, coming) {
  const picture = await coming;
  if (picture) {
    const image = await createImageBitmap(picture);
    stage.drawImage(image, 0, 0, stage.canvas.width, stage.canvas.height);
    grid.show(image, header);
    image.close();
  }
  connection.send({type: "seen", frame: header.frame});
  if (header.session_number !== state.session) {
    state.session = header.session_number;
    readings.forget();
  }
  const [done, total, differing] = header.replay;
  showProgress(total ? done / total : 1);
  state.seed = header.seed;
  state.recorded = header.recorded;
  if (document.activeElement !== $("seed")) $("seed").value = header.seed;
  const remembered = `the model remembers ${header.held} of at most ${header.holds}`;
  $("context").textContent = `frame ${header.length} of this dream; ${remembered}`;
  showRecording(header.recorded);
  if (header.begun) return void (state.replaying = total > 0);
  if (total && done === total && state.replaying) {
    const others = `${differing} came out differently (another model, machine, GPU or version)`;
    const outcome = differing ? `; ${others}` : ", every token as it was";
    toast(`Replayed ${total} frames${outcome}.`);
  }
  state.replaying = done < total;
  requestAnimationFrame(() => {
    readings.drawn(header);
    document.body.dataset.frames = readings.total;
    showReadings(header);
  });
}

function breakOff(error) {
  setPaused(true);
  setState("ended", `The picture could not be drawn (${error.message}).`);
}

/** What the weights are, and what runs the model. */
function showComputed(words) {
  $("computed").textContent = words.join(", ");
}

/** How much has been loaded, or replayed. */
function showProgress(share) {
  $("progress").hidden = share === 1;
  $("progress").firstElementChild.style.width = `${100 * share}%`;
}

function showPace() {
  const fps = state.paused && !state.replaying ? 0 : readings.framesPerSecond; // or 0 for none
  const digits = fps && fps.toFixed(fps < 0.95 ? 2 : 1);
  $("hud-fps").hidden = !fps && !state.paused;
  $("hud-fps").textContent = fps ? `${digits} frames/s` : "paused";
  $("fps").textContent = fps ? digits : "-";
  if (fps && fps < SLOW)
    showFaster();
  else if (fps > 1.5 * SLOW || !fps)
    $("faster").hidden = true;
}

/** What would make this world faster here, of what is not done yet. */
function showFaster() {
  const ways = [];
  if (controls.strategy !== "k=1" && about.strategies.some(([name]) => name === "k=1"))
    ways.push("the strategy k=1");
  if (controls.paced) ways.push("another pace");
  if (isHere) ways.push(...waysHere());
  const said = `A frame takes a while here. Faster: ${ways.join(", or ")}.`;
  if (ways.length && $("faster").textContent !== said) $("faster").textContent = said;
  $("faster").hidden = !ways.length;
}

function waysHere() {
  if (!globalThis.crossOriginIsolated) {
    return ["a window that is not private, and https, which let it use all cores"];
  }
  const threads = Math.min(MAX_THREADS, navigator.hardwareConcurrency);
  if (about.threads >= threads) return ["fewer other programs"];
  return [`${location.search ? "&" : "?"}threads=${threads} behind the address`];
}

function showAction(action, isPending) {
  $("hud-action").hidden = action === about.keyboard.idle;
  $("hud-action").textContent = action.replaceAll("_", " ") + (isPending ? " …" : "");
  $("hud-action").classList.toggle("pending", isPending);
}

function showReadings(header) {
  const ms = readings.frameMs;
  showPace();
  figure("ms", ms < 100 ? ms.toFixed(1) : ms.toFixed(0), " ms");
  $("steps").textContent = header.steps;
  const [median, tail] = [readings.latency(0.5), readings.latency(0.99)];
  if (median !== null) figure("latency", median.toFixed(0), ` ms p50, ${tail.toFixed(0)} p99`);
  if (header.input >= state.pressed) showAction(header.action, false);
}

function figure(id, number, unit) {
  const small = document.createElement("small");
  small.textContent = unit;
  $(id).replaceChildren(number, small);
}

function setState(name, message) {
  const words = {
    live: "live",
    new: "connecting",
    lost: "not connected",
    waiting: "waiting for a place",
    ended: "ended",
  };
  $("state").textContent = words[name];
  if (name !== "live") readings.forget();
  $("dot").className = `dot ${name === "live" ? "on" : "off"}`;
  const parts = document.querySelectorAll(".controls, .starts, .card");
  for (const part of parts) part.inert = name !== "live";
  $("curtain").hidden = name === "live";
  $("curtain-text").textContent = message;
  $("spinner").hidden = name === "ended";
  $("again").hidden = name !== "ended";
  $("keep-video").hidden = !state.recorded;
  $("keep-session").hidden = !about;
  if (name === "ended") $("again").focus();
  if (name !== "live" || state.followed) return;
  state.followed = true;
  load(dreamOfAddress(about));
}

function setPaused(paused) {
  state.paused = paused;
  $("pause").setAttribute("aria-pressed", paused);
  $("pause").textContent = paused ? "Resume" : "Pause";
  grid.pause(paused);
  readings.forget();
  showPace();
  connection.send({type: "pause", paused});
}

function adjust(changes) {
  Object.assign(controls, changes);
  connection.send({type: "adjust", ...controls});
  showControls();
}

/** What was asked for does not fit this world: its controls stay as they were. */
function kept(message) {
  controls = message.controls;
  showControls();
  toast(message.message, true);
}

function showControls() {
  for (const button of $("strategies").children) {
    button.setAttribute("aria-pressed", button.dataset.strategy === controls.strategy);
  }
  $("temperature").value = controls.temperature;
  $("temperature-value").textContent =
    controls.temperature ? controls.temperature.toFixed(2) : "0, greedy";
  $("top-p").value = controls.top_p;
  $("top-p").disabled = controls.temperature === 0;
  $("top-p-value").textContent = controls.top_p.toFixed(2);
  $("paced").value = controls.paced ? "on" : "";
}

function drawStrategies() {
  $("strategies").replaceChildren(...about.strategies.map(([strategy, steps]) => {
    const button = document.createElement("button");
    const small = document.createElement("small");
    small.textContent = steps === null ? "fewer steps" : `${steps} steps`;
    button.dataset.strategy = strategy;
    button.append(strategy, small);
    button.onclick = () => adjust({ strategy });
    return button;
  }));
}

const can = (ability) => connection.abilities.has(ability);

function drawScenes() {
  const scenes = about.scenes.map((name, index) => {
    const button = document.createElement("button");
    const image = new Image(), label = document.createElement("span");
    image.src = connection.picture(index);
    image.alt = "";
    label.textContent = `${index + 1} ${name}`;
    button.append(image, label);
    button.title = name;
    button.setAttribute("aria-label", `Start ${index + 1}: ${name}`);
    button.onclick = () => begin(index, newSeed());
    return button;
  });
  const upload = document.createElement("button");
  upload.className = "upload";
  upload.textContent = "your own";
  upload.onclick = () => $("upload-file").click();
  $("scenes").replaceChildren(...scenes, ...(can("upload") ? [upload] : []));
  showScene();
}

function showScene() {
  const shown = state.scene ?? about.scenes.length;
  for (const [index, button] of [...$("scenes").children].entries()) {
    button.setAttribute("aria-pressed", index === shown);
  }
}

function begin(scene, seed) {
  if (scene !== null) state.scene = scene;
  setPaused(false);
  showScene();
  connection.send({type: "begin", scene, seed});
}

const newSeed = () => Math.floor(Math.random() * 2 ** 20);
const restart = () => begin(null, askedSeed());

/** The seed in its field; what is none gives way to the last good one. */
function askedSeed() {
  const seed = $("seed").valueAsNumber;
  if (Number.isInteger(seed) && seed >= 0 && seed < about.max_seed) return seed;
  $("seed").value = state.seed;
  toast(`A seed is a whole number from 0 to ${about.max_seed - 1}.`, true);
  return state.seed;
}

function setRecording(on) {
  if (state.recording === on) return;
  if (!can("record")) return toast("This browser records no video.", true);
  state.recording = on;
  connection.send({type: "record", on});
  if (!on) download("video");
  showRecording(0);
}

function showRecording(count) {
  const seconds = (count / about.fps).toFixed(1);
  $("record").setAttribute("aria-pressed", state.recording);
  $("record-text").textContent = state.recording ? "Stop and download" : "Record";
  $("hud-recording").hidden = !state.recording;
  $("hud-recording").textContent = `REC ${seconds} s`;
  if (state.recording && count >= about.max_recorded) {
    setRecording(false);
    toast(`A recording holds ${about.max_recorded} frames: it is full.`);
  }
}

/** Do what may fail, which a toast says then. */
async function attempt(act) {
  try {
    return await act();
  } catch (error) {
    toast(`That did not work: ${error.message}.`, true);
    return null;
  }
}

async function download(what) {
  const kept = await attempt(() => connection.keep(what));
  if (!kept) return;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(kept.blob);
  link.download = kept.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

async function share() {
  const link = await attempt(async () => {
    const { blob } = await connection.keep("dream");
    return linkOf(JSON.parse(await blob.text()), about);
  });
  if (!link) return;
  history.replaceState(null, "", link);
  const copied = await navigator.clipboard?.writeText(link).then(() => true, () => false);
  if (copied)
    toast("A link to this dream is copied: it plays it again, frame for frame.");
  else
    toast("The address of this page is now a link to this dream.");
}

async function upload(file) {
  if (!file || !about) return; // dropped before there is a world
  if (file.size > about.max_upload_bytes) {
    const megabytes = about.max_upload_bytes / 2 ** 20;
    return toast(`That did not work: a file may have ${megabytes} MB, not more.`, true);
  }
  toast("Looking at the picture");
  const notes = await attempt(() => connection.start(file, newSeed()));
  if (!notes) return;
  state.scene = null;
  showScene();
  setPaused(false);
  toast(["The dream begins in your picture", ...notes].join("; ") + ".");
}

async function load(file) {
  if (!file) return;
  const begun = await attempt(() => connection.replay(file));
  if (!begun) return;
  const scene = about.scenes.indexOf(begun.scene);
  state.scene = scene < 0 ? null : scene;
  showScene();
  setPaused(document.hidden);
  toast(`Replaying ${begun.frames} frames`);
}

$("other-engine").hidden = isExported;
$("other-engine").href = isHere ? "." : "?engine=browser";
$("other-engine").textContent = isHere ? "let the server dream" : "dream in this browser";

let toastTimer = 0;
function toast(text, bad = false) {
  clearTimeout(toastTimer);
  $("toast").textContent = text;
  $("toast").classList.toggle("bad", bad);
  $("toast").hidden = false;
  toastTimer = setTimeout(() => { $("toast").hidden = true; }, bad ? 9000 : 5000);
}

const shortcuts = {
  p: () => setPaused(!state.paused),
  r: restart,
  v: () => setRecording(!state.recording),
  o: () => {
    const names = about.strategies.map(([strategy]) => strategy);
    adjust({ strategy: names[(names.indexOf(controls.strategy) + 1) % names.length] });
  },
};
addEventListener("keydown", (event) => {
  const isLatin = /^[a-z]$/i.test(event.key); // else Cyrillic, say
  const letter = isLatin ? event.key : event.code?.replace("Key", "") ?? "";
  const act = shortcuts[letter.toLowerCase()];
  const isModified = event.ctrlKey || event.metaKey || event.altKey;
  if (!act || !$("curtain").hidden || event.repeat || isModified) return;
  if (event.target.matches("input:not([type=range]), select")) return;
  if (keyboard.byKey?.has(event.code)) return;
  act();
});

$("pause").onclick = () => setPaused(!state.paused);
$("restart").onclick = restart;
$("record").onclick = () => setRecording(!state.recording);
$("save").onclick = () => download("dream");
$("share").onclick = share;
$("dice").onclick = () => begin(null, newSeed());
$("keep-video").onclick = () => {
  state.recording = false;
  download("video");
};
$("keep-session").onclick = () => download("dream");
$("again").onclick = () => {
  setState("new", "Connecting");
  connection.open();
  stage.canvas.focus();
};
$("temperature").oninput = (event) => adjust({temperature: Number(event.target.value)});
$("top-p").oninput = (event) => adjust({top_p: Number(event.target.value)});
$("paced").onchange = (event) => {
  adjust({ paced: event.target.value === "on" });
  event.target.blur();
};
$("seed").onchange = () => {
  const seed = askedSeed();
  $("seed").blur();
  if (seed !== state.seed) begin(null, seed);
};
$("load").onkeydown = (event) => {
  if (!["Enter", "Space"].includes(event.code)) return;
  event.preventDefault();
  $("load-file").click();
};
for (const [id, open] of [["load-file", load], ["upload-file", upload]]) {
  $(id).onchange = (event) => { open(event.target.files[0]); event.target.value = ""; };
}
for (const name of ["temperature", "top-p"]) {
  $(name).addEventListener("pointerup", (event) => event.target.blur());
}
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  upload(event.dataTransfer.files[0]);
});
$("full").hidden = !document.fullscreenEnabled;
$("full").onclick = () => {
  if (document.fullscreenElement) document.exitFullscreen();
  else $("play").requestFullscreen();
};
addEventListener("fullscreenchange", () => {
  const label = document.fullscreenElement ? "Leave full screen" : "Full screen";
  $("full").ariaLabel = $("full").title = label;
});
addEventListener("hashchange", () => location.reload()); // a link to a dream, pasted over this one
document.addEventListener("visibilitychange", () => {
  if (!document.hidden || !about) return;
  keyboard.release();
  setPaused(true);
});

const sized = new ResizeObserver(([{ contentRect }]) => {
  $("play").style.setProperty("--keys", `${contentRect.height}px`);
});
sized.observe($("controls"));
setInterval(showPace, 1000); // of frames that do not come, too

const spinner = $("spinner");
for (let row = 0; row < 3; row++) {
  for (let column = 0; column < 4; column++) {
    spinner.appendChild(document.createElement("i")).className = `d${row + column}`;
  }
}
setState("new", "Connecting");
