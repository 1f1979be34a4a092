// The rater's page: two videos in step, one question at a time, answered by key or button.
"use strict";

const KEYS = {
  1: "left",
  2: "tie",
  3: "right",
  ArrowLeft: "left",
  ArrowDown: "tie",
  ArrowRight: "right",
};
const ARROWS = {
  none: "·",
  forward: "↑",
  back: "↓",
  backward: "↓",
  left: "←",
  right: "→",
  "forward+left": "↖",
  "forward+right": "↗",
  "back+left": "↙",
  "back+right": "↘",
};
const PAUSE_AT_END_MS = 350;

const element = (id) => document.getElementById(id);
const videos = [element("left"), element("right")];
let study = null; // what /api/study said; a cookie says who asks
let place = 0; // which question: trial * questions + question
let saving = false;
let shown = -1; // trial whose videos are on stage
let ready = false; // its videos can be seen
let paused = false;
let rewinding = false;
const loading = new Map(); // trial -> promise of two object URLs

function fail(words) {
  element("error").textContent = words;
  element("error").hidden = !words;
}

async function ask(path, message) {
  const options = message && {
    method: "POST",
    headers: {"content-type": "application/json"},
    body: JSON.stringify(message),
  };
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer. Try again in a moment.");
  }
  if (!response.ok) {
    const words = await response.json().then((body) => body.detail, () => response.statusText);
    throw new Error(words);
  }
  return response;
}

function show(name) {
  for (const id of ["welcome", "trial", "done"]) element(id).hidden = id !== name;
  element("progress").hidden = name === "welcome";
  if (name === "welcome") element("name").focus();
  if (name === "done") element("done").querySelector("h1").focus();
}

async function open() {
  try {
    study = await (await ask("api/study")).json();
  } catch (error) {
    show("welcome");
    return fail(error.message);
  }
  fail("");
  if (!study) return show("welcome");
  const next = questions().findIndex(({trial, key}) => !trial.answers[key]);
  await visit(next < 0 ? questions().length : next);
}

function questions() {
  const of = (trial, number) => study.questions.map((one) => ({trial, number, ...one}));
  return study.trials.flatMap(of);
}

async function visit(index) {
  place = index;
  const all = questions();
  const answered = all.filter(({trial, key}) => trial.answers[key]).length;
  element("progress").max = all.length;
  element("progress").value = answered;
  if (place >= all.length) {
    stop();
    element("summary").textContent = `All ${answered} answers are saved.`;
    return show("done");
  }
  const {trial, number, key, text, hint} = all[place];
  const nth = place % study.questions.length + 1;
  element("step").textContent = `Pair ${number + 1} of ${study.trials.length}` +
    (study.questions.length > 1 ? `, question ${nth} of ${study.questions.length}` : "");
  element("question").textContent = text;
  element("hint").textContent = hint;
  element("back").disabled = place === 0;
  for (const button of element("answers").children) {
    button.setAttribute("aria-pressed", String(trial.answers[key] === button.dataset.choice));
  }
  show("trial");
  if (shown !== number) await stage(number);
}

// ---- videos ----

function load(number) {
  if (!loading.has(number)) {
    const {left, right} = study.trials[number];
    const coming = Promise.all([left, right].map(async (id) => (await ask(`media/${id}`)).blob()));
    const promise = coming.then((blobs) => blobs.map((blob) => URL.createObjectURL(blob)));
    promise.catch(() => loading.delete(number)); // so that it is tried again
    loading.set(number, promise);
  }
  return loading.get(number);
}

function event(video, name) {
  return new Promise((resolve, reject) => {
    const listening = new AbortController();
    const settle = (end, value) => () => { listening.abort(); end(value); };
    const broken = new Error("This browser cannot play the video.");
    video.addEventListener(name, settle(resolve), { signal: listening.signal });
    video.addEventListener("error", settle(reject, broken), { signal: listening.signal });
  });
}

async function stage(number) {
  stop();
  shown = number;
  element("stage").setAttribute("aria-busy", "true");
  setAnswerable();
  drawActions(study.trials[number].actions);
  try {
    const urls = await load(number);
    if (shown !== number) return;
    await Promise.all(videos.map((video, side) => {
      const loaded = event(video, "loadeddata");
      video.src = urls[side];
      return loaded;
    }));
  } catch (error) {
    if (shown !== number) return;
    shown = -1;
    return fail(`${error.message} “From the start” tries again.`);
  }
  if (shown !== number) return;
  fail("");
  ready = true;
  element("stage").setAttribute("aria-busy", "false");
  setAnswerable();
  setPaused(false);
  // reported when it is staged
  if (number + 1 < study.trials.length) load(number + 1).catch(() => {});
  for (const [old, urls] of loading) {
    if (Math.abs(old - number) < 2) continue;
    loading.delete(old);
    urls.then((both) => both.forEach((url) => URL.revokeObjectURL(url)), () => {});
  }
}

function stop() {
  shown = -1;
  ready = rewinding = false;
  videos.forEach((video) => video.pause());
}

function play() {
  videos.forEach((video) => video.play().catch(() => {})); // pausing while it starts is no error
}

