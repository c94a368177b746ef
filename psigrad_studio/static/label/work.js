// The labelling desk: one task after the other, by keyboard or mouse.
import { post } from "../api.js";
import { $, button, cap, el, notice } from "../dom.js";
import { choose, chosen } from "../reading.js";
import { controls } from "./answers.js";
import { text } from "./forms.js";
import { submit } from "./send.js";
import * as texts from "./texts.js";

const TICK = 5000;
const RECOUNT = 20;
const LATER = "All tasks are answered, skipped by you, or being answered by others. Tasks that others leave come back, so look again later.";

export class Work {
  /** Show the tasks of `project` inside `root`, until `close` is called. */
  constructor(root, project) {
    Object.assign(this, { root, project, task: null, ask: null, busy: false, left: null, mine: { answered: 0, skipped: 0 }, since: 0 });
    this.stage = el("div", { class: "stage" });
    this.status = el("p", { class: "visually-hidden", role: "status" });
    this.lease = el("span", { class: "lease soft" });
    this.count = el("span", { class: "soft" });
    this.bar = el("progress", { max: "1", value: "0", "aria-label": "Your progress" });
    this.reason = text(null, { class: "reason", maxlength: 10000, "aria-label": "Reason, optional", placeholder: "Why? (optional)" });
    const tool = (label, key, onclick) => button({ class: "quiet", onclick }, `${label} `, cap(key));
    this.buttons = { skip: tool("Skip", "S", () => this.skip()), undo: tool("Undo", "U", () => this.undo()), help: tool("Keys", "?", () => this.help()) };
    this.reading = chosen();
    this.readings = readings(project, (reading) => this.read(reading));
    this.dialog = keys(project);
    root.replaceChildren(
      el("div", { class: "row between" }, el("div", { class: "row how" }, this.bar, this.count), this.readings, this.lease),
      this.stage,
      el("div", { class: "row foot" }, this.reason, ...Object.values(this.buttons)),
      this.status,
      this.dialog,
    );
    this.touched = Date.now();
    this.timer = setInterval(() => this.tick(), TICK);
    this.stop = new AbortController();
    const listen = (name, listener) => document.addEventListener(name, listener, { passive: name !== "keydown", signal: this.stop.signal });
    listen("keydown", (event) => this.key(event));
    for (const name of ["pointerdown", "keydown", "wheel", "touchmove"]) listen(name, () => { this.touched = Date.now(); });
    this.next();
  }

  close() {
    clearInterval(this.timer);
    this.stop.abort();
  }

  /** Fetch the next task, or the one that is still leased to this person. */
  async next() {
    try {
      const count = this.left === null || this.since++ % RECOUNT === 0;
      const found = await post("/api/label/next", { project: this.project.id, count });
      if (this.stop.signal.aborted) return;
      this.mine = found.mine;
      if (count) this.left = found.left;
      this.show(found.task);
    } catch (error) {
      this.failed(error);
      if (this.ask === null && error.status !== 401) this.wait("The next task could not be loaded", error.message);
    }
  }

  show(task) {
    this.task = task;
    this.warned = false;
    this.reason.value = "";
    this.progress();
    this.reason.hidden = this.buttons.skip.hidden = this.readings.hidden = task === null;
    if (task === null) {
      this.ask = null;
      this.lease.textContent = "";
      this.wait("No tasks are left for you now", LATER);
      return;
    }
    this.shownAt = performance.now();
    this.held(task.lease_ms);
    this.ask = controls(this.project, task, (answer) => this.vote(answer));
    this.asked = el("section", { class: "asked card", "aria-label": "Prompt" });
    this.stage.replaceChildren(this.asked, this.ask.node);
    this.read(this.reading);
    this.status.textContent = "The next task.";
    $("main").focus({ preventScroll: true });
    scrollTo(0, 0);
  }

  /** Show the texts rendered or as written, or the difference of two completions. */
  read(reading) {
    this.reading = reading;
    if (reading !== "difference") choose(reading);
    for (const button of this.readings.children) button.setAttribute("aria-pressed", button.dataset.reading === reading);
    if (!this.task) return;
    this.asked.replaceChildren(texts.prompt(this.task.prompt, reading === "difference" ? chosen() : reading));
    this.ask.read(reading);
  }

