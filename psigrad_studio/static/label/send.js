// Submissions that must arrive once: the same key until there is an answer, however often that takes.
import { post } from "../api.js";

const WAITS = [300, 700, 1500, 3000, 5000, 8000, 10000];
const PASSING = new Set([429, 500, 502, 503, 504]);

/** A key that nobody else will make. (randomUUID wants HTTPS, which a team's own proxy may not have.) */
export function freshKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return [...bytes].map((b) => b.toString(16).padStart(2, "0")).join("");
}

/** POST with a key of its own, sent again while the studio is away or busy; `waiting(error)` is told of each further try. */
export async function submit(path, content, waiting) {
  const body = { ...content, key: freshKey() };
  for (let attempt = 0; ; attempt++) {
    try {
      return await post(path, body);
    } catch (error) {
      const passing = error.status === undefined || PASSING.has(error.status);
      if (!passing || attempt >= WAITS.length) throw error;
      waiting(error);
      await new Promise((resolve) => setTimeout(resolve, WAITS[attempt]));
    }
  }
}
