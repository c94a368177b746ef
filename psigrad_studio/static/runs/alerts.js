// Above the curves: what the rules warn of in the chosen runs, and why a run failed.
import { post } from "../api.js";
import { el } from "../dom.js";
import { whole } from "./format.js";

const SILENT = "Its process ended without a word: it may have been killed, or the machine stopped.";

export class Alerts {
  /** `about(run)` shows all that is known of a run. */
  constructor(node, about) {
    Object.assign(this, { node, about, shown: "", reasons: new Map() });
  }

  draw(runs) {
    this.runs = runs;
    const rows = runs.flatMap((run) => [...(run.state === "failed" ? [this.failure(run)] : []), ...run.alerts.map((alert) => this.alert(run, alert))]);
    const text = rows.map((row) => row.textContent).join("\n");
    if (text === this.shown) return;
    this.shown = text;
    this.node.replaceChildren(...(rows.length ? [el("ul", { class: "card plain", "aria-label": "Alerts" }, ...rows)] : []));
  }

  alert(run, alert) {
    return this.row(run, alert.grave, alert.title, `since step ${whole(alert.step)}. `, alert.says, "Which completions");
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
    return this.row(run, true, "Failed", `at step ${whole(run.step)}. `, this.reasons.get(key), "What happened");
  }

  row(run, grave, title, when, says, way) {
    return el(
      "li",
      { class: grave ? "alert grave" : "alert" },
      el("strong", {}, title),
      this.runs.length > 1 ? ` in ${run.name} ` : " ",
      when,
      el("span", { class: "soft" }, says, " "),
      el("button", { type: "button", class: "link", onclick: () => this.about(run) }, way),
    );
  }
}
