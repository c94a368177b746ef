// A group side by side: the prompt once, then each completion with its reward, the reward's parts, advantage and tokens.
import { get, post } from "../api.js";
import { button, el, notice, select } from "../dom.js";
import { chosen, choose, compared, read } from "../reading.js";
import { episodePicture } from "./about.js";
import { figure, whole } from "./format.js";
import { MEASURES, measures, reach, tokenText } from "./tokens.js";

const OWN = "Sent from runs";
const KINDS = { train: "training", eval: "held out", episode: "episode" };

const BARE = "There are no figures per token here: a run records them for the first prompts of each step (record_tokens).";

const message = ({ role, content }, reading) =>
  el("div", { class: "message" }, role ? el("span", { class: "role soft" }, role) : null, el("div", { class: "said" }, read(content, reading)));

export class Group {
  constructor() {
    // `asked` is the user's choice between Markdown and plain text, if there is one
    Object.assign(this, { chosen: [], measure: "logprob", asked: null, projects: null });
    this.node = el("section", { class: "group", "aria-label": "Group" });
    this.clear();
  }

  clear() {
    this.shown = null;
    this.node.replaceChildren(el("p", { class: "card soft" }, "Choose a completion to see its whole group."));
  }

  show(run, group, n) {
    Object.assign(this, { run, shown: group, n, chosen: [], offered: measures(group.members) });
    if (!this.offered.includes(this.measure)) this.measure = this.offered[0] ?? "";
    // only unrendered tokens have colours
    this.markdown = this.asked ?? (this.offered.length === 0 && chosen() === "rendered");
    this.draw();
  }

  draw() {
    const group = this.shown, episode = group.kind === "episode";
    const parts = [`Step ${whole(group.step)}`, KINDS[group.kind] ?? group.kind, episode || group.row === null ? "" : `prompt ${group.row}`];
    const title = parts.filter(Boolean).join(" · ");
    this.readout = el("p", { class: "token-said soft", role: "status" }, this.offered.length ? "Point at a token, or move with the arrow keys." : "");
    const said = episode ? [] : group.prompt.map((each) => message(each, this.markdown ? "rendered" : "written"));
    const head = el(
      "div",
      { class: "card prompt" },
      el("div", { class: "row between" }, el("h2", {}, title), el("span", { class: "soft small" }, group.said), episode ? null : this.ways()),
      ...said,
    );
    this.members = el("div", { class: "members" });
    this.sending = el("div", { class: "card sending", hidden: true });
    const bare = group.kind === "train" && !this.offered.length;
    if (bare) head.append(el("p", { class: "soft small" }, BARE));
    // show an explanation that is the same for all members only once
    this.common = group.members.length > 1 && group.members.every((m) => m.why === group.members[0].why) ? group.members[0].why : "";
    if (this.common) head.append(el("p", { class: "why" }, this.common));
    this.node.replaceChildren(head, ...(group.picture ? [episodePicture(this.run.id)] : []), ...(this.offered.length && !this.markdown ? [this.colours()] : []), this.members, this.sending);
    this.fill();
    this.offer();
  }

  /** True if Markdown and formulas are rendered. Tokens have colours only if they are not. */
  ways() {
    const box = el("input", { type: "checkbox", checked: this.markdown, onchange: () => {
      this.markdown = this.asked = box.checked;
      choose(box.checked ? "rendered" : "written");
      this.draw();
      this.node.querySelector(".ways input").focus();
    } });
    return el("label", { class: "tick small soft ways" }, box, "Markdown");
  }

  colours() {
    const options = [...this.offered.map((name) => [name, MEASURES[name].title]), ["", "nothing"]];
    const onchange = () => {
      this.measure = measure.value;
      this.fill();
    };
    const measure = select({ id: "measure", onchange }, options, this.measure);
    this.key = el("span", { class: "soft small" });
    return el("div", { class: "card colours" }, el("label", { class: "row" }, "Colour by ", measure), this.key, this.readout);
  }

  fill() {
    const group = this.shown, most = this.measure ? reach(group.members, this.measure) : 0;
    if (this.key && !this.markdown) this.key.textContent = this.measure ? `${MEASURES[this.measure].says}${this.full(most)}` : "";
    const episode = group.kind === "episode";
    this.members.classList.toggle("few", group.members.length < 3);
    this.members.replaceChildren(...group.members.map((m) => this.member(m, most, episode)));
  }

  /** Return the text on the value at which a colour is strongest. */
  full(most) {
    if (this.measure === "mask" || most === 0) return "";
    return `; full colour at ${figure((MEASURES[this.measure].middle ?? 0) + (this.measure === "logprob" ? -most : most))}`;
  }

