// The world of the first page: a click puts it in place of its picture.
document.addEventListener("click", (event) => {
  const { world } = event.target.dataset ?? {};
  if (!world) return;
  const frame = document.createElement("iframe");
  frame.src = world;
  frame.title = "A world to walk in";
  frame.allow = "gamepad; fullscreen; cross-origin-isolated";
  event.target.closest(".world").querySelector("img").replaceWith(frame);
  event.target.remove();
  frame.addEventListener("load", () => frame.focus());
});
