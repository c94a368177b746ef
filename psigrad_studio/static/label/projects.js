// A form for a new project, or for what can be changed of one.
import { post } from "../api.js";
import { el } from "../dom.js";
import { GRADES } from "./grades.js";
import { questions } from "./wording.js";

const KINDS = {
  pair: "Two side by side", ranking: "Ranking", "rating-5": "Rating from 1 to 5", "rating-10": "Rating from 1 to 10",
  "own-pair": "Two side by side, only custom questions", "own-one": "One completion, only custom questions",
};
const SAY = {
  pair: "Which of two completions is better.",
  ranking: "Up to twelve completions, put in order.",
  "rating-5": "One completion at a time, from 1 to 5.",
  "rating-10": "One completion at a time, from 1 to 10.",
  "own-pair": "Two completions, with only your custom questions.",
  "own-one": "One completion at a time, with only your custom questions.",
};
const OWN = { "own-pair": "pair", "own-one": "rating-5" };
const kindOf = (project) => (project.overall ? project.kind : project.kind === "pair" ? "own-pair" : "own-one");

/** What a project asks, in words. */
export const asks = (project) => KINDS[kindOf(project)] + (project.overall && project.questions.length ? `, and ${project.questions.length} of your own` : "");

let fields = 0;

/** A labelled control; what is said below it is its description. */
export function field(label, input, say) {
  const id = `field-${++fields}`;
  input.setAttribute("aria-labelledby", id);
  if (say) input.setAttribute("aria-describedby", `${id}-say`);
  return el("label", { class: "line" }, el("span", { id }, label), input, say ? el("small", { class: "soft", id: `${id}-say` }, say) : null);
}

/** A form whose button sends; what is refused is said above the button. */
export function form(label, controls, send, attributes = {}) {
  const trouble = el("p", { class: "failure", role: "alert", hidden: true });
  const button = el("button", { type: "submit", class: "primary" }, label);
  async function submit(event) {
    event.preventDefault();
    trouble.hidden = true;
    button.disabled = true;
    try {
      await send();
    } catch (error) {
      trouble.textContent = error.message;
      trouble.hidden = false;
    } finally {
      button.disabled = false;
    }
  }
  return el("form", { class: "card lines", onsubmit: submit, ...attributes }, ...controls, trouble, el("div", { class: "row" }, button));
}

const number = (value, min, max) => el("input", { type: "number", value, min, max, step: 1, required: true });

/** `done(number)` is called when the project is made or changed. */
export function projectForm(project, done) {
  const old = project ?? { name: "", kind: "pair", instructions: "", overlap: 1, lease_s: 600, ties: true, both_bad: true, strengths: 0, questions: [], overall: true, checks: 10 };
  const name = el("input", { type: "text", value: old.name, required: true, maxlength: 120, autocomplete: "off" });
  const said = el("small", { class: "soft" });
  const kind = el(
    "select",
    { disabled: project !== null, onchange: adapt },
    ...Object.entries(KINDS).map(([value, label]) => el("option", { value, selected: value === kindOf(old) }, label)),
  );
  const instructions = el("textarea", { rows: 3, maxlength: 20000 }, old.instructions);
  const overlap = number(old.overlap, old.overlap > 1 && project ? old.overlap : 1, 1000);
  const lease = number(Math.max(1, Math.round(old.lease_s / 60)), 1, 10080);
  const ties = el("input", { type: "checkbox", checked: old.ties });
  const bad = el("input", { type: "checkbox", checked: old.both_bad });
  const strengths = el(
    "select",
    {},
    ...[...new Set([0, 2, 3, 4, 5, old.strengths])].sort().map((n) => el("option", { value: n, selected: n === old.strengths }, n ? `${n} grades: ${Array.from({ length: n }, (_, i) => GRADES(i + 1, n)).join(", ")}` : "not asked")),
  );
  const checks = number(old.checks, 0, 50);
  const own = questions(old.questions, () => kind.value);
  const pairs = el(
    "div",
    { class: "lines inner" },
    el("label", { class: "row" }, bad, "“Both bad” may be chosen"),
    field("How much better", strengths),
    field("Attention checks per 100 tasks", checks, "Checks are imported pairs with a known answer. Everybody gets them at random places."),
  );
  const tied = el("label", { class: "row" }, ties, "Ties may be chosen");

  function adapt() {
    said.textContent = SAY[kind.value];
    pairs.hidden = !kind.value.endsWith("pair");
    bad.parentElement.hidden = kind.value !== "pair";
    tied.hidden = !["pair", "ranking"].includes(kind.value);
    own.node.hidden = own.node.disabled = kind.value === "ranking";
    own.adapt();
  }

  async function send() {
    const settings = {
      name: name.value,
      instructions: instructions.value,
      overlap: Number(overlap.value),
      lease_s: project && lease.value === lease.defaultValue ? old.lease_s : Number(lease.value) * 60,
      ties: ties.checked,
      both_bad: bad.checked,
      strengths: kind.value.endsWith("pair") ? Number(strengths.value) : 0,
      questions: kind.value === "ranking" ? [] : own.given(),
      checks: Number(checks.value),
    };
    if (project === null) {
      done((await post("/api/label/create", { ...settings, kind: OWN[kind.value] ?? kind.value, overall: !(kind.value in OWN) })).project);
    } else {
      await post("/api/label/change", { project: project.id, ...settings });
      done(project.id);
    }
  }

  adapt();
  const made = form(
    project ? "Save" : "Create the project",
    [
      field("Name", name),
      el("label", { class: "line" }, el("span", {}, "Question"), kind, said),
      field("Instructions", instructions, "Shown above every task."),
      tied,
      pairs,
      own.node,
      el(
        "div",
        { class: "pairs" },
        field("People who answer each task", overlap, project ? "You can raise this number later, but not lower it." : null),
        field("Minutes that a task is reserved", lease, "Until then only the person who sees the task can answer it."),
      ),
    ],
    send,
  );
  return project ? el("div", { class: "columns" }, made, closing(project, done)) : made;
}

function closing(project, done) {
  const say = project.closed ? "The project is closed and takes no answers." : "A closed project takes no answers; results and exports stay.";
  return form(project.closed ? "Open again" : "Close the project", [el("p", {}, say)], async () => {
    await post("/api/label/change", { project: project.id, closed: !project.closed });
    done(project.id);
  });
}
