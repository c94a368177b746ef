// One question with its answer, or with two. What a model wrote only ever becomes a text node.
import { el } from "../dom.js";

const ENDINGS = { stop: "ended by itself", length: "cut by the limit", stopped: "stopped" };
const SIDES = ["A", "B"];
const OFFERED = [["left", "A is better", "1"], ["right", "B is better", "2"], ["tie", "Tie", "3"], ["both_bad", "Both bad", "4"]];

export class Exchange {
  /** `name` is the model's, or null where two are compared. */
  constructor(content, name) {
    this.content = content;
    this.duel = null;
    this.failed = false;
    this.stored = false;
    const titles = name === null ? SIDES : [name];
    this.texts = titles.map(() => "");
    this.done = titles.map(() => false);
    this.answers = titles.map((title) =>
      el("section", { class: "answer writing", "aria-label": `Answer of ${title}` },
        el("h2", {}, title), el("p", { class: "text", dir: "auto" }), el("p", { class: "facts" })));
    this.choices = el("div", { class: "choices" });
    this.node = el("article", { class: "exchange" },
      el("p", { class: "said", dir: "auto" }, content),
      el("div", { class: name === null ? "answers two" : "answers" }, ...this.answers),
      this.choices);
  }

  get ended() {
    return this.failed || this.done.every(Boolean);
  }

  part(side, name) {
    return this.answers[side].querySelector(`.${name}`);
  }

  add(side, text) {
    this.texts[side] += text;
    this.part(side, "text").append(text);
  }

  /** The last word on an answer: its whole text, why it ended, and what repeats it. */
  end({ side, text, reason, tokens, seed }) {
    if (this.texts[side] !== text) this.part(side, "text").textContent = text;
    this.texts[side] = text;
    this.done[side] = true;
    this.answers[side].classList.remove("writing");
    const shown = text === "" ? "nothing written" : ENDINGS[reason];
    this.part(side, "facts").textContent = `${tokens} ${tokens === 1 ? "token" : "tokens"} · ${shown} · seed ${seed}`;
  }

  fail(message) {
    this.failed = true;
    this.node.classList.add("out");
    for (const answer of this.answers) answer.classList.remove("writing");
    this.choices.replaceChildren(el("p", { class: "failure" }, message));
  }

  ask(choose, skip) {
    const buttons = OFFERED.map(([choice, title, key]) =>
      el("button", { type: "button", "data-choice": choice, "aria-keyshortcuts": key, onclick: () => choose(choice) }, title, el("kbd", { "aria-hidden": "true" }, key)));
    this.choices.replaceChildren(
      el("div", { class: "row", role: "group", "aria-label": "Which answer is better?" }, ...buttons),
      el("button", { type: "button", class: "quiet", onclick: skip }, "Skip"));
    this.choices.scrollIntoView({ block: "center" });
  }

  /** Name the models. */
  reveal({ names, choice, note }) {
    names.forEach((name, side) => {
      this.answers[side].querySelector("h2").textContent = `${SIDES[side]}: ${name}`;
      this.answers[side].classList.toggle("better", choice === ["left", "right"][side]);
    });
    const said = { left: `${names[0]} was better`, right: `${names[1]} was better`, tie: "A tie", both_bad: "Both bad" }[choice];
    this.leave(note ? `${said}. ${note}` : `${said}. Stored in the labels, project “Chat comparisons”.`);
    this.node.classList.toggle("out", choice === "both_bad");
    this.stored = note === "";
  }

  leave(verdict) {
    this.node.classList.add("out");
    this.choices.replaceChildren(el("p", { class: "verdict" }, verdict));
  }
}
