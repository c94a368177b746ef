// Submissions that must arrive once: the same key until there is an answer, however often that takes.
import { persistently, post } from "../api.js";

const WAITS = [300, 700, 1500, 3000, 5000, 8000, 10000];
const PASSING = new Set([429, 500, 502, 503, 504]);

/** A key that nobody else will make. (randomUUID wants HTTPS, which a team's own proxy may not have.) */
const freshKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");

/** POST with a key of its own, sent again while the studio is away or busy; `waiting(error)` is told of each further try. */
export function submit(path, content, waiting) {
  const body = { ...content, key: freshKey() };
  function passing(error) {
    const passes = error.status === undefined || PASSING.has(error.status);
    if (passes) waiting(error);
    return passes;
  }
  return persistently(() => post(path, body), WAITS, passing);
}
