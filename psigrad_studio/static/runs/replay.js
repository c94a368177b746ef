// A step that `psigrad replay` made once more: each method's figures, and what it does to every token of the same completions.
import { post } from "../api.js";
import { el, notice } from "../dom.js";
import { figure } from "./format.js";
import { MEASURES, reach, tokenText } from "./tokens.js";

const COLOURS = ["weight", "advantage", "ratio", "clipped"];

/** The replays of a run, to look at one. */
export function replayCard(run) {
  if (!run.replays.length) return "";
  const shown = el("div", { class: "replay" });
  const look = async (n) => {
    try {
      draw(shown, await post("/api/runs/replay", { run: run.id, n }), "weight");
    } catch (error) {
      notice(error.message);
    }
  };
  const buttons = run.replays.map((name, n) => el("button", { type: "button", onclick: () => look(n) }, name));
  return el("section", { class: "card" }, el("h2", {}, "Replayed steps"), el("div", { class: "row" }, ...buttons), shown);
}

function draw(node, replay, colour) {
  const said = replay.differences.length ? `${replay.differences.length} differences from what is recorded` : "Bit for bit the recorded step";
  const head = el("tr", {}, el("th", {}, ""), ...replay.methods.map((name) => el("th", { scope: "col" }, name)));
  const rows = replay.figures.map(([name, values]) =>
    el("tr", {}, el("th", { scope: "row" }, name), ...values.map((value) => el("td", {}, figure(value)))));
  const table = el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Figures of each method" },
    el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
  const choice = el("select", { "aria-label": "What colours show", onchange: (event) => draw(node, replay, event.target.value) },
    ...COLOURS.map((name) => el("option", { value: name, selected: name === colour }, MEASURES[name].title)));
  const told = el("p", { class: "soft small", "aria-live": "polite" }, MEASURES[colour].says);
  const tables = replay.groups.flatMap((group) => group.completions.flatMap((one) => one.methods));
  const most = Object.fromEntries(replay.methods.map((name) => [name, reach(tables.filter((one) => one.method === name), colour)]));
  const groups = replay.groups.map((group) =>
    el("div", {}, el("h3", {}, `Row ${group.row}`), el("p", { class: "said" }, group.prompt),
      ...group.completions.flatMap((one) => [
        el("p", { class: "soft small" }, `completion ${one.k}, reward ${figure(one.reward)}`),
        ...one.methods.flatMap(({ method, tokens }) => [
          el("p", { class: "small" }, method),
          tokenText(tokens, colour, most[method], `${method}, completion ${one.k}`, (text) => { told.textContent = text; }),
        ]),
      ])));
  node.replaceChildren(el("p", {}, said), ...replay.differences.map((line) => el("p", { class: "bad small" }, line)),
    ...replay.assumed.map((line) => el("p", { class: "soft small" }, line)), table,
    el("div", { class: "row" }, choice), told, ...groups);
}
