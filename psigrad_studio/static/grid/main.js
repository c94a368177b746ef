// The grid page, which is drawn from one state after every change.
import { get, post } from "../api.js";
import { $, el, notice } from "../dom.js";
import { named, spoken } from "./board.js";
import { Chart } from "./chart.js";
import { inspection } from "./inspect.js";
import { Panel } from "./panel.js";
import { History, initial, MOST_PANELS, read, written } from "./state.js";
import { bounded, copy, paced, say } from "./tools.js";
import { LARGEST, LAYOUTS, World } from "./world.js";

const SLIDERS = ["discount", "slip", "cost", "exploration", "stepSize"];
const COUNTS = ["sweeps", "episodes", "seed"];
const END = 10_000;
const still = matchMedia("(prefers-reduced-motion: reduce)");
const algorithms = new Map((await get("/api/grid/algorithms")).map((a) => [a.name, a]));

let state = initial(), world = World.parse(state.map), panels = [];
let carried = null, active = 0, timer = null, sliding = false, dragging = false, asking = null, answer = null;
const history_ = new History();
const chart = new Chart((step) => go(step));
$("chart").append(chart.node, chart.legend);

// ---- the state

const settings = () => ({ discount: state.discount, slip: state.slip, cost: state.cost });
const form = () => ({
  world: world.form(settings()),
  options: { sweeps: state.sweeps, exploration: state.exploration, step_size: state.stepSize, episodes: state.episodes, seed: state.seed, evaluated: state.evaluated },
});
const last = () => Math.max(0, ...panels.map((panel) => panel.playback.length - 1));
const awaiting = () => panels.some((panel) => panel.playback.awaited);
const planners = () => panels.filter((panel) => panel.family === "planning");
const finished = (those = panels) => those.every(({ playback }) => playback.failure !== null || (playback.ended && state.at >= playback.last));
const warmth = () => panels.map((panel) => {
  const frame = panel.playback?.at(state.at) ?? null;
  return frame === null || frame.index === 0 && panel.warm === null ? panel.warm : { value: frame.value, q: frame.q };
});
const moment = () => ({ state: structuredClone(state), warm: panels.map((panel) => panel.warm) });

/** Adopt a state: create the panels of its algorithms, and start a playback for each, from the values in `warm` if given. */
function adopt(next, warm = []) {
  const same = panels.length === next.run.length && panels.every((panel, index) => panel.algorithm === next.run[index]);
  state = next;
  world = World.parse(state.map);
  if (!same) {
    panels.forEach((panel) => panel.playback?.stop());
    panels = state.run.map((name, index) => new Panel(index, name, algorithms, told(index)));
    $("compare").disabled = panels.length === MOST_PANELS;
    $("panels").replaceChildren(...panels.map((panel) => panel.node));
    $("panels").dataset.count = panels.length;
    active = Math.min(active, panels.length - 1);
  }
  panels.forEach((panel, index) => panel.start(form(), warm[index] ?? null));
  panels.forEach((panel) => panel.playback.ensure(state.at));
  draw();
}

/** Make a change that can be undone. The playbacks continue from the values on the grid, and play until the solvers are done. */
function change(changes, { cold = false, remembered = true } = {}) {
  if (remembered) history_.push(moment());
  carried = null;
  adopt({ ...state, ...changes, at: 0 }, cold ? [] : warmth());
  if (cold || planners().length === 0) return;
  if (still.matches) arriveAtOnce();
  else play(planners);
}

/** Show the last frame at once, for users who prefer reduced motion. */
async function arriveAtOnce() {
  const playbacks = planners().map((panel) => panel.playback);
  await Promise.all(playbacks.map((playback) => playback.ensure(END)));
  if (playbacks.every((playback) => panels.some((panel) => panel.playback === playback))) go(Math.max(...playbacks.map((playback) => playback.last)));
}

