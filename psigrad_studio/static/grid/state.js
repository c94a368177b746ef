// The state from which the page is drawn. The address stores it, and undo restores earlier ones.
import { DEFAULT, World } from "./world.js";

/** name in the address -> [name here, default, smallest, largest, true for whole numbers]; other numbers are clamped. */
const NUMBERS = {
  discount: ["discount", 0.9, 0, 1, false],
  slip: ["slip", 0, 0, 1, false],
  cost: ["cost", 0, 0, 1, false],
  sweeps: ["sweeps", 5, 0, 100, true],
  epsilon: ["exploration", 0.2, 0, 1, false],
  alpha: ["stepSize", 0.2, 0, 1, false],
  episodes: ["episodes", 10, 1, 100, true],
  seed: ["seed", 0, 0, 2 ** 31 - 1, true],
  at: ["at", 0, 0, 10_000, true],
};
export const MOST_PANELS = 4;
const MOST_MOMENTS = 200;

export const initial = () => ({
  map: DEFAULT,
  run: ["value_iteration"],
  evaluated: "random",
  cell: null,
  ...Object.fromEntries(Object.values(NUMBERS).map(([name, value]) => [name, value])),
});

/** Return the state as the fragment of an address, without values equal to the defaults. */
export function written(state) {
  const usual = initial(), parts = [];
  const put = (name, value) => parts.push(`${name}=${encodeURIComponent(value).replaceAll("%2F", "/").replaceAll("%2C", ",")}`);
  if (state.map !== usual.map) put("map", state.map);
  if (state.run.join() !== usual.run.join()) put("run", state.run.join());
  for (const [name, [field]] of Object.entries(NUMBERS)) {
    if (state[field] !== usual[field]) put(name, state[field]);
  }
  if (state.evaluated !== usual.evaluated) put("policy", state.evaluated);
  if (state.cell !== null) put("cell", state.cell.join());
  return parts.join("&");
}

/** Return the state in a fragment, and error messages for the parts that cannot be read. */
export function read(fragment, algorithms) {
  const state = initial(), complaints = [];
  for (const [name, value] of new URLSearchParams(fragment.replace(/^#/, ""))) {
    try {
      understand(state, name, value, algorithms);
    } catch (error) {
      complaints.push(error.message);
    }
  }
  const world = World.parse(state.map);
  if (state.cell !== null && (state.cell[0] >= world.rows || state.cell[1] >= world.columns)) state.cell = null;
  return { state, complaints };
}

function understand(state, name, value, algorithms) {
  if (Object.hasOwn(NUMBERS, name)) {
    const [field, , least, most, whole] = NUMBERS[name];
    const number = value.trim() === "" ? NaN : Number(value);
    if (!Number.isFinite(number)) throw new Error(`The address has ${name}=${value.slice(0, 20)}; expected a number.`);
    state[field] = Math.min(most, Math.max(least, whole ? Math.round(number) : number));
  } else if (name === "map") {
    state.map = String(World.parse(value));
  } else if (name === "run") {
    const known = value.split(",").filter((algorithm) => algorithms.has(algorithm)).slice(0, MOST_PANELS);
    if (known.length === 0) throw new Error(`The address has no known algorithm in run=${value.slice(0, 60)}.`);
    state.run = known;
  } else if (name === "policy") {
    if (value !== "random" && value !== "best") throw new Error(`The address has policy=${value.slice(0, 20)}; expected random or best.`);
    state.evaluated = value;
  } else if (name === "cell") {
    const numbers = value.split(",").map(Number);
    if (numbers.length !== 2 || !numbers.every((n) => Number.isInteger(n) && n >= 0)) throw new Error("The address has no valid cell; expected two whole numbers.");
    state.cell = numbers;
  } else {
    throw new Error(`The address has an unknown setting: ${name.slice(0, 20)}.`);
  }
}

/** The states for undo and redo, newest last. */
export class History {
  past = [];
  future = [];

  /** Store the state before a change. */
  push(moment) {
    this.past = [...this.past, moment].slice(-MOST_MOMENTS);
    this.future = [];
  }

  /** Return the previous ("undo") or next ("redo") state, and store `present` for the opposite direction. */
  turn(which, present) {
    const [from, to] = which === "undo" ? [this.past, this.future] : [this.future, this.past];
    const moment = from.pop();
    if (moment !== undefined) to.push(present);
    return moment;
  }
}