async function rewind() {
  if (rewinding) return;
  rewinding = true;
  const number = shown;
  videos.forEach((video) => video.pause());
  await Promise.all(videos.map((video) => {
    const arrived = event(video, "seeked").catch(() => {});
    video.currentTime = 0;
    return arrived;
  }));
  if (shown !== number) return;
  rewinding = false;
  if (ready && !paused) play();
}

function setPaused(value) {
  paused = value;
  element("pause").firstElementChild.textContent = paused ? "Play" : "Pause";
  if (paused)
    videos.forEach((video) => video.pause());
  else if (videos.every((video) => video.ended))
    rewind();
  else
    play();
}

function replay() {
  if (!study || element("trial").hidden) return;
  if (shown < 0) return void stage(Math.floor(place / study.questions.length));
  if (!ready) return;
  setPaused(false);
  rewind();
}

for (const video of videos) {
  video.addEventListener("ended", () => {
    const number = shown;
    if (!videos.every((other) => other.ended)) return; // the loop starts when both are through
    setTimeout(() => {
      if (shown === number && !paused && videos.every((other) => other.ended)) rewind();
    }, PAUSE_AT_END_MS);
  });
}

function follow() {
  const [left, right] = videos;
  if (ready && left.duration) {
    const apart = Math.abs(left.currentTime - right.currentTime);
    const areRunning = !paused && !rewinding && !left.ended && !right.ended;
    if (areRunning && apart > 0.1) right.currentTime = left.currentTime;
    markAction(left.currentTime / left.duration);
  }
  requestAnimationFrame(follow);
}

// ---- actions of the clip ----

function drawActions(actions) {
  const strip = element("actions");
  strip.hidden = !actions || study.questions.every(({key}) => key !== "controllability");
  strip.replaceChildren();
  if (strip.hidden) return;
  const bar = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const add = (name, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text) node.textContent = text;
    bar.append(node);
    return node;
  };
  bar.setAttribute("viewBox", "0 0 1000 56");
  bar.setAttribute("preserveAspectRatio", "none");
  bar.setAttribute("aria-hidden", "true");
  const wide = 1000 / actions.length;
  const labels = document.createElement("ol");
  for (let start = 0, end; start < actions.length; start = end) {
    for (end = start; end < actions.length && actions[end] === actions[start]; end++);
    const name = actions[start];
    add("rect", {
      x: start * wide + 1.5,
      width: (end - start) * wide - 3,
      y: 0,
      height: 56,
      rx: 4,
      "data-start": start,
      "data-end": end,
    });
    const label = document.createElement("li");
    label.textContent = ARROWS[name] || name.replaceAll("_", " ");
    label.title = name;
    label.setAttribute("aria-label", `${name}, ${end - start} frames`);
    label.style.flex = `${end - start} 1 0`;
    labels.append(label);
  }
  add("line", {id: "playhead", x1: 0, x2: 0, y1: 0, y2: 56});
  strip.append(bar, labels);
}

function markAction(share) {
  const head = element("playhead");
  if (!head) return;
  const frames = study.trials[shown].actions.length;
  const frame = Math.min(frames - 1, Math.floor(share * frames));
  head.setAttribute("x1", share * 1000);
  head.setAttribute("x2", share * 1000);
  const segments = element("actions").querySelectorAll("rect");
  const labels = element("actions").querySelectorAll("li");
  segments.forEach((segment, index) => {
    const now = segment.dataset.start <= frame && frame < segment.dataset.end;
    segment.classList.toggle("now", now);
    labels[index].classList.toggle("now", now);
  });
}

// ---- answers ----

function setAnswerable() {
  for (const button of element("answers").children) button.disabled = !ready || saving;
}

async function answer(choice) {
  if (!ready || saving || element("trial").hidden) return;
  const {trial, number, key} = questions()[place];
  saving = true;
  try {
    await ask("api/answers", {trial: number, question: key, choice});
  } catch (error) {
    return fail(`Not saved: ${error.message}`);
  } finally {
    saving = false;
  }
  fail("");
  trial.answers[key] = choice;
  await visit(place + 1);
}

function back() {
  if (!study || saving || place === 0 || !element("welcome").hidden) return;
  fail("");
  visit(place - 1);
}

element("welcome").addEventListener("submit", async (submitted) => {
  submitted.preventDefault();
  try {
    const known = await (await ask("api/study")).json(); // which may have failed before
    if (!known) await ask("api/raters", { name: element("name").value });
  } catch (error) {
    return fail(error.message);
  }
  await open();
});
for (const button of element("answers").children) {
  button.addEventListener("click", () => answer(button.dataset.choice));
}
element("back").addEventListener("click", back);
element("again").addEventListener("click", back);
element("pause").addEventListener("click", () => setPaused(!paused));
element("replay").addEventListener("click", replay);
document.addEventListener("keydown", (pressed) => {
  if (pressed.repeat || pressed.ctrlKey || pressed.metaKey || pressed.altKey) return;
  if (pressed.target instanceof HTMLInputElement) return;
  const choice = KEYS[pressed.key];
  const key = pressed.key.toLowerCase();
  if (choice && !element("trial").hidden) answer(choice);
  else if (key === "b" || key === "backspace") back();
  else if (key === "p" && ready) setPaused(!paused);
  else if (key === "r") replay();
  else return;
  pressed.preventDefault();
});

requestAnimationFrame(follow);
open();