  member(m, most, episode) {
    const label = `Completion ${m.k ?? "without a number"}`;
    const parts = Object.entries(m.parts), alone = episode || this.shown.members.length < 2;
    const box = el("input", { type: "checkbox", checked: this.chosen.includes(m.n), onchange: () => this.choose(m, box) });
    const text = !this.markdown && m.tokens && m.tokens.text.length > 0 && this.shown.names
      ? tokenText(m.tokens, this.measure, most, label, (said) => { this.readout.textContent = said; })
      : el("div", { class: "said" }, m.completion ? read(m.completion, this.markdown ? "rendered" : "written") : episode ? "" : "(empty)");
    const facts = [
      ["reward", m.reward === null ? m.status || "none" : figure(m.reward)],
      ...(episode ? [] : [["advantage", m.advantage === null ? "none" : figure(m.advantage)]]),
      [episode ? "steps" : "tokens", m.length === null ? "–" : whole(m.length)],
      ...(m.turns ? [["turns", whole(m.turns)]] : []),
      ...(m.finish ? [["ended", m.finish === "length" ? "cut" : m.finish]] : []),
    ];
    return el(
      "article",
      { class: m.n === this.n ? "card member asked" : "card member", "aria-label": label },
      el("div", { class: "row between" }, el("h3", {}, episode ? `Episode ${m.k}` : `#${m.k ?? "–"}`), alone ? null : el("label", { class: "tick small soft" }, box, "compare")),
      el("dl", { class: "facts" }, ...facts.map(([name, said]) => el("div", {}, el("dt", {}, name), el("dd", {}, said)))),
      parts.length ? el("dl", { class: "parts" }, ...parts.map(([name, v]) => el("div", {}, el("dt", {}, name), el("dd", {}, figure(v))))) : null,
      m.why && !this.common ? el("p", { class: "why" }, m.why) : null,
      m.reason && m.status !== "unscored" ? el("p", { class: "why bad" }, m.reason) : null,
      ...m.cuts.map((said) => el("p", { class: "why" }, said)),
      text,
      m.left_out ? el("p", { class: "soft small" }, `${whole(m.left_out)} more characters are not shown.`) : null,
    );
  }

  choose(m, box) {
    this.chosen = this.chosen.filter((n) => n !== m.n);
    if (box.checked) this.chosen.push(m.n);
    if (this.chosen.length > 2) {
      this.chosen.shift();
      this.fill();
    }
    this.offer();
  }

  async offer() {
    this.sending.hidden = true;
    if (this.chosen.length !== 2) return;
    try {
      this.projects ??= await get("/api/runs/projects");
    } catch (error) {
      notice(error.message);
      return;
    }
    // other completions may have been chosen while the projects were loaded
    if (this.chosen.length !== 2) return;
    const [a, b] = this.chosen.map((n) => this.shown.members.find((m) => m.n === n));
    const options = this.projects.map(({ id, name }) => [id, name]);
    if (!this.projects.some((p) => p.name === OWN)) options.push(["", `a new project, “${OWN}”`]);
    const project = select({ "aria-label": "Project" }, options);
    const send = button({ class: "primary", onclick: () => this.send(a, b, project.value, send) }, "Send");
    const side = (one, other) => el("section", { "aria-label": `Completion ${one.k}` }, el("h3", {}, `#${one.k}`),
      el("div", { class: "said", tabindex: "0", role: "group", "aria-label": `Text of ${one.k}` }, compared(one.completion, other.completion)));
    const apart = el("div", { class: "apart", hidden: true }, side(a, b), side(b, a));
    const onclick = () => {
      apart.hidden = !apart.hidden;
      differ.setAttribute("aria-pressed", String(!apart.hidden));
    };
    const differ = button({ "aria-pressed": "false", onclick }, "Difference");
    this.sending.replaceChildren(
      apart,
      el("p", {}, `#${a.k} and #${b.k}: see where they differ, or send them, blind and in random order, to the labelling desk:`),
      el("div", { class: "row" }, differ, project, send),
    );
    this.sending.hidden = false;
  }

  async send(a, b, project, button) {
    button.disabled = true;
    try {
      const said = await post("/api/runs/send", { run: this.run.id, n: a.n, other: b.n, generation: this.shown.generation, project: project ? Number(project) : null });
      this.projects = null;
      const told = said.tasks ? `Sent to the project “${said.name}”. ` : `“${said.name}” has this pair already. `;
      this.sending.replaceChildren(
        el("p", { role: "status" }, told, el("a", { href: `/label#project=${said.project}&part=work` }, "Go to the labelling desk")),
      );
    } catch (error) {
      button.disabled = false;
      notice(error.message);
    }
  }
}
