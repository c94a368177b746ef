// The live page of the documentation: prepared worlds, two algorithms side by side, one clock.
import { short, spoken } from "grid/board.js";
import { Chart } from "grid/chart.js";
import { Panel } from "grid/panel.js";
import { World } from "grid/world.js";
import { el, notice } from "dom.js";

const $ = (id) => document.getElementById(id);
const { worlds, algorithms: known } = window.psigradLive;
const algorithms = new Map(Object.entries(known)), prepared = new Map();
const still = matchMedia("(prefers-reduced-motion: reduce)");
const MOVES = ["up", "right", "down", "left"];

let name = worlds[0].name, run = ["value_iteration", "q_learning"], world, panels = [], at = 0, cell = null, active = 0, timer = null;
const chart = new Chart((step) => go(step));
$("chart").append(chart.node, chart.legend);

/** The frames of a world: a script of its own, since a page from a disk may fetch nothing else. */
function fetched(wanted) {
  return new Promise((done, failed) => {
    if (prepared.has(wanted)) return done();
    window.psigradWorld = (given, frames) => { prepared.set(given, frames); };
    document.head.append(el("script", { src: `worlds/${wanted}.js`, onload: done, onerror: () => failed(new Error(`worlds/${wanted}.js is missing.`)) }));
  });
}

async function show(wanted) {
  stop();
  try {
    await fetched(wanted);
  } catch (error) {
    return notice(error.message);
  }
  name = wanted;
  const { map, says } = worlds.find((each) => each.name === name);
  $("says").textContent = says;
  world = World.parse(map);
  [at, cell] = [0, null];
  panels = run.map((algorithm, index) => new Panel(index, algorithm, algorithms, told(index)));
  for (const panel of panels) panel.start({ prepared: prepared.get(name), options: { episodes: worlds.find((each) => each.name === name).episodes } }, null);
  $("panels").replaceChildren(...panels.map((panel) => panel.node));
  if (still.matches) go(Infinity);
  else play();
}

const last = () => Math.max(...panels.map((panel) => panel.playback.last));

function go(step) {
  stop();
  at = Math.max(0, Math.min(step, last()));
  draw();
}

function play() {
  if (at >= last()) at = 0;
  const tick = () => {
    at += 1;
    if (at >= last()) stop();
    draw();
    if (timer !== null) timer = setTimeout(tick, 1000 / Number($("speed").value));
  };
  timer = setTimeout(tick, 300);
  draw();
}

function stop() {
  clearTimeout(timer);
  timer = null;
}

const plays = {
  play: () => {
    if (timer === null) return play();
    stop();
    draw();
  },
  forward: () => go(at + 1),
  back: () => go(at - 1),
  reset: () => go(0),
  end: () => go(Infinity),
};

const told = (index) => ({
  world: () => world,
  carried: () => null,
  select: (place) => {
    [cell, active] = [place, index];
    draw();
  },
  pick: (place) => told(index).select(place),
  drop: () => {},
  cancel: () => {},
  drag: () => false,
  dropped: () => {},
  edit: () => notice("This page only shows. psigrad studio has the page where the world can be changed."),
  play: (what) => plays[what](),
  loaded: () => {},
  replace: (algorithm) => {
    run = run.map((old, i) => (i === index ? algorithm : old));
    const step = at;
    show(name).then(() => {
      go(step);
      panels[index].select.focus();
    });
  },
  remove: () => {},
});

function draw() {
  const frames = panels.map((panel) => panel.playback.at(at));
  const scale = Math.max(1e-9, ...panels.flatMap((panel) => panel.playback.frames.at(-1).value.map(Math.abs)));
  panels.forEach((panel, index) => panel.draw(world, at, scale, { cell, carried: null, here: index === active }, true));
  chart.draw(panels.map((panel, index) => ({ title: panel.title, frames: panel.playback.frames, endless: false, at, colour: index })), at);
  $("scrub").max = last();
  $("scrub").value = at;
  $("scrub").setAttribute("aria-valuetext", `step ${at} of ${last()}`);
  $("step").textContent = `${at} / ${last()}`;
  $("back").disabled = at === 0;
  $("forward").disabled = $("end").disabled = at >= last();
  $("play").setAttribute("aria-label", timer === null ? "Play" : "Pause");
  $("play-shape").setAttribute("d", timer === null ? "M5 3.5v13l11-6.5z" : "M4.500 4h4v12h-4zM11.500 4h4v12h-4z");
  if (timer === null) $("status").textContent = panels.map((panel) => `${panel.title}: ${panel.caption.textContent}`).join(". ");
  $("agree").textContent = agreement(...frames);
  if (cell === null) return;
  const state = cell[0] * world.columns + cell[1];
  const said = panels.map((panel, i) => {
    const actions = frames[i].actions[state], moves = MOVES.filter((_, action) => actions & (1 << action));
    return `${panel.title} ${short(frames[i].value[state], 4)}${actions === 15 ? "" : `, ${moves.join(" or ")}`}`;
  });
  $("cell").textContent = `${spoken(cell)[0].toUpperCase()}${spoken(cell).slice(1)}: ${said.join("; ")}; exact ${short(prepared.get(name).exact[state], 4)}.`;
}

/** In how many cells two policies have a best move in common. Where one of them has no preference they do not count as agreed. */
function agreement(one, other) {
  const asked = [...one.actions.keys()].filter((state) => one.actions[state] && other.actions[state] && one.actions[state] !== 15);
  const agreed = asked.filter((state) => other.actions[state] !== 15 && one.actions[state] & other.actions[state]);
  if (!asked.length) return "";
  return `Of the ${asked.length} cells in which ${panels[0].title} prefers a move, ${panels[1].title} has found a right one in ${agreed.length}.`;
}

for (const each of Object.keys(plays)) $(each).addEventListener("click", plays[each]);
$("scrub").addEventListener("input", () => go(Number($("scrub").value)));
$("world").append(...worlds.map(({ name: value, title }) => el("option", { value }, title)));
$("world").addEventListener("change", () => show($("world").value));
show(name).then(() => { document.documentElement.dataset.ready = "true"; });
