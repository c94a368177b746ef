// One cell's backup in numbers, as the server computed it.
import { el, wide } from "../dom.js";
import { named, short, signed, spoken } from "./board.js";

const ARROWS = ["↑", "→", "↓", "←"];
const four = (x) => short(x, 4);
const term = (x) => (x < 0 ? `(${four(x)})` : four(x));

/** Return the content of the panel about a cell. `answer` is the response of /api/grid/backup, or null until it arrives. */
export function inspection(place, piece, carried, family, algorithm, answer) {
  const nodes = [el("p", { class: "place" }, el("b", {}, capital(spoken(place))), `: ${named(piece)}`)];
  if (carried) nodes.push(el("p", { class: "hint" }, "Picked up. Choose a free cell to put it down, or press Escape."));
  if (answer === null) return nodes;
  if (answer.terminal) {
    const why = piece.kind === "wall" ? "A wall cannot be entered, so it has no value." : "Entering this cell gives its reward and ends the episode, so the cell's own value is 0.";
    return [...nodes, el("p", { class: "soft" }, why)];
  }
  if (family !== "planning") nodes.push(...sampled(answer, algorithm));
  return [...nodes, ...modelled(answer, family)];
}

function modelled(answer, family) {
  const best = Math.max(...answer.actions.map((a) => a.q));
  const rows = answer.actions.map((a) => {
    const chosen = answer.expected === null ? a.q >= best - 1e-12 * (1 + Math.abs(best)) : answer.policy[a.action] > 0;
    return el(
      "tr",
      chosen ? { class: "best" } : {},
      el("th", { scope: "row" }, el("span", { "aria-hidden": "true" }, ARROWS[a.action]), el("span", { class: "visually-hidden" }, ["up", "right", "down", "left"][a.action])),
      el("td", {}, ...a.outcomes.map((o) => el("div", {}, outcome(o, answer.gamma)))),
      el("td", { class: "q" }, four(a.q)),
    );
  });
  const head = el("tr", {}, el("th", { scope: "col" }, "a"), el("th", { scope: "col" }, "Σ P · (R + γ · V(s′))"), el("th", { scope: "col", class: "q" }, "Q(s, a)"));
  const [name, backup] = answer.expected === null ? ["max Q", best] : ["Σ π · Q", answer.expected];
  const result = el("p", { class: "result" }, `${name} = `, el("b", {}, four(backup)), `; the grid shows ${four(answer.value)}`);
  const title = family === "planning" ? "From the values on the grid" : "With the model, for comparison";
  return [el("h3", {}, title), wide(title, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))), result];
}

const outcome = (o, gamma) => {
  const paid = o.reward === 0 ? "0" : signed(o.reward);
  const chance = o.probability === 1 ? "1" : String(Number(o.probability.toFixed(4)));
  return `${chance} · (${paid} + ${o.ends ? "0" : `${Number(gamma.toFixed(4))} · ${term(o.value)}`})`;
};

function sampled(answer, algorithm) {
  if (answer.updates.length === 0) return [el("p", { class: "soft" }, "The last episode did not pass this cell.")];
  const times = answer.visits === 1 ? "once" : `${answer.visits} times`;
  const shown = answer.updates.length < answer.visits ? `; the last ${answer.updates.length}` : "";
  const intro = el("h3", {}, `The last episode updated this cell ${times}${shown}`);
  return [intro, el("ul", { class: "updates" }, ...answer.updates.map((u) => el("li", {}, ...update(u, answer, algorithm))))];
}

function update(u, answer, algorithm) {
  const name = answer.q === null ? "V" : `Q(s, ${ARROWS[u.action]})`;
  if (u.ahead === null) {
    return [`${name} goes from ${four(u.before)} towards the return ${four(u.target)}: `, el("b", {}, four(u.after))];
  }
  const next = { td: "V(s′)", q_learning: "max Q(s′)", sarsa: "Q(s′, a′)", expected_sarsa: "mean Q(s′)" }[algorithm];
  const target = `${signed(u.reward) || "0"} + ${Number(answer.gamma.toFixed(4))} · ${term(u.ahead)}`;
  return [
    `${name} ← ${four(u.before)} + ${Number(answer.alpha.toFixed(4))} · (${target} − ${term(u.before)}) = `,
    el("b", {}, four(u.after)),
    el("span", { class: "soft" }, u.ends ? ", at the end" : `, ${next} = ${four(u.ahead)}`),
  ];
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);
