// Keys and touch buttons to the model's actions. What is pressed longest ago gives way first.

const PLACES = {
  forward: "forward",
  up: "forward",
  left: "left",
  turn_left: "left",
  back: "back",
  backward: "back",
  down: "back",
  right: "right",
  turn_right: "right",
};

export class Keyboard {
  /** changed(action, isPress): something else is pressed */
  constructor(pad, words, changed) {
    Object.assign(this, {pad, words, changed, held: [], action: null, buttons: new Map()});
    addEventListener("keydown", (event) => this.#key(event, true));
    addEventListener("keyup", (event) => this.#key(event, false));
    addEventListener("blur", () => this.release());
  }

  /** layout: a `Keyboard` (messages.py) */
  use(layout) {
    this.layout = layout;
    this.byKey = new Map();
    for (const [word, keys] of Object.entries(layout.keys))
      for (const key of keys) this.byKey.set(key, word);
    this.joined = new Map(layout.joined.map((name) => [name.split("+").sort().join("+"), name]));
    this.held = [];
    this.action = layout.idle;
    this.#draw();
    const mapped = navigator.keyboard?.getLayoutMap?.(); // may be forbidden
    mapped?.then((map) => this.#label(map), () => {});
  }

  /** Letters stand elsewhere on other keyboards, such as the French one. */
  #label(map) {
    for (const [word, button] of this.buttons) {
      const cap = (key) =>
        (key.startsWith("Key") && map.get(key)?.toUpperCase()) || this.layout.labels[key];
      button.firstElementChild.textContent = this.layout.keys[word].map(cap).join(" ") || "·";
    }
  }

  /** Let go of everything. */
  release() {
    this.held = [];
    this.#settle();
  }

  #draw() {
    this.buttons.clear();
    this.pad.replaceChildren();
    this.words.replaceChildren();
    for (const word of Object.keys(this.layout.keys)) {
      const button = document.createElement("button");
      button.className = "key";
      button.type = "button";
      button.setAttribute("aria-pressed", "false");
      const cap = document.createElement("kbd");
      const name = document.createElement("small");
      name.textContent = word.replaceAll("_", " ");
      button.append(cap, name);
      const place = PLACES[word];
      if (place) button.classList.add(place);
      (place ? this.pad : this.words).append(button);
      const press = (event) => {
        event.preventDefault();
        this.press(word, true);
      };
      const release = () => this.press(word, false);
      button.addEventListener("pointerdown", (event) => {
        button.setPointerCapture(event.pointerId);
        press(event);
      });
      for (const name of ["pointerup", "pointercancel", "lostpointercapture", "blur"]) {
        button.addEventListener(name, release);
      }
      button.addEventListener("contextmenu", (event) => event.preventDefault());
      // Enter and space on a focused button press it for as long as they are down
      const isForButton = (event) => ["Enter", "Space"].includes(event.code);
      button.addEventListener("keydown", (event) => {
        if (!isForButton(event)) return;
        event.stopPropagation();
        press(event);
      });
      button.addEventListener("keyup", (event) => {
        if (isForButton(event)) release();
      });
      this.buttons.set(word, button);
    }
    this.pad.hidden = !this.pad.children.length;
    this.words.hidden = !this.words.children.length;
    this.#label(new Map());
  }

  #key(event, down) {
    const word = this.byKey?.get(event.code);
    if (!word || (down && (event.ctrlKey || event.metaKey || event.altKey))) return;
    const inField = event.target.matches?.("input, select, textarea");
    if (down && inField && !(event.target.type === "range" && event.code.startsWith("Key"))) return;
    if (down && event.code === "Space" && event.target.matches?.("button, [role=button]")) return;
    if (down) event.preventDefault();
    if (!event.repeat) this.press(word, down);
  }

  /** What walks, by its direction, and all other words. */
  get groups() {
    const words = [...this.buttons.keys()];
    const walking = words.filter((word) => PLACES[word]);
    const walks = Object.fromEntries(walking.map((word) => [PLACES[word], word]));
    return {walks, others: words.filter((word) => !PLACES[word])};
  }

  press(word, down) {
    this.held = this.held.filter((other) => other !== word);
    if (down) this.held.push(word);
    this.#settle();
  }

  #settle() {
    if (!this.layout) return;
    const action = this.#actionOf(this.held);
    for (const [word, button] of this.buttons) {
      button.setAttribute("aria-pressed", this.held.includes(word));
    }
    if (action === this.action) return;
    this.action = action;
    this.changed(action, action !== this.layout.idle);
  }

  #actionOf(held) {
    for (let start = 0; start < held.length; start++) {
      const words = held.slice(start);
      if (words.length === 1) return words[0];
      const name = this.joined.get([...words].sort().join("+"));
      if (name) return name;
      if (this.layout.combines) return words.join("+");
    }
    return this.layout.idle;
  }
}
