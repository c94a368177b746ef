// The list of runs. Seeds of the same settings have a common head. A checkbox overlays a run, its name shows it alone.
import { arrows, button, el, parted } from "../dom.js";
import { ago, figure, whole } from "./format.js";

/** Return [{title, runs}] for groups of runs with the same settings: running ones first, then the most recently written. */
export function grouped(runs) {
  const latest = (a, b) => (b.state === "running") - (a.state === "running") || b.written - a.written || a.name.localeCompare(b.name);
  const groups = Map.groupBy(runs.toSorted(latest), (run) => run.group || run.id);
  return [...groups].map(([key, members]) => ({ key, runs: members.sort((a, b) => (a.seed ?? 0) - (b.seed ?? 0)), title: common(members) }));
}

/** Return the common start of the names of several runs. */
function common(runs) {
  const [first, ...rest] = runs.map((run) => run.name);
  let length = first.length;
  for (const name of rest) while (!name.startsWith(first.slice(0, length))) length -= 1;
  return first.slice(0, length).replace(/[-_/. ]*(seed)?[-_/. ]*$/i, "") || runs[0].method;
}

/** Return true if a run matches the filters. */
export function matches(run, { search, state, method }) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const text = `${run.name} ${run.method} ${run.model} ${run.kind} ${run.tags.join(" ")} ${run.note}`.toLowerCase();
  const right = !state || (state === "alerts" ? loud(run).length > 0 : run.state === state);
  return right && (!method || run.method === method) && words.every((word) => text.includes(word));
}

/** Return the warnings that need an action, one of each kind, the gravest first. */
const loud = (run) => run.alerts.filter((alert) => !alert.calm);

export class List {
  constructor(node, picked) {
    Object.assign(this, { node, picked, rows: new Map() });
    arrows(node, "button.name", () => document.activeElement.closest(".run, .several")?.querySelector("button.name"));
  }

  /** `look(run)` returns {chosen, colour, dash}. Existing nodes are reused, so that the focus stays in place. */
  draw(groups, look) {
    const wanted = [], live = new Set();
    for (const group of groups) {
      const one = ({ id }) => this.made({ class: "run", "data-id": id }, [id], "state", "meta", "figure", "alert", "tags");
      const runs = group.runs.map((run) => this.row(`run ${run.id}`, live, () => one(run)));
      group.runs.forEach((run, i) => this.fill(runs[i], run, look(run)));
      if (group.runs.length === 1) wanted.push(...runs);
      else wanted.push(this.head(group, look, live), ...runs);
      runs.forEach((row) => row.node.classList.toggle("seed", group.runs.length > 1));
    }
    for (const key of [...this.rows.keys()]) if (!live.has(key)) this.rows.delete(key);
    const nodes = wanted.map((row) => row.node);
    const same = nodes.length === this.node.children.length && nodes.every((node, i) => node === this.node.children[i]);
    if (!same) {
      const focus = document.activeElement;
      this.node.replaceChildren(...nodes);
      if (this.node.contains(focus)) focus.focus();
    }
  }

  row(key, live, make) {
    live.add(key);
    if (!this.rows.has(key)) this.rows.set(key, make());
    return this.rows.get(key);
  }

  /** Return a new row with a checkbox and a name, which choose the runs `row.ids`, and with spans of the given names. */
  made(attributes, ids, ...names) {
    const row = { ids };
    row.box = el("input", { type: "checkbox", onchange: () => this.picked(row.ids, row.box.checked, false) });
    row.name = button({ class: "name", onclick: () => this.picked(row.ids, true, true) });
    const [key, ...spans] = ["key", ...names].map((name) => { row[name] = el("span", { class: name }); return row[name]; });
    row.node = el("div", attributes, row.box, key, row.name, ...spans);
    return row;
  }

  head(group, look, live) {
    const row = this.row(`group ${group.key}`, live, () => this.made({ class: "several" }, [], "meta"));
    const looks = group.runs.map(look);
    row.ids = group.runs.map((run) => run.id);
    row.box.checked = looks.every((l) => l.chosen);
    row.box.indeterminate = !row.box.checked && looks.some((l) => l.chosen);
    row.box.setAttribute("aria-label", `Overlay all seeds of ${group.title}`);
    if (row.name.textContent !== group.title) row.name.replaceChildren(el("span", {}, ...parted(group.title)));
    text(row.meta, `${group.runs.length} seeds · ${group.runs[0].method}${group.runs[0].model ? ` · ${short(group.runs[0].model)}` : ""}`);
    return row;
  }

  fill(row, run, { chosen, colour, dash }) {
    row.box.checked = chosen;
    row.box.setAttribute("aria-label", `Overlay ${run.name}`);
    row.node.classList.toggle("chosen", chosen);
    row.key.className = chosen ? `key run-${colour} dash-${dash}` : "key";
    if (row.name.textContent !== run.name) row.name.replaceChildren(el("span", {}, ...parted(run.name)));
    const model = run.model ? ` · ${short(run.model)}` : "";
    text(row.meta, `${run.method}${model} · ${ago(run.written)}`);
    row.state.className = `state ${run.state}`;
    text(row.state, run.state);
    const last = run.last ? `${run.last.name.replaceAll("_", " ")} ${figure(run.last.value)} · ` : "";
    text(row.figure, `${last}step ${whole(run.step)}${run.total > run.step ? ` of ${whole(run.total)}` : ""}`);
    const [worst, ...more] = loud(run);
    row.alert.className = worst ? `alert ${worst.grave ? "grave" : ""}` : "alert none";
    text(row.alert, worst ? `${worst.title}, from step ${whole(worst.step)}${more.length ? `, and ${more.length} more` : ""}` : "");
    text(row.tags, run.tags.map((tag) => `#${tag}`).join(" "));
  }
}

/** Return the last two parts of a path. */
export const short = (model) => model.split("/").slice(-2).join("/");

function text(node, said) {
  if (node.textContent !== said) node.textContent = said;
}
