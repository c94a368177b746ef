// A sortable table of the chosen runs: the last value of each metric, and the settings that differ.
import { post } from "../api.js";
import { button, el, notice, parted, wide } from "../dom.js";
import { figure, whole } from "./format.js";

const UP = "ascending", DOWN = "descending";

export class Table {
  /** `open(id)` shows one run alone. */
  constructor(node, open) {
    Object.assign(this, { node, open, sorted: { column: null, way: UP }, turn: 0 });
  }

  /** Rows for these runs. */
  async show(runs, signals) {
    const turn = ++this.turn;
    try {
      const found = await post("/api/runs/table", { runs: runs.map((run) => run.id) });
      if (turn === this.turn) this.draw(runs, signals, found);
    } catch (error) {
      notice(error.message);
    }
  }

  draw(runs, signals, { rows, figures, settings }) {
    const entries = new Map(runs.map((run) => [run.id, run])), title = (name) => signals.find((signal) => signal.name === name)?.title ?? name;
    this.columns = [
      { name: "run", title: "Run", value: ({ id }) => entries.get(id).name },
      { name: "tags", title: "Tags", value: ({ id }) => entries.get(id).tags.join(", ") },
      { name: "state", title: "State", value: ({ id }) => entries.get(id).state },
      { name: "step", title: "Steps", value: ({ id }) => entries.get(id).step, said: whole },
      ...figures.map((name) => ({ name, title: title(name), value: (row) => row.figures[name] ?? null, said: figure })),
      ...settings.map((name) => ({ name: `setting ${name}`, title: name.replace(/^run\./, ""), value: (row) => number(row.settings[name]) })),
    ];
    this.rows = rows.filter(({ id }) => entries.has(id));
    this.settings = settings.length;
    this.fill();
  }

  fill() {
    const { column, way } = this.sorted, by = this.columns.find(({ name }) => name === column);
    const rows = by ? [...this.rows].sort((a, b) => compared(by.value(a), by.value(b), way === UP ? 1 : -1)) : this.rows;
    const head = this.columns.map(({ name, title }) => {
      const sort = name === column ? way : "none";
      const turn = () => this.sort(name);
      return el("th", { scope: "col", "aria-sort": sort }, button({ "data-column": name, onclick: turn }, ...parted(title), { [UP]: " ↑", [DOWN]: " ↓" }[sort] ?? ""));
    });
    const body = rows.map((row) => el("tr", { "data-id": row.id }, ...this.columns.map((one, i) => this.cell(one, row, i))));
    const differ = this.settings ? "" : this.rows.length > 1 ? "Their settings are the same." : "";
    const table = el("table", { class: "compare" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body));
    this.node.replaceChildren(
      el("div", { class: "card" }, wide("Runs side by side", table)),
      el("p", { class: "soft small" }, `${this.rows.length === 1 ? "One run" : `${whole(this.rows.length)} runs`}; figures are the latest. ${differ}`),
    );
  }

  cell({ value, said }, row, place) {
    const found = value(row);
    if (place === 0) return el("th", { scope: "row" }, button({ class: "link", onclick: () => this.open(row.id) }, ...parted(found)));
    const isNumber = typeof found === "number";
    return el("td", { class: isNumber ? "number" : null }, isNumber && said ? said(found) : found === null ? "–" : String(found));
  }

  sort(name) {
    const again = this.sorted.column === name;
    this.sorted = { column: name, way: again && this.sorted.way === UP ? DOWN : UP };
    this.fill();
    this.node.querySelector(`[data-column="${CSS.escape(name)}"]`).focus();
  }
}

/** Return a setting as a number if it is one. */
const number = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text || null);

/** Compare two cells: numbers by size, words alphabetically, missing values last in both directions. */
function compared(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
}
