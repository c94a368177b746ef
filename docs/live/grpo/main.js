// The page that trains a language model: asks the worker for one step after the other, and shows what comes.
import { el, notice } from "dom.js";
import { colour, plot } from "plot.js";
import { figure } from "runs/format.js";
import { reach, tokenText } from "runs/tokens.js";

const $ = (id) => document.getElementById(id);
const SEED = 0, TUNING = 220, STEPS = 200, EXAM = { tune: 20, reinforce: 4 }, HEIGHT = 230, WRONG = 0.6;
const SAYS = {
  right: "What is wanted, and nothing else. No part for nearly.",
  places: "Easier to climb: a nearly right answer earns nearly all.",
  rising: "Nobody looks at the question, and a longer answer has more digits that do not fall. Watch the two curves part.",
};

const worker = new Worker(URL.createObjectURL(new Blob([window.psigradWorker], { type: "text/javascript" })));
const waiting = new Map();
let asked = 0, run = 0, playing = false, busy = false, stage = "tune", steps = { tune: 0, reinforce: 0 }, exams = [], shown = null, group = null, chart = null;

worker.addEventListener("message", ({ data }) => {
  waiting.get(data.id)(data.found);
  waiting.delete(data.id);
});
worker.addEventListener("error", (event) => notice(`The training stopped: ${event.message}. Reload the page.`, 60));

const ask = (what, given = {}) => new Promise((done) => {
  waiting.set(++asked, done);
  worker.postMessage({ id: asked, ask: what, settings: settings(), ...given });
});

const settings = () => ({
  reward: $("reward").value, group: Number($("group").value), passes: Number($("passes").value), clip: Number($("clip").value),
  kl: Number($("kl").value), rate: 5e-4, wrong: WRONG, tuningRate: 3e-3, warmup: 20,
});

/** One step of the stage, and now and then an exam. */
async function advance() {
  busy = $("step").disabled = true;
  const now = run;
  const found = await ask(stage);
  if (now !== run) return; // started over while the worker was at it
  steps[stage] += 1;
  if (stage === "reinforce") shown = found;
  if (steps[stage] % EXAM[stage] === 0 || steps[stage] === 1) await examine(now);
  if (now !== run) return;
  if (stage === "tune" && steps.tune === TUNING) {
    stage = "reinforce";
    await ask("begin");
    if (now !== run) return;
  }
  busy = false;
  draw();
}

async function examine(now) {
  const { accuracy, reward } = await ask("exam");
  if (now === run) exams.push({ at: steps.tune + steps.reinforce, accuracy, reward: stage === "tune" ? null : reward });
}

async function play() {
  playing = true;
  while (playing && steps.reinforce < STEPS) await advance();
  playing = false;
  draw();
}

/** Forget all, or all since the imitation. */
async function restart(whole) {
  [run, playing, busy, shown] = [run + 1, false, true, null];
  const now = run;
  if (whole) {
    [stage, steps, exams] = ["tune", { tune: 0, reinforce: 0 }, []];
    const { parameters } = await ask("start", { seed: SEED });
    $("size").textContent = Math.round(parameters / 1000);
  } else {
    await ask("again");
    [steps.reinforce, exams] = [0, exams.filter(({ at }) => at <= TUNING)];
  }
  if (now !== run) return;
  busy = false;
  draw();
}

function status() {
  const last = exams.at(-1), share = last && `${Math.round(100 * last.accuracy)} % right on unseen numbers`;
  if (!steps.tune) return playing ? "It begins." : "Press Train.";
  if (stage === "tune") return `Imitation, step ${steps.tune} of ${TUNING}: ${share}.`;
  if (!steps.reinforce) return `It imitates: ${share}, about as often as its examples.`;
  const hacked = last.reward !== null && last.reward > 0.8 && last.accuracy < 0.2 ? " The reward is content, the answers are wrong: it was hacked." : "";
  return `Reinforcement, step ${steps.reinforce} of ${STEPS}: ${share}.${hacked}`;
}

function draw() {
  $("play").textContent = playing ? "Pause" : steps.tune || steps.reinforce ? "Go on" : "Train";
  $("play").disabled = steps.reinforce >= STEPS;
  $("step").disabled = busy || playing || steps.reinforce >= STEPS;
  $("again").disabled = !steps.reinforce;
  $("tuned").value = steps.tune / TUNING;
  $("reinforced").value = steps.reinforce / STEPS;
  [...$("stages").children].forEach((item, i) => item.toggleAttribute("aria-current", (stage === "reinforce") === (i === 1)));
  const said = status();
  if ($("status").textContent !== said) $("status").textContent = said;
  drawChart();
  drawFigures();
  drawGroup();
}

