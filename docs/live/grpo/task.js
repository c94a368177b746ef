// The task: six digits in, the same digits in rising order out. "382910>" is to be answered by "012389.".
import { FOR, stream, uniform } from "./random.js";

const DIGITS = 6, ARROW = 10, SIGNS = "0123456789>.";
export const END = 11;
export const LONGEST = 10;
export const PROMPT = DIGITS + 1;

export const written = (tokens) => Array.from(tokens, (token) => SIGNS[token]).join("");
const digits = (number) => Array.from(String(number).padStart(DIGITS, "0"), Number);

/** One number in twenty is kept for the exam. */
const isHeldOut = (number) => Math.imul(number, 2654435761) >>> 0 < 2 ** 32 / 20;

/** The index-th prompt of a purpose, of the numbers that are held out or of the others. */
export function prompt(seed, purpose, index, heldOut = false) {
  const from = stream(seed, purpose, index);
  for (let counter = 0; ; counter++) {
    const number = Math.floor(uniform(from, counter) * 10 ** DIGITS);
    if (isHeldOut(number) === heldOut) return [...digits(number), ARROW];
  }
}

/** The right answer. */
export const answer = (asked) => [...asked.slice(0, DIGITS).sort((a, b) => a - b), END];

/** An answer as a careless person gives it: in `wrong` of the cases two neighbours stand the wrong way round. */
export function demonstrated(seed, index, asked, wrong) {
  const shown = answer(asked), care = stream(seed, FOR.care, index);
  const places = shown.slice(0, DIGITS - 1).map((_, i) => i).filter((i) => shown[i] !== shown[i + 1]);
  if (places.length && uniform(care, 0) < wrong) {
    const at = places[Math.floor(uniform(care, 1) * places.length)];
    [shown[at], shown[at + 1]] = [shown[at + 1], shown[at]];
  }
  return shown;
}

export const isRight = (asked, given) => written(given) === written(answer(asked));

/** What a completion (without its prompt) earns, by the name of the reward. */
export const REWARDS = {
  right: (asked, given) => (isRight(asked, given) ? 1 : 0),
  places: (asked, given) => answer(asked).filter((token, i) => token === given[i]).length / (DIGITS + 1),
  // flawed: nobody looks at the question, and who writes more earns more
  rising: (_, given) => given.filter((token, i) => i > 0 && token < ARROW && given[i - 1] <= token).length / (LONGEST - 1),
};