  progress() {
    const { answered, skipped } = this.mine;
    const all = answered + skipped + (this.left ?? 0);
    this.bar.value = all ? (answered + skipped) / all : 1;
    this.count.textContent = `${answered} answered${skipped ? `, ${skipped} skipped` : ""} · ${this.left ?? "?"} left`;
    this.buttons.undo.disabled = answered + skipped === 0;
  }

  vote(answer) {
    const ms = Math.round(performance.now() - this.shownAt);
    this.send("/api/label/vote", { assignment: this.task.assignment, ...answer, reason: this.reason.value.trim() || null, client_ms: ms });
  }

  skip() {
    if (this.task) this.send("/api/label/skip", { assignment: this.task.assignment, reason: this.reason.value.trim() || null });
  }

  undo() {
    this.send("/api/label/undo", { project: this.project.id });
  }

  /** Send one submission at a time. The page keeps the answer until the studio has stored it on disk. */
  async send(path, content) {
    if (this.busy) return;
    this.busy = true;
    this.root.classList.add("sending");
    try {
      const receipt = await submit(path, content, (error) => notice(`${error.message} Trying again; nothing is lost while this page stays open.`));
      if (receipt.action === "undo") this.left = this.left === null ? null : this.left + 1;
      else if (this.left) this.left -= 1;
      this.ask = null; // ignore keys until the next task arrives
      await this.next();
      if (receipt.action === "undo") this.say("Undone. Answer again.");
    } catch (error) {
      this.failed(error);
      if (error.status === 409 && path !== "/api/label/undo") await this.next();
    } finally {
      this.busy = false;
      this.root.classList.remove("sending");
    }
  }

  say(text) {
    this.status.textContent = text;
    notice(text, 3);
  }

  failed(error) {
    if (error.status !== 401) return notice(error.message, 8);
    this.stage.replaceChildren(loggedOut());
    this.task = this.ask = null;
  }

  /** Show why there is no task now, with a button to look again. */
  wait(title, why) {
    const card = done(title, why);
    card.append(button({ onclick: () => this.next() }, "Look again"));
    this.stage.replaceChildren(card);
  }

  held(milliseconds) {
    this.until = Date.now() + milliseconds;
    this.span = milliseconds;
    this.tick();
  }

  /** Renew the lease while the person is active, and report when it has expired. */
  async tick() {
    if (!this.task) return;
    const rest = this.until - Date.now();
    this.lease.classList.toggle("late", rest < 60_000 && rest < this.span / 2);
    this.lease.textContent = rest > 0 ? `reserved for you for ${span(rest)}` : "no longer reserved for you";
    if (rest <= 0 && !this.warned) {
      this.warned = true;
      this.say("The time for this task is up. Your answer still counts unless somebody else gets the task first.");
    }
    if (rest > this.span / 2 || rest <= 0 || Date.now() - this.touched > this.span / 2 || this.busy || this.renewing) return;
    this.renewing = true;
    try {
      const { lease_ms: kept } = await post("/api/label/renew", { assignment: this.task.assignment });
      this.held(kept);
    } catch (error) {
      if (error.status === 409 && !this.warned) {
        this.warned = true;
        notice(error.message, 8);
      }
    } finally {
      this.renewing = false;
    }
  }

  help() {
    if (this.dialog.open) this.dialog.close();
    else this.dialog.showModal();
  }

