// The runs page: the selected runs, their tabs, and the address that stores both.
import { $, el, notice } from "../dom.js";
import { DASHES } from "../plot.js";
import { About } from "./about.js";
import { Alerts } from "./alerts.js";
import { Chart, COLOURS } from "./chart.js";
import { Runs } from "./data.js";
import { figure, whole } from "./format.js";
import { grouped, List, matches } from "./list.js";
import { Rollouts } from "./rollouts.js";
import { Table } from "./table.js";

const TABS = ["curves", "table", "rollouts", "about"];
/** The tabs that show only one of the chosen runs. */
const OF_ONE = ["rollouts", "about"];
const state = { runs: [], tab: "curves", axis: "step", smooth: 0, log: false, zoom: null, bands: true, which: "", n: null, watch: false, ready: false, waiting: false };
const NOTHING = "There are no runs here yet. Start one whose output_dir is in this folder, or start the studio with the folder " +
  "that holds your runs: psigrad studio RUNS_FOLDER.";
const data = new Runs(changed, (well) => { $("live").textContent = well && data.list.some((r) => state.runs.includes(r.id) && r.state === "running") ? "live" : ""; });
const list = new List($("runs"), pick);
const alerts = new Alerts($("alerts"), (run) => { state.which = run.id; state.tab = "about"; showTab(); });
const about = new About($("about"), (run, step, n) => openRollouts(run, step, n), (run, notes) => { Object.assign(data.run(run) ?? {}, notes); drawList(); });
const table = new Table($("table"), (id) => { pick([id], true, true); });
const rollouts = new Rollouts($("rollouts"), () => { state.n = rollouts.n; remember(); });
const charts = new Map();
let painting = 0;

// ---- the address

function remember() {
  const said = new URLSearchParams();
  if (state.runs.length) said.set("runs", state.runs.join("."));
  if (state.tab !== "curves") said.set("tab", state.tab);
  if (state.axis !== "step") said.set("axis", state.axis);
  if (state.smooth > 0) said.set("smooth", String(state.smooth));
  if (state.log) said.set("log", "1");
  if (state.zoom) said.set("zoom", state.zoom.map((x) => Number(x.toPrecision(6))).join("_"));
  if (!state.bands) said.set("bands", "0");
  if (OF_ONE.includes(state.tab) && state.runs.length > 1) said.set("of", state.which);
  if (state.tab === "rollouts") {
    for (const [name, value] of Object.entries(rollouts.wanted)) if (value && value !== "newest") said.set(name, String(value));
    if (state.n !== null) said.set("n", String(state.n));
  }
  const text = `#${said}`;
  if (text !== location.hash && (text !== "#" || location.hash)) history.replaceState(null, "", text);
}

function recall() {
  const said = new URLSearchParams(location.hash.slice(1));
  state.runs = (said.get("runs") ?? "").split(".").filter((id) => /^[0-9a-f]{16}$/.test(id));
  state.tab = TABS.includes(said.get("tab")) ? said.get("tab") : "curves";
  state.axis = ["time", "tokens"].includes(said.get("axis")) ? said.get("axis") : "step";
  state.smooth = Math.max(0, Math.min(0.99, Number(said.get("smooth")) || 0));
  state.log = said.get("log") === "1";
  const zoom = (said.get("zoom") ?? "").split("_").map(Number);
  state.zoom = zoom.length === 2 && zoom[0] < zoom[1] ? zoom : null;
  state.bands = said.get("bands") !== "0";
  state.which = said.get("of") ?? "";
  const n = said.get("n");
  state.n = n !== null && /^\d{1,9}$/.test(n) ? Number(n) : null;
  const wanted = ["step", "kind", "status", "low", "high", "text", "order"].filter((k) => said.has(k));
  return { ...Object.fromEntries(wanted.map((k) => [k, said.get(k).slice(0, 200)])), zero: said.get("zero") === "true" };
}

// ---- the list

function looks() {
  // the seeds of one band share a colour
  const bands = shownLines(), found = new Map();
  bands.forEach(({ members }, i) => members.forEach((run, k) => found.set(run.id, { chosen: true, colour: i % COLOURS, dash: Math.floor(i / COLOURS) % DASHES.length, nth: k })));
  return (run) => found.get(run.id) ?? { chosen: false, colour: 0, dash: 0 };
}