/** Show another step when it is loaded, unless the playbacks have been replaced by then. */
async function go(step) {
  stop();
  const playbacks = panels.map((panel) => panel.playback);
  await Promise.all(playbacks.map((playback) => playback.ensure(Math.max(0, step))));
  if (!playbacks.every((playback, index) => playback === panels[index]?.playback)) return;
  state.at = Math.max(0, Math.min(step, last()));
  draw();
}

/** Play until all panels, or those of `which`, are done. */
function play(which = () => panels) {
  if (timer !== null) return;
  const tick = async () => {
    if (finished(which())) {
      stop();
      draw();
      return;
    }
    const playbacks = panels.map((panel) => panel.playback);
    await Promise.all(playbacks.map((playback) => playback.ensure(state.at + 1)));
    if (timer === null) return;
    if (playbacks.every((playback, index) => playback === panels[index]?.playback)) state.at = Math.min(state.at + 1, last());
    draw();
    timer = setTimeout(tick, 1000 / Number($("speed").value));
  };
  timer = setTimeout(tick, 0);
  draw();
}

function stop() {
  clearTimeout(timer);
  timer = null;
}

async function playOrStop() {
  if (timer !== null) {
    stop();
    draw();
    return;
  }
  if (finished()) await go(0);
  play();
}

const plays = {
  play: playOrStop,
  forward: () => go(Math.min(state.at, last()) + 1),
  back: () => go(Math.min(state.at, last()) - 1),
  reset: () => {
    stop();
    adopt({ ...state, at: 0 });
  },
  end: () => go(END),
};

// ---- callbacks of the boards

const told = (index) => ({
  world: () => world,
  carried: () => carried,
  select: (cell) => {
    if (state.cell?.join() === cell.join() && active === index) return;
    state.cell = cell;
    active = index;
    answer = null;
    draw();
  },
  pick: (cell) => {
    carried = cell;
    active = index;
    state.cell = cell;
    draw();
    say(`${named(world.at(...cell))} picked up from ${spoken(cell)}; choose a free cell.`);
  },
  drop: (cell) => {
    const from = carried, piece = named(world.at(...from));
    if (from.join() === cell.join()) {
      carried = null;
      draw();
      say(`${piece} stays at ${spoken(cell)}.`);
    } else if (world.at(...cell).kind !== "free") {
      notice("This cell is taken; choose a free one.");
      say("This cell is taken; choose a free one.");
    } else {
      state.cell = cell;
      change({ map: String(world.moved(from, cell)), cell });
      say(`${piece} put down at ${spoken(cell)}; solving again.`);
    }
  },
  cancel: () => {
    carried = null;
    draw();
    say("Cancelled.");
  },
  drag: (from, to, last = false) => {
    if (awaiting() && !last) return false;
    change({ map: String(world.moved(from, to)), cell: to }, { remembered: !dragging });
    dragging = true;
    return true;
  },
  dropped: () => {
    dragging = false;
    draw();
  },
  edit: (cell, what) => edit(cell, what),
  play: (what) => plays[what](),
  loaded: () => draw(),
  replace: (name) => {
    const cold = panels.some((panel) => panel.warm !== null);
    history_.push(moment());
    stop();
    adopt({ ...state, run: state.run.map((old, i) => (i === index ? name : old)), at: cold ? 0 : state.at });
    panels[index].select.focus();
  },
  remove: () => {
    history_.push(moment());
    const warm = panels.map((panel) => panel.warm).filter((_, i) => i !== index);
    adopt({ ...state, run: state.run.filter((_, i) => i !== index) }, warm);
    panels[0].select.focus();
  },
});

function addPanel() {
  const unused = ["policy_iteration", "q_learning", "value_iteration", "sarsa"].find((name) => !state.run.includes(name)) ?? "td";
  const cold = panels.some((panel) => panel.warm !== null);
  history_.push(moment());
  stop();
  adopt({ ...state, run: [...state.run, unused], at: cold ? 0 : state.at });
  panels.at(-1).select.focus();
}

