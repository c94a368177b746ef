// The box above the curves: the warnings of the chosen runs, and why a run failed.
import { post } from "../api.js";
import { button, el } from "../dom.js";
import { whole } from "./format.js";

const SILENT = "The process ended without a message. It may have been killed, or the machine may have stopped.";

export class Alerts {
  /** `about(run)` opens the About tab of a run. */
  constructor(node, about) {
    Object.assign(this, { node, about, shown: "", reasons: new Map() });
  }

  draw(runs) {
    this.runs = runs;
    const failed = runs.filter((run) => run.state === "failed").map((run) => this.failure(run));
    const kinds = Map.groupBy(runs.flatMap((run) => run.alerts.map((alert) => ({ run, alert }))), ({ alert }) => alert.rule);
    const said = [...kinds.values()].map((of) => ({ calm: of.every(({ alert }) => alert.calm), grave: of.some(({ alert }) => alert.grave && !alert.calm), of }));
    const loud = said.filter(({ calm }) => !calm).sort((one, other) => other.grave - one.grave).map((kind) => this.kind(kind));
    const calm = said.filter((kind) => kind.calm).map((kind) => this.kind(kind));
    const text = [...failed, ...loud, ...calm].map((row) => row.textContent).join("\n");
    if (text === this.shown) return;
    this.shown = text;
    const open = this.node.querySelector("details")?.open;
    const list = (rows, label) => el("ul", { class: "card plain", "aria-label": label }, ...rows);
    this.node.replaceChildren(
      ...(failed.length + loud.length ? [list([...failed, ...loud], "Warnings")] : []),
      ...(calm.length ? [el("details", { class: "calm", open }, el("summary", {}, `${calm.length === 1 ? "1 warning" : `${calm.length} warnings`}, no action needed`), list(calm, "Warnings that are over or explained"))] : []),
    );
  }

  /** Return the line of one kind of warning, over all runs that have it: its first and last step, and its count. */
  kind({ calm, grave, of }) {
    const first = Math.min(...of.map(({ alert }) => alert.step)), stands = of.some(({ alert }) => alert.ended === null);
    const last = Math.max(...of.map(({ alert }) => alert.ended ?? alert.step)), times = of.reduce((sum, { alert }) => sum + alert.count, 0);
    const when = stands ? `since step ${whole(first)}` : `from step ${whole(first)} to ${whole(last)}`;
    const loudest = of.find(({ alert }) => !alert.calm) ?? of[0];
    return el(
      "li",
      { class: `alert${grave ? " grave" : ""}${calm ? " past" : ""}` },
      el("strong", {}, loudest.alert.title),
      this.runs.length > 1 ? ` in ${of.length === 1 ? of[0].run.name : `${of.length} runs`} ` : " ",
      `${when}${times > 1 ? `, ${whole(times)} times` : ""}. `,
      el("span", { class: "soft" }, loudest.alert.says, " "),
      ...of.slice(0, 6).map(({ run }) => this.way(run, of.length > 1 ? run.name : "Show completions")),
    );
  }

  failure(run) {
    const key = `${run.id} ${run.version}`;
    if (!this.reasons.has(key)) {
      this.reasons.set(key, "");
      post("/api/runs/about", { run: run.id })
        .then(({ events }) => events.findLast((event) => event.kind === "failed")?.reason || SILENT)
        .catch((error) => error.message)
        .then((reason) => this.reasons.set(key, reason))
        .then(() => this.draw(this.runs));
    }
    const where = this.runs.length > 1 ? `in ${run.name} at step` : "at step";
    return el(
      "li",
      { class: "alert grave" },
      el("strong", {}, "Failed"),
      ` ${where} ${whole(run.step)}. `,
      el("span", { class: "soft" }, this.reasons.get(key), " "),
      this.way(run, "What happened"),
    );
  }

  way(run, label) {
    return button({ class: "link", onclick: () => this.about(run) }, label);
  }
}