/** Return the lines to draw, each of a run or of the selected seeds of one group. */
function shownLines() {
  const chosen = data.list.filter((run) => state.runs.includes(run.id)).sort((a, b) => state.runs.indexOf(a.id) - state.runs.indexOf(b.id));
  const bands = Map.groupBy(chosen, (run) => (state.bands && run.group) || run.id);
  return [...bands.values()].map((members) => ({ members, label: members.length > 1 ? `${grouped(members)[0].title}, ${members.length} seeds` : members[0].name }));
}

/** Return the runs that match the filters. */
function listed() {
  const wanted = { search: $("search").value, state: $("state").value, method: $("method").value };
  return data.list.filter((run) => matches(run, wanted));
}

function drawList() {
  const found = listed();
  list.draw(grouped(found), looks());
  $("count").textContent = `${found.length === data.list.length ? "" : `${found.length} of `}${whole(data.list.length)}${data.more ? " or more" : ""}`;
  const methods = [...new Set(data.list.map((run) => run.method))].sort();
  if (methods.join() !== [...$("method").options].slice(1).map((o) => o.value).join()) {
    const kept = $("method").value;
    $("method").replaceChildren(el("option", { value: "" }, "any method"), ...methods.map((m) => el("option", { value: m }, m)));
    $("method").value = methods.includes(kept) ? kept : "";
  }
  $("folder").textContent = data.folder;
}

function pick(ids, on, alone) {
  const kept = alone ? [] : state.runs.filter((id) => !ids.includes(id));
  state.runs = on ? [...kept, ...ids] : kept;
  selected();
}

function selected() {
  const runs = chosenRuns();
  if (!runs.some((run) => run.id === state.which)) state.which = runs[0]?.id ?? "";
  drawList();
  showTab(false);
}

const chosenRuns = () => state.runs.map((id) => data.run(id)).filter(Boolean);

// ---- tabs

function showTab(moved = true) {
  const runs = chosenRuns(), empty = runs.length === 0;
  for (const name of TABS) {
    const tab = $(`tab-${name}`), here = name === state.tab;
    tab.setAttribute("aria-selected", String(here));
    tab.tabIndex = here ? 0 : -1;
    $(name).hidden = empty || !here;
  }
  document.querySelector(".layout").dataset.tab = state.tab;
  $("empty").hidden = !empty;
  $("empty").textContent = data.list.length ? "Choose a run, or tick several." : NOTHING;
  $("which-field").hidden = !OF_ONE.includes(state.tab) || runs.length < 2;
  $("which").replaceChildren(...runs.map((run) => el("option", { value: run.id, selected: run.id === state.which }, run.name)));
  followRuns();
  const one = data.run(state.which);
  if (!empty && state.tab === "curves") ask();
  $("watch").hidden = !watchable() || state.tab === "about";
  if (!empty && state.tab === "table") table.show(runs.length > 1 ? runs : listed(), data.signals);
  if (one && state.tab === "about") about.show(one, state.watch);
  state.watch = false;
  if (one && state.tab === "rollouts" && (moved || rollouts.run?.id !== one.id)) rollouts.open(one, {});
  remember();
}

/** Return the run whose recorded episode can be watched: preferably the current one, or another chosen one. */
const watchable = () => [data.run(state.which), ...chosenRuns()].find((run) => run?.picture);

/** Subscribe to changes of the chosen and the running runs. */
function followRuns() {
  const running = data.list.filter((run) => run.state === "running").map((run) => run.id);
  data.follow([...new Set([...state.runs, ...running])]);
}

function openRollouts(run, step, n = null) {
  state.which = run;
  state.tab = "rollouts";
  rollouts.run = data.run(run);
  showTab(false);
  rollouts.open(data.run(run), { step: String(step) }, n).then(() => $("tab-rollouts").scrollIntoView({ block: "nearest" }));
}

// ---- curves

function ask() {
  data.update(state.runs.filter((id) => data.run(id)), state.axis, $("more").open).catch((error) => notice(error.message));
}

