// Small helpers of the controls.
import { $, notice } from "../dom.js";

let pending;

/** To whoever listens instead of looking; `late` waits until things have settled. */
export function say(text, late = false) {
  const box = $("status");
  clearTimeout(pending);
  const speak = () => { if (box.textContent !== text) box.textContent = text; };
  if (late) pending = setTimeout(speak, 600);
  else speak();
}

/** `use` at most every 60 ms and not while `awaiting()`; the last call is never lost, and `now` does not wait. */
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

/** The number in a field, brought inside its bounds and used; what is no number is put back. */
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

/** Text into the clipboard, or onto the page where the browser keeps it closed. */
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    notice(`${what} is in the clipboard.`);
  } catch {
    notice(`The browser does not allow copying. ${what}: ${text}`, 20);
  }
}