  key(event) {
    const typing = event.target.matches?.("input[type=text], textarea, [contenteditable]");
    if (typing && event.key === "Escape") $("main").focus({ preventScroll: true });
    if (event.altKey || event.metaKey || event.isComposing || event.repeat || typing || this.busy) return;
    if (event.ctrlKey) {
      if (event.key.toLowerCase() === "z" && !event.shiftKey) {
        event.preventDefault();
        this.undo();
      }
      return;
    }
    if (event.target.closest?.("select, textarea, input, dialog")) return;
    if ((event.key === "Enter" || event.key === " ") && event.target.closest?.("a, button, summary")) return;
    if (event.key === "?") return void this.help();
    if (!single() && event.key.length === 1) return;
    const own = this.ask?.key(event);
    if (own) return void event.preventDefault();
    const other = this.reading === "written" ? "rendered" : "written", apart = this.reading === "difference" ? chosen() : "difference";
    const reading = { m: () => this.read(other), ...(this.project.kind === "pair" ? { d: () => this.read(apart) } : {}) };
    const act = { s: () => this.skip(), u: () => this.undo(), r: () => this.reason.focus(), ...reading }[event.key.toLowerCase()];
    if (act && !event.shiftKey) {
      event.preventDefault();
      act();
    }
  }
}

/** Return a card that is shown instead of a task. */
export const done = (title, ...why) => el("div", { class: "card done" }, el("h2", {}, title), el("p", { class: "soft" }, ...why));

export const loggedOut = () =>
  done("You are logged out", el("a", { href: "/join" }, "Log in again"), " and continue. On the studio's own machine, open the address that psigrad studio printed.");

const span = (ms) => (ms >= 90_000 ? `${Math.round(ms / 60_000)} min` : `${Math.ceil(ms / 1000)} s`);
const SINGLE = "psigrad-label-keys";
const single = () => localStorage.getItem(SINGLE) !== "off";

/** Return the buttons that choose the display of texts. */
function readings(project, read) {
  const offered = [["rendered", "Rendered", "M"], ["written", "As written", "M"], ...(project.kind === "pair" ? [["difference", "Difference", "D"]] : [])];
  const way = ([reading, label, key]) =>
    button({ class: "quiet", "data-reading": reading, "aria-keyshortcuts": key, title: `${label} (${key})`, onclick: () => read(reading) }, label);
  return el("div", { class: "row tight readings", role: "group", "aria-label": "How the texts are shown" }, ...offered.map(way));
}

function keys(project) {
  const rows = project.questions.length ? [
    [["1", "…"], "answer the marked question; press letters where they are shown"],
    [["↑", "↓"], "move between questions"],
    project.questions.some((each) => each.why) && [["W"], "give a reason for the last answer"],
    [["Enter"], "submit all"],
  ] : {
    pair: [
      [["A", "←"], "A is better"],
      [["B", "→"], "B is better"],
      project.ties && [["T"], "tie"],
      project.both_bad && [["X"], "both bad"],
      project.strengths && [["1", "…", String(project.strengths)], "strength, after A or B"],
      project.strengths && [["Enter"], "skip the strength"],
    ],
    ranking: [
      [["↑", "↓"], "move between completions"],
      [["A", "B", "…"], "select that completion"],
      [["Shift", "↑"], "move it up"],
      [["Shift", "↓"], "move it down"],
      project.ties && [["="], "as good as the one above"],
      [["Enter"], "submit the order"],
    ],
    "rating-5": [[["1", "…", "5"], "the rating"]],
    "rating-10": [[["1", "…", "9"], "the rating"], [["0"], "ten"]],
  }[project.kind];
  const all = [
    ...rows,
    [["S"], "skip; somebody else gets it"],
    [["U"], "undo, also Ctrl+Z; press again for earlier answers"],
    [["R"], "give a reason; Esc leaves the field"],
    [["M"], "show texts rendered or as written"],
    project.kind === "pair" && [["D"], "show the difference of A and B, word by word"],
    [["?"], "this list"],
  ].filter(Boolean);
  const box = el("input", { type: "checkbox", checked: single(), onchange: () => localStorage.setItem(SINGLE, box.checked ? "on" : "off") });
  return el(
    "dialog",
    { class: "keys card", "aria-labelledby": "keys-title" },
    el("h2", { id: "keys-title" }, "Keys"),
    el("dl", {}, ...all.map(([caps, what]) => el("div", {}, el("dt", {}, ...caps.map((key) => el("kbd", {}, key))), el("dd", {}, what)))),
    el("label", { class: "row" }, box, "Letters and digits act immediately"),
    el("form", { method: "dialog" }, el("button", {}, "Close")),
  );
}