function changed(kind) {
  if (!state.ready) return;
  if (kind === "list") {
    const first = state.waiting && data.list.length > 0;
    if (first) chooseFirst();
    state.waiting &&= !first;
    if (first || $("empty").hidden !== chosenRuns().length > 0) selected();
    drawList();
    followRuns();
    if (state.tab === "curves") alerts.draw(chosenRuns());
    $("watch").hidden = !watchable() || state.tab === "about";
  } else if (!painting) {
    painting = requestAnimationFrame(() => {
      painting = 0;
      drawCurves();
    });
  }
}

/** Return the lines of one chart. */
function linesOf(name, bands) {
  return bands.flatMap(({ members, label }, i) => {
    const known = members.map((run) => data.curves.get(run.id)?.curves.get(name)).filter(Boolean);
    if (!known.length) return [];
    const base = { run: members[0].id, label, colour: i % COLOURS, dash: Math.floor(i / COLOURS) };
    return [known.length > 1 ? { ...base, members: known } : { ...base, ...known[0] }];
  });
}

export function drawCurves() {
  const begun = performance.now(), bands = shownLines();
  const named = new Set(data.signals.map((signal) => signal.name));
  const keys = [...new Set(state.runs.flatMap((id) => data.curves.get(id)?.keys ?? []))];
  const wanted = data.signals.filter((signal) => keys.includes(signal.name));
  const parts = keys.filter((key) => /^rewards\/.+\/mean$/.test(key)).sort();
  if (parts.length > 1) parts.forEach((key) => wanted.push({ name: key, group: "Reward functions", title: key.slice(8, -5), says: "Mean, before weighting.", unit: "" }));
  const shown = new Set(wanted.map((signal) => signal.name));
  const others = keys.filter((key) => !named.has(key) && !shown.has(key)).sort();
  drawLegend(bands);
  alerts.draw(chosenRuns());
  $("more").hidden = others.length === 0;
  $("more-count").textContent = others.length ? `(${others.length})` : "";
  const extra = ($("more").open ? others : []).map((name) => ({ name, title: name, says: "", unit: "" }));
  swap($("more-charts"), extra.map((signal) => chartOf(signal).node));
  for (const signal of [...wanted, ...extra]) {
    const marks = bands.flatMap(({ members }) => members.flatMap((run) => run.alerts.filter((a) => a.signal === signal.name && !a.calm).map((a) => placeOf(run, a.step))));
    chartOf(signal).show(linesOf(signal.name, bands), { smooth: state.smooth, log: state.log, zoom: state.zoom }, marks);
  }
  place($("charts"), [...Map.groupBy(wanted, (signal) => signal.group).values()].flat().map(chartOf));
  const drawn = document.querySelectorAll("#charts .chart").length;
  $("charts").dataset.milliseconds = (performance.now() - begun).toFixed(1);
  $("charts").dataset.drawn = String(drawn);
  $("charts").dataset.axis = state.runs.some((id) => data.curves.has(id)) ? data.axis : "";
}

/** Return the x of a step. */
function placeOf(run, step) {
  for (const { steps, x } of data.curves.get(run.id)?.curves.values() ?? []) {
    const i = steps.indexOf(step);
    if (i >= 0) return x[i];
  }
  return NaN;
}

function chartOf(signal) {
  if (!charts.has(signal.name)) charts.set(signal.name, new Chart(signal, { follow, zoom, open: openRollouts }));
  return charts.get(signal.name);
}

function follow(x, aloud = false) {
  for (const chart of charts.values()) {
    if (!chart.node.isConnected || chart.cross === x) continue;
    chart.point(x);
  }
  if (aloud) $("said").textContent = x === null ? "" : [...charts.values()].find((c) => c.frame === document.activeElement)?.sentence() ?? "";
}

/** Zoom all charts to a range of x, or reset the zoom (null). */
function zoom(range) {
  state.zoom = range;
  controls();
  changed("curves");
  remember();
}

