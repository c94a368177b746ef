// One algorithm on the shared world: its name, its board, and the current frame of its playback.
import { button, el } from "../dom.js";
import { Board, signed } from "./board.js";
import { number } from "./chart.js";
import { Playback } from "./playback.js";

const FAMILIES = [["planning", "Planning, with the model"], ["prediction", "Prediction: the value of a policy, from episodes"], ["control", "Control: learning to act, from episodes"]];

export class Panel {
  /** `told` has the callbacks of Board, and replace(name), remove(), loaded(). */
  constructor(index, algorithm, algorithms, told) {
    Object.assign(this, { index, algorithm, algorithms, told, playback: null, warm: null });
    this.board = new Board(`${this.title} on the grid world`, told);
    const option = ([name, { title }]) => el("option", { value: name, selected: name === algorithm }, title);
    const groups = FAMILIES.map(([family, label]) =>
      el("optgroup", { label }, ...[...algorithms].filter(([, a]) => a.family === family).map(option)));
    this.select = el("select", { "aria-label": `Algorithm ${index + 1}`, onchange: () => told.replace(this.select.value) }, ...groups);
    this.removal = button({ class: "quiet", "aria-label": `Remove ${this.title}`, onclick: () => told.remove() }, "Remove");
    this.caption = el("p", { class: "caption" });
    this.failure = el("p", { class: "failure", hidden: true });
    const head = el("div", { class: "row between" }, this.select, this.removal);
    this.node = el("section", { class: "panel", "aria-label": this.title }, head, this.board.wrap, this.caption, this.failure);
  }

  get family() {
    return this.algorithms.get(this.algorithm).family;
  }

  get title() {
    return this.algorithms.get(this.algorithm).title;
  }

  /** Start a new playback, from zeros or from the {value, q} of a warm start. */
  start(form, warm) {
    this.playback?.stop();
    this.warm = warm;
    const values = { value: warm?.value ?? null, q: this.family === "control" ? (warm?.q ?? null) : null };
    this.playback = new Playback({ ...form, algorithm: this.algorithm, ...values }, this.family === "planning", () => this.told.loaded());
  }

  /** `mark` is {cell, carried, here}: the chosen cell, the carried one, and true if that is on this board. */
  draw(world, at, scale, mark, alone) {
    const frame = this.playback.at(at);
    // until the first frame arrives, keep the last values, drawn on the current world
    if (frame !== null || this.playback.failure !== null || this.shown === undefined) this.shown = frame;
    const fits = this.shown !== null && this.shown.value.length === world.rows * world.columns;
    this.board.draw(world, fits ? this.shown : null, scale, mark);
    this.removal.hidden = alone;
    this.failure.hidden = this.playback.failure === null;
    this.failure.textContent = this.playback.failure?.message ?? "";
    this.caption.hidden = this.playback.failure !== null;
    this.caption.textContent = frame === null ? "" : this.said(frame, at);
    this.node.classList.toggle("done", this.playback.ended && frame?.index === this.playback.last);
  }

  /** Return a description of the frame. */
  said(frame, at) {
    const parts = [];
    const ended = this.playback.ended && frame.index === this.playback.last;
    if (frame.step === "start") parts.push(this.warm === null ? "Start: all values are 0" : "Start: the previous values");
    else if (frame.step === "learn") parts.push(`${(frame.index * this.playback.request.options.episodes).toLocaleString("en")} episodes`, episode(frame.episode));
    else if (frame.step === "improve") parts.push(`Step ${frame.index}: improve, ${frame.changed === 1 ? "1 action" : `${frame.changed} actions`} changed`);
    else parts.push(`${frame.step === "evaluate" ? "Evaluate" : "Back up"}, step ${frame.index}: change ${number(frame.residual)}`);
    parts.push(`error ${number(frame.error)}${frame.bound === null ? "" : `, proven ≤ ${number(frame.bound)}`}`);
    if (ended && this.playback.note) parts.push(this.playback.note);
    else if (ended && frame.step !== "learn") parts.push(at > frame.index ? `done at step ${frame.index}` : "done");
    return parts.join(" · ");
  }
}

const episode = (one) => `the last ${one.terminated ? "ended with" : "was cut off with"} ${signed(one.return) || "0"} after ${(one.states.length - 1).toLocaleString("en")} steps`;
