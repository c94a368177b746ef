// The completions of one run: filters, a list of the matching ones, and the group of the chosen one.
import { post } from "../api.js";
import { arrows, button, el, notice, select } from "../dom.js";
import { figure, whole } from "./format.js";
import { Group } from "./group.js";

const PAGE = 50;
const WHICH = { episode: "episode ", eval: "held out " };
const EVERY = { step: "", kind: "", status: "", low: "", high: "", zero: false, text: "", order: "newest" };

export class Rollouts {
  /** `moved` is called when the filters or the chosen completion have changed. */
  constructor(node, moved) {
    Object.assign(this, { node, moved, run: null, wanted: { ...EVERY }, n: null, asked: 0, group: new Group() });
    this.list = el("ul", { class: "found", "aria-label": "Completions" });
    this.said = el("p", { class: "soft small", role: "status" });
    this.further = button({ onclick: () => this.page(this.rows.length) }, "Show more");
    this.form = this.controls();
    node.replaceChildren(
      this.form,
      el("div", { class: "hall" }, el("div", { class: "card results" }, this.said, this.list, this.further), this.group.node),
    );
    arrows(this.list, "button");
  }

  controls() {
    const choice = (name, title, options) => el("label", {}, title, select({ name }, options));
    const number = (name, title) => el("label", {}, title, el("input", { type: "number", name, step: "any" }));
    const form = el(
      "form",
      { class: "card search" },
      el("label", { class: "grow" }, "Text", el("input", { type: "text", name: "text", maxlength: "200", spellcheck: "false" })),
      number("step", "Step"),
      choice("kind", "Kind", [["", "all"], ["train", "training"], ["eval", "held out"], ["episode", "episodes"]]),
      number("low", "Reward from"),
      number("high", "to"),
      choice("status", "Score", [["", "any"], ["scored", "scored"], ["failed", "failed"], ["unscored", "unscored"]]),
      choice("order", "Order", [["newest", "newest step first"], ["oldest", "as written"], ["worst", "lowest reward first"], ["best", "highest reward first"]]),
      el("label", { class: "tick" }, el("input", { type: "checkbox", name: "zero" }), "advantage 0"),
      el("button", { type: "submit", class: "primary" }, "Search"),
      button({ class: "quiet", onclick: () => this.look({ ...EVERY }) }, "Clear"),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.look(this.read());
    });
    form.addEventListener("change", (event) => {
      if (event.target.name !== "text") this.look(this.read());
    });
    return form;
  }

  read() {
    const of = (name) => this.form.elements[name].value.trim();
    return { ...Object.fromEntries(["step", "kind", "status", "low", "high", "text", "order"].map((n) => [n, of(n)])), zero: this.form.elements.zero.checked };
  }

  /** Show a run's completions. `wanted` are filters as in EVERY, `n` is the number of the completion to open. */
  async open(run, wanted, n = null) {
    if (this.run?.id !== run.id || this.run.generation !== run.generation) this.group.clear();
    this.run = run;
    await this.look({ ...EVERY, ...wanted }, n);
  }

  async look(wanted, n = null) {
    this.wanted = wanted;
    for (const [name, value] of Object.entries(wanted)) {
      if (name === "zero") this.form.elements.zero.checked = value;
      else this.form.elements[name].value = value;
    }
    this.rows = [];
    this.list.replaceChildren();
    await this.page(0);
    const first = n ?? this.rows[0]?.n ?? null;
    if (first !== null) await this.choose(first);
    else this.group.clear();
    this.moved();
  }

  question() {
    const { step, low, high, kind, status, ...rest } = this.wanted;
    const number = (text) => (text === "" || !Number.isFinite(Number(text)) ? null : Number(text));
    return { run: this.run.id, step: number(step), low: number(low), high: number(high), kind: kind || null, status: status || null, ...rest };
  }

  async page(first) {
    const turn = ++this.asked;
    this.said.textContent = "Searching …";
    let answer;
    for (let read = -1; ; read = answer.total) {
      try {
        answer = await post("/api/runs/rollouts", { ...this.question(), first, count: PAGE });
      } catch (error) {
        if (turn === this.asked) this.said.textContent = error.message;
        return;
      }
      if (turn !== this.asked) return;
      // A long file is read in parts, and the newest rows are in the last one.
      if (answer.whole || answer.total <= read) break;
      this.said.textContent = `Searching … ${whole(answer.total)} read`;
    }
    this.generation = answer.generation;
    this.rows = [...this.rows.slice(0, first), ...answer.rows];
    const part = answer.whole ? "" : " so far. The search took too long and stopped; narrow it down";
    const range = answer.rewards ? ` Rewards lie between ${figure(answer.rewards[0])} and ${figure(answer.rewards[1])}.` : "";
    const what = answer.rows.length > 0 && answer.rows.every((row) => row.kind === "episode") ? "episodes" : "completions";
    const count = `${whole(answer.found)} of ${whole(answer.total)} ${what}`;
    this.said.textContent = answer.total === 0 ? "This run has written no completions." : `${count}${part}.${range}`;
    this.list.replaceChildren(...this.rows.map((row) => this.item(row)));
    this.further.hidden = this.rows.length >= answer.found || answer.rows.length === 0;
  }

  item(row) {
    const reward = row.reward === null ? row.status || "no reward" : figure(row.reward);
    const episode = row.kind === "episode";
    const head = el(
      "span",
      { class: "line" },
      el("strong", { class: row.status === "failed" || row.status === "unscored" ? "bad" : null }, reward),
      el("span", { class: "soft" }, `step ${whole(row.step)} · ${WHICH[row.kind] ?? "#"}${row.k ?? "–"}${row.cut ? " · cut" : ""}`),
      row.advantage === null ? null : el("span", { class: "soft" }, `A ${figure(row.advantage)}`),
    );
    const said = episode
      ? [el("span", { class: "begin" }, `${whole(row.tokens ?? 0)} steps`)]
      : [el("span", { class: "begin soft" }, row.prompt), el("span", { class: "begin" }, row.completion)];
    const onclick = () => this.choose(row.n).then(() => this.moved());
    return el("li", {}, button({ "aria-current": row.n === this.n && "true", "data-n": row.n, onclick }, head, ...said));
  }

  async choose(n) {
    this.n = n;
    for (const button of this.list.querySelectorAll("button")) {
      if (Number(button.dataset.n) === n) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
    const run = this.run;
    try {
      const group = await post("/api/runs/group", { run: run.id, n, generation: this.generation ?? 0 });
      if (this.run === run && this.n === n) this.group.show(run, group, n);
    } catch (error) {
      if (error.code === "moved") return this.look(this.wanted);
      notice(error.message);
    }
  }
}
