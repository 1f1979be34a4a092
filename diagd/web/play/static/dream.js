// A dream as it is saved (session.py) and as a link: where it begins, its seed, and what was chosen
// for each frame. A link has runs of equal choices, and the checksum of the last frame alone.

const FORMAT = "diagd-dream-2";
const MAX_FRAMES = 20000;
const MAX_LINK = 6000; // characters

/** A dream as a document: `frames` are {action, controls, checksum, engine}. */
export const dreamOf = (about, scene, seed, frames) =>
  ({format: FORMAT, model: about.model, seed, frames, scene: about.scenes[scene]});

/** Throw what is wrong with a dream that is to be played where only its own scenes can be. */
export function check(dream, {actions, strategies, scenes, max_seed, model}) {
  if (!Array.isArray(dream?.frames)) throw new Error("not a saved dream");
  const found = (value) => `'${String(value).slice(0, 40)}'`;
  if (dream.format !== FORMAT) {
    const got = `expected '${FORMAT}', got ${found(dream.format)} (of another version of diagd)`;
    throw new Error(`not a saved dream: format: ${got}`);
  }
  if (dream.start) {
    const needed = "which needs the model's encoder: diagd play has it";
    throw new Error(`this dream begins in a picture of one's own, ${needed}`);
  }
  if (dream.model !== model) {
    throw new Error(`a dream of the world ${found(dream.model)}, not of '${model}'`);
  }
  const isNumber = (value, low, high) => typeof value === "number" && value >= low && value <= high;
  const isGood = (frame) => {
    if (!frame) return false;
    const { action, controls, engine } = frame;
    if (![undefined, null, "webgpu"].includes(engine) || !actions.includes(action)) return false;
    if (!strategies.some(([name]) => name === controls?.strategy)) return false;
    return isNumber(controls.temperature, 0, 5) && isNumber(controls.top_p, 0.01, 1);
  };
  const hasSeed = Number.isInteger(dream.seed) && isNumber(dream.seed, 0, max_seed - 1);
  const isShort = dream.frames.length <= MAX_FRAMES;
  if (!hasSeed || !scenes.includes(dream.scene) || !isShort || !dream.frames.every(isGood)) {
    throw new Error("this dream asks for what this world does not have");
  }
}

/** The address of a page that plays a dream. */
export function linkOf({scene, seed, frames}, about) {
  if (!about.scenes.includes(scene)) {
    throw new Error("a dream that begins in a picture of your own has no link: save it");
  }
  const runs = [];
  for (const {action, controls: {strategy, temperature, top_p}, engine} of frames) {
    const known = about.actions.indexOf(action); // else it joins several words
    const choice =
      [known < 0 ? action : known, strategy, temperature, top_p, ...(engine ? [engine] : [])];
    if (runs.length && String(runs.at(-1).slice(1)) === String(choice))
      runs.at(-1)[0]++;
    else
      runs.push([1, ...choice]);
  }
  const dream = [about.scenes.indexOf(scene), seed, runs, frames.at(-1)?.checksum];
  const base64 = btoa(JSON.stringify(dream));
  const text = base64.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  if (text.length > MAX_LINK) throw new Error("the dream is too long for a link: save it");
  return `${location.href.split("#")[0]}#dream=${text}`;
}

/** The dream of the page's address as a file, or null. */
export function dreamOfAddress(about) {
  const text = /^#dream=([\w-]+)$/.exec(location.hash)?.[1];
  if (!text) return null;
  let dream = null;
  try {
    const base64 = text.replaceAll("-", "+").replaceAll("_", "/");
    const [scene, seed, runs, checksum] = JSON.parse(atob(base64));
    const frames = runs.flatMap(([count, action, strategy, temperature, top_p, engine]) => {
      const controls = { strategy, temperature, top_p };
      const frame = { action: about.actions[action] ?? action, controls, engine };
      return Array(Math.min(count, MAX_FRAMES)).fill(frame);
    });
    // of the last frame, which depends on all
    if (frames.length) frames.push({...frames.pop(), checksum});
    dream = dreamOf(about, scene, seed, frames);
  } catch {} // what is none is said by whoever reads it
  return new Blob([JSON.stringify(dream)]);
}
