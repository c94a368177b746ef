// A form for a new project, or for changes to an existing one.
import { post } from "../api.js";
import { el, select } from "../dom.js";
import { field, form, number, text, tick } from "./forms.js";
import { GRADES } from "./grades.js";
import { questions } from "./wording.js";

/** The kinds of projects: name and description. */
const KINDS = {
  pair: ["Two side by side", "Which of two completions is better."],
  ranking: ["Ranking", "Up to twelve completions, put in order."],
  "rating-5": ["Rating from 1 to 5", "One completion at a time, from 1 to 5."],
  "rating-10": ["Rating from 1 to 10", "One completion at a time, from 1 to 10."],
  "own-pair": ["Two side by side, only custom questions", "Two completions, with only your custom questions."],
  "own-one": ["One completion, only custom questions", "One completion at a time, with only your custom questions."],
};
const OWN = { "own-pair": "pair", "own-one": "rating-5" };
const NEW = { name: "", kind: "pair", instructions: "", overlap: 1, lease_s: 600, ties: true, both_bad: true, strengths: 0, questions: [], overall: true, checks: 10 };
const RAISED = "You can raise this number later, but not lower it.";
const RESERVED = "Until then only the person who sees the task can answer it.";
const kindOf = (project) => (project.overall ? project.kind : project.kind === "pair" ? "own-pair" : "own-one");

/** Return a description of a project's questions. */
export const asks = (project) => KINDS[kindOf(project)][0] + (project.overall && project.questions.length ? `, custom questions: ${project.questions.length}` : "");

function strengths(chosen) {
  const words = (n) => Array.from({ length: n }, (_, i) => GRADES(i + 1, n)).join(", ");
  const offered = [...new Set([0, 2, 3, 4, 5, chosen])].sort();
  return select({ name: "strengths" }, offered.map((n) => [n, n ? `${n} grades: ${words(n)}` : "not asked"]), chosen);
}

/** `done(number)` is called when the project has been created or changed. */
export function projectForm(project, done) {
  const old = project ?? NEW, minutes = Math.max(1, Math.round(old.lease_s / 60));
  const said = el("small", { class: "soft" });
  const kinds = Object.entries(KINDS).map(([value, [label]]) => [value, label]);
  const kind = select({ name: "kind", disabled: project !== null, onchange: adapt }, kinds, kindOf(old));
  const own = questions(old.questions, () => kind.value);
  const tied = tick("ties", "Allow ties", old.ties), bad = tick("both_bad", "Allow “both bad”", old.both_bad);
  const count = (name, min, max) => number(name, { value: old[name], min, max, required: true });
  const pairs = el(
    "div",
    { class: "lines" },
    bad,
    field("How much better", strengths(old.strengths)),
    field("Attention checks per 100 tasks", count("checks", 0, 50), "Checks are imported pairs with a known answer. Everybody gets them at random times."),
  );
  const people = field("People who answer each task", count("overlap", project ? old.overlap : 1, 1000), project && RAISED);
  const lease = field("Minutes that a task is reserved", number("lease", { value: minutes, min: 1, max: 10080, required: true }), RESERVED);

  function adapt() {
    said.textContent = KINDS[kind.value][1];
    pairs.hidden = !kind.value.endsWith("pair");
    bad.hidden = kind.value !== "pair";
    tied.hidden = !["pair", "ranking"].includes(kind.value);
    own.node.hidden = own.node.disabled = kind.value === "ranking";
    own.adapt();
  }

  async function send({ kind: chosen, lease: reserved, ...given }) {
    const settings = {
      ...given,
      lease_s: reserved === minutes ? old.lease_s : reserved * 60,
      strengths: chosen.endsWith("pair") ? Number(given.strengths) : 0,
      questions: chosen === "ranking" ? [] : own.given(),
    };
    if (project === null) {
      done((await post("/api/label/create", { ...settings, kind: OWN[chosen] ?? chosen, overall: !(chosen in OWN) })).project);
    } else {
      await post("/api/label/change", { project: project.id, ...settings });
      done(project.id);
    }
  }

  adapt();
  const made = form(
    project ? "Save" : "Create the project",
    [
      field("Name", text("name", { value: old.name, required: true, maxlength: 120 })),
      el("label", { class: "line" }, el("span", {}, "Question"), kind, said),
      field("Instructions", el("textarea", { name: "instructions", rows: 3, maxlength: 20000 }, old.instructions), "Shown above every task."),
      tied,
      pairs,
      own.node,
      el("div", { class: "pairs" }, people, lease),
    ],
    send,
  );
  return project ? el("div", { class: "columns" }, made, closing(project, done)) : made;
}

function closing({ id, closed }, done) {
  const say = closed ? "The project is closed and takes no answers." : "A closed project takes no answers; results and exports stay.";
  return form(closed ? "Open again" : "Close the project", [el("p", {}, say)], async () => {
    await post("/api/label/change", { project: id, closed: !closed });
    done(id);
  });
}
