// The About tab of one run: warnings, a recorded episode, first rows, events and settings.
import { picture as pictureOf, post } from "../api.js";
import { button, el, notice, wide } from "../dom.js";
import { figure, whole } from "./format.js";

/** Return the recorded episode, which is animated only while it is open. */
export function episodePicture(run) {
  const picture = el("img", { alt: "An episode of the trained policy, animated", width: "300" });
  const node = el("details", { class: "card episode" }, el("summary", {}, "Watch an episode of the trained policy"), picture);
  let address = null;
  node.addEventListener("toggle", async () => {
    picture.removeAttribute("src");
    if (address !== null) URL.revokeObjectURL(address);
    address = null;
    if (!node.open) return;
    try {
      address = await pictureOf(`/api/runs/picture?run=${run}`);
      if (node.open) picture.src = address;
    } catch (error) {
      notice(error.message);
    }
  });
  return node;
}

/** Return a setting for display. The studio sends Python's repr: None, True and False become words, lists lose their brackets. */
function setting(text) {
  const words = { None: "not set", True: "yes", False: "no", "[]": "none" };
  if (Object.hasOwn(words, text)) return words[text];
  return /^\[[^[\]{}]*\]$/.test(text) ? text.slice(1, -1).replace(/'([^']*)'/g, "$1") : text;
}

const table = (title, rows) => wide(title, el("table", {}, el("tbody", {}, ...rows)));

export class About {
  /** `open(run, step, n)` shows completions. `noted(run, {tags, note})` is called after a change of tags or note. */
  constructor(node, open, noted) {
    Object.assign(this, { node, open, noted, turn: 0 });
  }

  /** Show a run; with `watch`, its recorded episode is open. */
  async show(run, watch = false) {
    const turn = ++this.turn;
    try {
      const about = await post("/api/runs/about", { run: run.id });
      if (turn === this.turn) this.draw(about, watch);
    } catch (error) {
      notice(error.message);
    }
  }

  draw(run, watch) {
    const picture = run.picture ? episodePicture(run.id) : "";
    if (picture && watch) picture.open = true;
    this.node.replaceChildren(this.notes(run), picture, this.alerts(run), this.rows(run), this.events(run), this.settings(run));
  }

  /** Return the form of the user's tags and note. */
  notes(run) {
    const tags = el("input", { type: "text", value: run.tags.join(", "), maxlength: "400", placeholder: "baseline, paper", autocomplete: "off" });
    const note = el("textarea", { rows: "2", maxlength: "10000", placeholder: "Notes about this run" }, run.note);
    const said = el("span", { class: "soft small", role: "status" });
    let was = { tags: run.tags, note: run.note };
    const undo = button({ class: "quiet", hidden: true, onclick: () => put(was, "Reverted.") }, "Undo");
    const put = async (own, words) => {
      try {
        const kept = await post("/api/runs/notes", { run: run.id, ...own });
        [was, run.tags, run.note] = [{ tags: run.tags, note: run.note }, kept.tags, kept.note];
        [tags.value, note.value] = [kept.tags.join(", "), kept.note];
        said.textContent = words;
        undo.hidden = false;
        this.noted(run.id, kept);
      } catch (error) {
        notice(error.message);
      }
    };
    const keep = (event) => {
      event.preventDefault();
      return put({ tags: tags.value.split(",").map((tag) => tag.trim()).filter(Boolean), note: note.value }, "Saved.");
    };
    return el("form", { class: "card notes", onsubmit: keep }, el("label", {}, "Tags ", tags), el("label", {}, "Note ", note), el("div", { class: "row" }, el("button", { type: "submit" }, "Save"), undo, said));
  }

  alerts(run) {
    const said = run.alerts.map((alert) => {
      const ways = [el("span", { class: "soft small" }, "Look at"), ...alert.rollouts.map((row) => this.way(run, row))];
      const until = alert.ended === null ? "since" : `until step ${whole(alert.ended)}, from`;
      return el(
        "li",
        { class: alert.ended === null ? (alert.grave ? "alert grave" : "alert") : "alert past" },
        el("strong", {}, alert.title),
        ` ${until} step ${whole(alert.step)}; worst at step ${whole(alert.worst_step)}. `,
        el("span", { class: "soft" }, `${alert.says}${alert.said ? ` ${alert.said}` : ""}`),
        alert.rollouts.length > 0 && el("div", { class: "row worst" }, ...ways),
      );
    });
    const list = said.length ? el("ul", { class: "plain" }, ...said) : el("p", { class: "soft" }, "No warnings.");
    return el("section", { class: "card" }, el("h2", {}, "Warnings"), list);
  }

  way(run, row) {
    const said = `#${row.k} of step ${whole(row.step)}, reward ${figure(row.reward)}`;
    return button({ onclick: () => this.open(run.id, row.step, row.n) }, said);
  }

  /** Return the first rows as the model reads them, with the kind of each part: prompt, trained, masked or sampled. */
  rows(run) {
    if (!run.first_rows.length) return "";
    const kinds = ["prompt", "trained", "masked", "sampled"];
    const legend = el("p", { class: "row small" }, ...kinds.map((kind) => el("span", { class: `piece ${kind}` }, kind)));
    const piece = ([kind, text]) => el("span", { class: `piece ${kinds.includes(kind) ? kind : ""}`, title: kind }, text);
    const shown = run.first_rows.map(({ title, pieces }) => {
      const said = el("div", { class: "said", tabindex: "0", role: "group", "aria-label": title }, ...pieces.map(piece));
      return el("div", {}, el("p", { class: "soft small" }, title), said);
    });
    return el("section", { class: "card" }, el("h2", {}, "First rows, as the model reads them"), legend, ...shown);
  }

  events(run) {
    const rows = run.events.map(({ time, kind, ...rest }) => {
      const when = Number(time) > 0 ? new Date(Number(time) * 1000).toLocaleString() : "";
      const more = Object.entries(rest).filter(([, v]) => v && v !== "None").map(([k, v]) => `${k} ${v}`).join(", ");
      return el("tr", {}, el("td", { class: "soft" }, when), el("td", {}, kind ?? ""), el("td", {}, more));
    });
    const shown = rows.length ? table("Events", rows) : el("p", { class: "soft" }, "No events.");
    return el("section", { class: "card" }, el("h2", {}, "What happened"), shown);
  }

  settings(run) {
    const rows = Object.entries(run.settings).map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, setting(value))));
    return el("section", { class: "card" }, el("h2", {}, "Settings"), table("Settings", rows));
  }
}
