// Submissions that must be stored exactly once: all attempts of one submission send the same key.
import { persistently, post } from "../api.js";

const WAITS = [300, 700, 1500, 3000, 5000, 8000, 10000];
const PASSING = new Set([429, 500, 502, 503, 504]);

/** Return a unique key. (randomUUID needs HTTPS, which a team's proxy may lack.) */
const freshKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((b) => b.toString(16).padStart(2, "0")).join("");

/** POST with a new key, and repeat while the studio is unreachable or busy. `waiting(error)` is called before each repetition. */
export function submit(path, content, waiting) {
  const body = { ...content, key: freshKey() };
  function passing(error) {
    const passes = error.status === undefined || PASSING.has(error.status);
    if (passes) waiting(error);
    return passes;
  }
  return persistently(() => post(path, body), WAITS, passing);
}