/** Place the charts in one grid, in the order of their groups. Charts with only zeros are small and come last. */
function place(node, shown) {
  const [charts_, flats] = node.children;
  swap(charts_, shown.filter((chart) => !chart.flat).map((chart) => chart.node));
  swap(flats, shown.filter((chart) => chart.flat).map((chart) => chart.node));
  $("no-figures").hidden = shown.length > 0 || !state.runs.some((id) => data.curves.has(id));
}

function swap(node, children) {
  if (children.length !== node.children.length || children.some((c, i) => c !== node.children[i])) node.replaceChildren(...children);
}

function drawLegend(bands) {
  $("bands-field").hidden = !chosenRuns().some((run, _, all) => run.group && all.filter((other) => other.group === run.group).length > 1);
  const named = bands.length > 1 || bands[0]?.members.length > 1 ? bands : [];
  $("legend").replaceChildren(...named.map(({ label, members }, i) => {
    const key = el("span", { class: `key run-${i % COLOURS} dash-${Math.floor(i / COLOURS) % DASHES.length}` });
    return el("li", {}, key, label, members.length > 1 ? el("span", { class: "soft" }, " mean and range") : null);
  }));
}

// ---- controls

function controls() {
  $("axis").value = state.axis;
  $("smooth").value = String(state.smooth);
  $("log").checked = state.log;
  $("bands").checked = state.bands;
  $("unzoom").hidden = state.zoom === null;
  document.querySelector("output[for=smooth]").textContent = state.smooth ? figure(state.smooth) : "none";
}

for (const id of ["search", "state", "method"]) $(id).addEventListener("input", drawList);
$("axis").addEventListener("change", () => { state.axis = $("axis").value; follow(null); zoom(null); ask(); });
$("unzoom").addEventListener("click", () => zoom(null));
$("smooth").addEventListener("input", () => { state.smooth = Number($("smooth").value); controls(); changed("curves"); remember(); });
$("log").addEventListener("change", () => { state.log = $("log").checked; changed("curves"); remember(); });
$("bands").addEventListener("change", () => { state.bands = $("bands").checked; drawList(); changed("curves"); remember(); });
$("which").addEventListener("change", () => { state.which = $("which").value; showTab(); });
$("watch").addEventListener("click", () => {
  Object.assign(state, { which: watchable().id, tab: "about", watch: true });
  showTab();
  $("tab-about").focus();
});
$("choose").addEventListener("click", () => { $("list-title").scrollIntoView(); $("search").focus({ preventScroll: true }); });
$("more").addEventListener("toggle", () => ask());
for (const name of TABS) {
  $(`tab-${name}`).addEventListener("click", () => { state.tab = name; showTab(); });
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: TABS.length - 1 }[event.key];
    if (!step) return;
    state.tab = TABS[(TABS.indexOf(name) + step) % TABS.length];
    showTab();
    $(`tab-${state.tab}`).focus();
    event.preventDefault();
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) return;
  $("search").focus();
  event.preventDefault();
});
addEventListener("hashchange", () => { recall(); controls(); selected(); });

async function watch() {
  try {
    const whole_ = await data.refresh();
    setTimeout(watch, document.hidden ? 30_000 : whole_ ? 5_000 : 200);
  } catch (error) {
    notice(error.message);
    setTimeout(watch, 5_000);
  }
}

/** Choose the most recently written run that has figures, with the other seeds of its settings. */
function chooseFirst() {
  const groups = grouped(data.list);
  state.runs = (groups.find((group) => group.runs.some((run) => run.step > 0)) ?? groups[0])?.runs.map((run) => run.id) ?? [];
}

async function begin() {
  const wanted = recall();
  controls();
  state.ready = true;
  await watch();
  state.waiting = data.list.length === 0;
  if (!state.runs.length) chooseFirst();
  const n = state.n, which = state.which;
  if (state.tab === "rollouts" && (data.run(which) ?? chosenRuns()[0])) {
    const run = data.run(which) ?? chosenRuns()[0];
    rollouts.run = run;
    state.which = run.id;
    selected();
    await rollouts.open(run, wanted, n);
  } else selected();
  document.querySelector(".run.chosen")?.scrollIntoView({ block: "nearest" });
  if (scrollY < 200) scrollTo(0, 0);
  document.documentElement.dataset.ready = "";
}

begin().catch((error) => notice(error.message));