function drawChart() {
  const node = $("chart"), width = node.clientWidth;
  if (!width) return;
  const line = (name, dash) => ({ stroke: () => colour(name), width: 2, dash, points: { show: false }, spanGaps: false });
  chart ??= plot(node, HEIGHT, {
    series: [{}, line("--c0", []), line("--c1", [5, 4])],
    x: { text: String, range: () => [0, Math.max(TUNING + 40, TUNING + 40 * Math.ceil(steps.reinforce / 40))] },
    y: { text: (value) => `${Math.round(100 * value)} %`, range: () => [0, 1] },
    cursor: { show: false },
    hooks: { draw: [border] },
  });
  chart.batch(() => {
    chart.setSize({ width, height: HEIGHT });
    chart.setData([exams.map(({ at }) => at), exams.map(({ accuracy }) => accuracy), exams.map(({ reward }) => reward)]);
  });
  const last = exams.at(-1);
  if (last) node.setAttribute("aria-label", `After ${last.at} steps ${Math.round(100 * last.accuracy)} % of the answers are right${last.reward === null ? "" : `, and the reward is ${figure(last.reward)}`}.`);
}

/** Where imitation ends. */
function border(made) {
  const { ctx } = made, x = Math.round(made.valToPos(TUNING, "x", true)), { top, height } = made.bbox, dots = devicePixelRatio;
  ctx.save();
  [ctx.strokeStyle, ctx.fillStyle, ctx.font, ctx.textAlign] = [colour("--edge"), colour("--soft"), `${11 * dots}px system-ui, sans-serif`, "right"];
  ctx.setLineDash([2 * dots, 3 * dots]);
  ctx.beginPath();
  ctx.moveTo(x, top);
  ctx.lineTo(x, top + height);
  ctx.stroke();
  ctx.fillText("imitation", x - 6 * dots, top + 12 * dots);
  ctx.textAlign = "left";
  ctx.fillText("GRPO", x + 6 * dots, top + 12 * dots);
  ctx.restore();
}

function drawFigures() {
  const found = shown?.figures, percent = (value) => `${figure(Math.round(1000 * value) / 10)} %`;
  const rows = found ? [
    ["Reward", figure(found.reward)], ["Right", percent(found.accuracy)], ["Tokens clipped", percent(found.clipped)],
    ["KL to the imitator", figure(Number(found.kl.toPrecision(3)))], ["Groups that teach", percent(1 - found.dead)], ["Length", figure(found.length)],
  ] : [];
  $("figures").hidden = !found;
  $("figures").replaceChildren(...rows.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))));
}

function drawGroup() {
  document.querySelector(".groups").hidden = !shown;
  if (!shown) return;
  const at = place(), { prompt, answer, completions } = shown.groups[at];
  $("which").textContent = `${at + 1} of ${shown.groups.length}`;
  $("earlier").disabled = at === 0;
  $("later").disabled = at === shown.groups.length - 1;
  $("asked").replaceChildren("Asked ", el("span", { class: "mono" }, prompt), ", right is ", el("span", { class: "mono" }, answer));
  const members = completions.map((one) => ({ tokens: {
    text: [...one.text], mask: one.logp.map(() => true), logprob: one.logp, ratio: one.ratio, clipped: one.clipped.map((hit) => (hit ? 1 : null)),
  } }));
  const most = Math.max(0.2, reach(members, "ratio"));
  $("completions").replaceChildren(...completions.map((one, i) => {
    const box = tokenText(members[i].tokens, "ratio", most, `Completion ${i + 1}`, (words) => { $("token").textContent = words; });
    one.clipped.forEach((hit, t) => box.children[t].classList.toggle("clipped", hit !== 0));
    const mark = el("span", { class: `mark ${one.right ? "right" : "wrong"}`, role: "img", "aria-label": one.right ? "right" : "wrong" }, one.right ? "✓" : "✗");
    return el("tr", null, el("td", null, mark, box), el("td", { class: "number" }, figure(Number(one.reward.toFixed(2)))), el("td", { class: "number" }, signed(one.advantage)));
  }));
}

/** The group that was asked for, or the first that teaches something. */
const place = () => Math.min(group ?? Math.max(0, shown.groups.findIndex(({ completions }) => completions.some(({ advantage }) => advantage))), shown.groups.length - 1);

function turn(by) {
  group = place() + by;
  drawGroup();
}

const signed = (value) => `${value > 0 ? "+" : ""}${figure(Number(value.toFixed(2)))}`;

function told() {
  $("reward-says").textContent = SAYS[$("reward").value];
  for (const name of ["clip", "kl"]) document.querySelector(`output[for="${name}"]`).textContent = Number($(name).value).toFixed(2);
}

$("play").addEventListener("click", () => {
  if (playing) playing = false;
  else if (!busy) play();
  draw();
});
$("step").addEventListener("click", () => { if (!busy && !playing) advance(); });
$("again").addEventListener("click", () => restart(false));
$("over").addEventListener("click", () => restart(true));
$("earlier").addEventListener("click", () => turn(-1));
$("later").addEventListener("click", () => turn(1));
for (const name of ["reward", "clip", "kl"]) $(name).addEventListener("input", told);
new ResizeObserver(drawChart).observe($("chart"));
told();
restart(true).then(() => { document.documentElement.dataset.ready = "true"; });