function edit(cell, what) {
  const piece = { treasure: { kind: "prize", worth: 1 }, trap: { kind: "prize", worth: -1 }, wall: { kind: "wall" }, start: { kind: "start" }, clear: { kind: "free" } }[what];
  const next = world.with(...cell, piece);
  if (String(next) === state.map) return;
  change({ map: String(next), cell });
  say(`${spoken(cell)}: ${named(piece)}.`);
}

// ---- drawing

function draw() {
  const at = Math.min(state.at, last());
  const targets = panels.flatMap((panel) => panel.playback.target.map(Math.abs));
  const scale = Math.max(1e-9, ...targets) > 1e-9 ? Math.max(...targets) : 1;
  panels.forEach((panel, index) => {
    panel.draw(world, state.at, scale, { cell: state.cell, carried, here: index === active }, panels.length === 1);
  });
  chart.draw(panels.map((panel, index) => ({ title: panel.title, frames: panel.playback.frames, endless: panel.family !== "planning", at, colour: index })), at);
  drawTransport(at);
  drawSettings();
  drawCell();
  const whole = panels.some((panel) => panel.warm !== null) && finished() ? END : state.at;
  const fragment = written({ ...state, at: whole });
  if (!dragging && timer === null && fragment !== location.hash.slice(1)) {
    history.replaceState(null, "", fragment === "" ? location.pathname : `#${fragment}`);
  }
}

function drawTransport(at) {
  $("scrub").max = last();
  $("scrub").value = at;
  $("scrub").setAttribute("aria-valuetext", `step ${at} of ${last()}`);
  $("step").textContent = `${at} / ${last()}`;
  $("back").disabled = at === 0;
  $("forward").disabled = $("end").disabled = finished();
  $("play").setAttribute("aria-label", timer === null ? "Play" : "Pause");
  $("play-shape").setAttribute("d", timer === null ? "M5 3.5v13l11-6.5z" : "M4.500 4h4v12h-4zM11.500 4h4v12h-4z");
  if (timer === null) say(panels.map((panel) => `${panel.title}: ${panel.caption.textContent || panel.failure.textContent}`).join(". "), true);
}

function drawSettings() {
  for (const name of SLIDERS) {
    if (document.activeElement !== $(name) || !sliding) $(name).value = state[name];
    document.querySelector(`output[for="${name}"]`).textContent = state[name].toFixed(2);
  }
  for (const name of [...COUNTS, "rows", "columns"]) {
    const value = name in state ? state[name] : world[name];
    if (document.activeElement !== $(name)) $(name).value = value;
  }
  $("evaluated").value = state.evaluated;
  $("layout").value = LAYOUTS.some(([, map]) => map === state.map) ? state.map : "";
  const families = new Set(panels.map((panel) => panel.family));
  const learns = families.has("prediction") || families.has("control");
  const uses = {
    control: families.has("control"),
    prediction: families.has("prediction"),
    learner: learns,
    step: state.run.some((name) => ["td", "sarsa", "expected_sarsa", "q_learning"].includes(name)),
    sweeps: state.run.includes("modified_policy_iteration"),
  };
  $("learning").querySelectorAll("[data-for]").forEach((node) => { node.hidden = !uses[node.dataset.for]; });
  $("learning").hidden = !learns && !uses.sweeps;
  $("undo").disabled = history_.past.length === 0;
  $("redo").disabled = history_.future.length === 0;
}

