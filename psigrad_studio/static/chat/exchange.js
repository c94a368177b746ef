// One question with one or two answers. An answer is plain text while it is written; its Markdown is rendered at the end.
import { button, cap, el } from "../dom.js";
import { compared, read } from "../reading.js";

const ENDINGS = { stop: "ended by itself", length: "cut by the limit", stopped: "stopped" };
const SIDES = ["A", "B"];
const OFFERED = [["left", "A is better", "1"], ["right", "B is better", "2"], ["tie", "Tie", "3"], ["both_bad", "Both bad", "4"]];

export class Exchange {
  /** `name` is the model's name, or null if two models are compared. */
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
        el("h2", {}, title), el("div", { class: "words", dir: "auto" }, el("p", { class: "text" })), el("p", { class: "facts" })));
    this.choices = el("div", { class: "choices", tabindex: "-1" });
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

  /** End an answer: show its complete text, why it ended, and the seed that reproduces it. */
  end({ side, text, reason, tokens, seed }) {
    this.texts[side] = text;
    this.show(side);
    this.done[side] = true;
    this.answers[side].classList.remove("writing");
    const shown = text === "" ? "empty answer" : ENDINGS[reason];
    this.part(side, "facts").textContent = `${tokens} ${tokens === 1 ? "token" : "tokens"} · ${shown} · seed ${seed}`;
  }

  /** Show a complete answer in the chosen display, or as the difference from the other one. */
  show(side, difference = false) {
    const text = this.texts[side], other = this.texts[1 - side];
    this.part(side, "words").replaceChildren(difference && other !== undefined ? compared(text, other) : read(text));
  }

  /** Show the complete answers again, after a change of the display. */
  again(difference = false) {
    this.done.forEach((done, side) => { if (done) this.show(side, difference); });
  }

  fail(message) {
    this.failed = true;
    this.node.classList.add("out");
    for (const answer of this.answers) answer.classList.remove("writing");
    this.choices.replaceChildren(el("p", { class: "failure" }, message));
  }

  ask(choose, skip) {
    const buttons = OFFERED.map(([choice, title, key]) =>
      button({ "data-choice": choice, "aria-keyshortcuts": key, onclick: () => choose(choice) }, title, cap(key)));
    const differ = button({ class: "quiet", "aria-pressed": "false", "aria-keyshortcuts": "D", onclick: () => this.differ() }, "Difference", cap("D"));
    this.choices.replaceChildren(
      el("div", { class: "row", role: "group", "aria-label": "Which answer is better?" }, ...buttons),
      el("div", { class: "row" }, differ, button({ class: "quiet", onclick: skip }, "Skip")));
    this.choices.scrollIntoView({ block: "center" });
  }

  /** Show the difference of the two answers, or the answers again. */
  differ() {
    const pressed = this.choices.querySelector("[aria-pressed]"), differ = pressed.getAttribute("aria-pressed") === "false";
    pressed.setAttribute("aria-pressed", String(differ));
    this.again(differ);
  }

  /** Reveal the models' names. `undo` removes the stored choice. */
  reveal({ names, choice, note }, undo) {
    names.forEach((name, side) => {
      this.answers[side].querySelector("h2").textContent = `${SIDES[side]}: ${name}`;
      this.answers[side].classList.toggle("better", choice === ["left", "right"][side]);
    });
    const said = { left: `${names[0]} was better`, right: `${names[1]} was better`, tie: "A tie", both_bad: "Both bad" }[choice];
    this.stored = note === "";
    this.leave(note ? `${said}. ${note}` : `${said}. Stored in the labels, project “Chat comparisons”.`, this.stored ? undo : null);
    this.node.classList.toggle("out", choice === "both_bad");
  }

  leave(verdict, undo = null) {
    this.node.classList.add("out");
    this.choices.replaceChildren(el("p", { class: "verdict" }, verdict), ...(undo ? [button({ class: "quiet", onclick: undo }, "Undo")] : []));
  }
}
