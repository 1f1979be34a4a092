// A gamepad: its left stick and cross walk, its buttons do the rest.

const DEAD = 0.45; // of a stick
// button, axis, direction
const WALK = {
  forward: [12, 1, -1],
  back: [13, 1, 1],
  left: [14, 0, -1],
  right: [15, 0, 1],
};

/** Press and release the words of a keyboard (keyboard.js) for as long as a gamepad is there. */
export function useGamepad(keyboard) {
  let down = new Set(), watching = false;
  function look() {
    const pad = navigator.getGamepads().find(Boolean);
    const pressed = new Set(pad ? wordsOf(pad, keyboard) : []);
    for (const word of down)
      if (!pressed.has(word)) keyboard.press(word, false);
    for (const word of pressed)
      if (!down.has(word)) keyboard.press(word, true);
    down = pressed;
    watching = Boolean(pad);
    if (watching) requestAnimationFrame(look);
  }
  addEventListener("gamepadconnected", () => { if (!watching) look(); });
}

function wordsOf(pad, keyboard) {
  const isDown = (index) => pad.buttons[index]?.pressed;
  const {walks, others} = keyboard.groups;
  const isPushed = ([button, axis, sign]) => isDown(button) || pad.axes[axis] * sign > DEAD;
  const places = Object.keys(WALK).filter((place) => walks[place] && isPushed(WALK[place]));
  const other = others.filter((_, index) => isDown(index) || (index === 0 && isDown(7)));
  return [...places.map((place) => walks[place]), ...other];
}