async function drawCell() {
  $("pieces").hidden = state.cell === null;
  if (state.cell === null) {
    show([el("p", { class: "soft" }, "Choose a cell to see its backup in numbers.")]);
    return;
  }
  const piece = world.at(...state.cell), panel = panels[active];
  $("worth-field").hidden = piece.kind !== "prize";
  if (document.activeElement !== $("worth")) $("worth").value = piece.worth ?? "";
  const frame = panel.playback.at(state.at);
  const wanted = frame === null ? null : { ...panel.playback.request, frame: frame.index, cell: state.cell };
  const held = carried?.join() === state.cell.join(), name = JSON.stringify([wanted, held]);
  if (answer?.name === name || (answer === null && asking === name && wanted !== null)) return;
  if (answer === null) show(inspection(state.cell, piece, held, panel.family, panel.algorithm, null));
  if (wanted === null || asking !== null) return;
  asking = name;
  const [place, family, algorithm] = [state.cell, panel.family, panel.algorithm];
  try {
    const said = await post("/api/grid/backup", wanted);
    answer = { name };
    if (state.cell?.join() === place.join()) show(inspection(place, world.at(...place), held, family, algorithm, said));
  } catch (error) {
    answer = { name };
    show([el("p", { class: "failure" }, error.message)]);
  } finally {
    asking = null;
    setTimeout(drawCell, timer === null ? 0 : 150);
  }
}

const show = (nodes) => $("cell").replaceChildren(...nodes);

// ---- controls

for (const name of Object.keys(plays)) $(name)?.addEventListener("click", plays[name]);
$("scrub").addEventListener("input", () => go(Number($("scrub").value)));
for (const name of SLIDERS) {
  const slide = paced(awaiting, () => {
    change({ [name]: Number($(name).value) }, { remembered: !sliding });
    sliding = true;
  });
  $(name).addEventListener("input", slide);
  $(name).addEventListener("change", () => {
    slide.now();
    sliding = false;
  });
}
for (const name of COUNTS) {
  $(name).addEventListener("change", () => bounded($(name), draw, (value) => change({ [name]: value, at: 0 }, { cold: true })));
}
for (const name of ["rows", "columns"]) {
  $(name).addEventListener("change", () => bounded($(name), draw, () => {
    const size = ["rows", "columns"].map((side) => Math.min(LARGEST, Math.max(1, Number($(side).value) || world[side])));
    change({ map: String(world.resized(...size)), cell: null }, { cold: true });
  }));
}
$("evaluated").addEventListener("change", () => change({ evaluated: $("evaluated").value }, { cold: true }));
$("layout").append(el("option", { value: "" }, "Custom"), ...LAYOUTS.map(([title, map]) => el("option", { value: map }, title)));
$("layout").addEventListener("change", () => {
  if ($("layout").value !== "") change({ map: $("layout").value, cell: null }, { cold: true });
});
$("measure").addEventListener("change", () => {
  chart.field = $("measure").value;
  draw();
});
$("pieces").addEventListener("click", (event) => {
  const what = event.target.dataset.piece;
  if (what !== undefined && state.cell !== null) edit(state.cell, what);
});
$("worth").addEventListener("change", () => bounded($("worth"), draw, (worth) => {
  if (worth !== 0) change({ map: String(world.with(...state.cell, { kind: "prize", worth: Number(worth.toFixed(4)) })) });
}));
$("compare").addEventListener("click", addPanel);
$("undo").addEventListener("click", () => turn("undo"));
$("redo").addEventListener("click", () => turn("redo"));
$("copy-link").addEventListener("click", () => copy(location.href, "The link"));
$("copy-map").addEventListener("click", () => copy(panels[0].playback.map, "The map"));
document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLInputElement && event.target.type !== "range";
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z" && !typing) {
    event.preventDefault();
    turn(event.shiftKey ? "redo" : "undo");
  }
});
window.addEventListener("hashchange", () => {
  history_.push(moment());
  arrive();
});

function turn(which) {
  const there = history_.turn(which, moment());
  if (there === undefined) return;
  stop();
  carried = null;
  adopt(there.state, there.warm);
  say(which === "undo" ? "Undone." : "Redone.");
}

function arrive() {
  const { state: there, complaints } = read(location.hash, algorithms);
  stop();
  carried = null;
  adopt(there);
  if (complaints.length > 0) notice(complaints.join(" "), 12);
}

arrive();
// without settings in the address, play an introduction: values that spread from the treasure
if (location.hash === "") {
  if (still.matches) arriveAtOnce();
  else play(planners);
}
document.documentElement.dataset.ready = "true";
