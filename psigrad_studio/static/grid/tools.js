// Helpers for the controls.
import { $, notice } from "../dom.js";

let pending;

/** Announce a text to screen readers; with `late`, only after a pause without further texts. */
export function say(text, late = false) {
  const box = $("status");
  clearTimeout(pending);
  const speak = () => { if (box.textContent !== text) box.textContent = text; };
  if (late) pending = setTimeout(speak, 600);
  else speak();
}

/** Return a function that calls `use` at most every 60 ms, and not while `awaiting()`. No last call is lost; `now` does not wait. */
export function paced(awaiting, use) {
  let waiting = null;
  const run = () => {
    clearTimeout(waiting);
    waiting = null;
    use();
  };
  const turn = () => {
    if (awaiting()) waiting = setTimeout(turn, 20);
    else run();
  };
  const call = () => { waiting ??= setTimeout(turn, 60); };
  call.now = () => { if (waiting !== null) run(); };
  return call;
}

/** Clamp the number in a field to its bounds and call `use` with it. If it is not a number, call `putBack`. */
export function bounded(field, putBack, use) {
  const value = Number(field.value);
  if (field.value.trim() === "" || !Number.isFinite(value)) {
    putBack();
    return;
  }
  const inside = Math.min(Number(field.max), Math.max(Number(field.min), value));
  field.value = inside;
  use(field.step === "0.1" ? inside : Math.round(inside));
}

/** Copy a text to the clipboard, or show it if the browser does not allow that. */
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    notice(`${what} is in the clipboard.`);
  } catch {
    notice(`The browser does not allow copying. ${what}: ${text}`, 20);
  }
}
