// The sheet of a project with custom questions: a row for each, answered by keys or mouse, and submitted when complete.
import { button, cap, el, notice } from "../dom.js";
import { GRADES } from "./grades.js";

const SIDES = ["left", "right"];

/** Return a project's questions as rows with options [{label, key, value}]. A scale for a pair has a row for A and one for B. */
function rows(project, shown) {
  const better = (name, ask, more) => ({ name, ask, kind: "better", required: true, options: compared(project, more), ...more });
  const main = project.kind === "pair" ? better("", "Overall, which is better?", { bad: project.both_bad, tie: project.ties }) : rated("", "Overall", Number(project.kind.split("-")[1]));
  const own = project.questions.flatMap((question) => {
    const row = { ...question, ask: question.ask || question.name };
    if (question.kind === "better") return [{ ...row, options: compared(project, { tie: true }) }];
    if (question.kind === "choice") return [{ ...row, options: question.options.map((value, i) => ({ label: value, value, key: i < 9 ? String(i + 1) : null })) }];
    if (question.kind === "text") return [row];
    if (shown === 1) return [{ ...row, ...rated(question.name, row.ask, question.top), required: question.required }];
    return SIDES.map((_, at) => ({ ...row, ...rated(question.name, `${"AB"[at]}: ${row.ask}`, question.top), at, required: question.required, why: question.why && at === 1 }));
  });
  return project.overall ? [main, ...own] : own;
}

const rated = (name, ask, top) => ({
  name, ask, kind: "scale", required: true,
  options: Array.from({ length: top }, (_, i) => ({ label: String(i + 1), value: i + 1, key: String((i + 1) % 10) })),
});

/** Return options from A by far to B by far; without grades A, tie and B. Keys are letters if they are clear, otherwise digits. */
function compared(project, { tie, bad }) {
  const grades = project.strengths;
  const side = (i, strength) => ({ label: strength ? `${"AB"[i]} ${GRADES(strength, grades)}` : `${"AB"[i]}`, value: SIDES[i], strength, key: grades ? null : "ab"[i] });
  const all = Array.from({ length: grades || 1 }, (_, i) => (grades ? i + 1 : undefined));
  const found = [...all.toReversed().map((s) => side(0, s)), tie ? { label: "Tie", value: "tie", key: "t" } : null, ...all.map((s) => side(1, s))].filter(Boolean);
  if (grades) found.filter((each) => each.strength).forEach((each, i) => { each.key = String(i + 1); });
  return bad ? [...found, { label: "Both bad", value: "both_bad", key: "x" }] : found;
}

/** Return the sheet of a task, {node, key(event)}. `give(answer)` is called once all required questions are answered. */
export function sheet(project, task, give) {
  const all = rows(project, task.completions.length).map((row, i) => drawn(row, i));
  const missing = () => all.filter((row) => row.required && !row.answered());
  const left = el("span", { class: "soft", role: "status" });
  const send = button({ class: "primary", onclick: submit }, el("span", {}, "Submit"), cap("Enter"));
  let current = 0, last = 0;

  function drawn(row, i) {
    const id = `question-${i}`;
    const optional = row.required ? null : el("small", { class: "soft" }, " optional");
    const head = el("p", { class: "ask", id, dir: "auto" }, row.ask, optional);
    const made = { ...row, picked: null, why: null };
    if (row.kind === "text") {
      made.text = el("textarea", { rows: 2, maxlength: 10000, "aria-labelledby": id, onfocus: () => go(i, false), oninput: count });
      made.answered = () => made.text.value.trim() !== "";
    } else {
      const hint = ({ key, label }) => key && key !== label && cap(key.toUpperCase());
      made.buttons = row.options.map((option) =>
        button({ "aria-pressed": "false", onclick: () => pick(i, option) }, el("span", {}, option.label), hint(option)));
      made.answered = () => made.picked !== null;
    }
    if (row.why) made.why = el("input", { type: "text", class: "reason", maxlength: 10000, autocomplete: "off", "aria-label": `Why: ${row.ask}`, placeholder: "Why? (optional)" });
    made.node = el("div", { class: "question", role: "group", "aria-labelledby": id, tabindex: "-1", onpointerdown: () => go(i, false) },
      head, made.text ?? el("div", { class: `options ${row.kind}` }, ...made.buttons), made.why);
    return made;
  }

  function go(i, focus = true) {
    current = i;
    all.forEach((row, n) => row.node.classList.toggle("current", n === i));
    if (!focus) return;
    (all[i].text ?? all[i].node).focus({ preventScroll: true });
    all[i].node.scrollIntoView({ block: "nearest" });
  }

  /** Choose an option. Choosing it again clears the answer, if none is required. */
  function pick(i, option) {
    const row = all[i];
    row.picked = row.picked === option && !row.required ? null : option;
    row.buttons.forEach((button, n) => button.setAttribute("aria-pressed", row.options[n] === row.picked));
    count();
    const next = all.findIndex((each, n) => n > i && !each.answered() && each.kind !== "text");
    if (row.picked) last = i;
    go(row.picked && next !== -1 ? next : i);
  }

  function count() {
    const open = missing().length;
    left.textContent = open ? `${open} to answer` : "";
  }

  function submit() {
    const open = missing()[0];
    if (open) {
      notice(`“${open.ask}” isn't answered yet.`, 4);
      return go(all.indexOf(open));
    }
    const answers = {}, main = {};
    for (const row of all) {
      if (!row.answered()) continue;
      if (row.name === "") Object.assign(main, row.kind === "better" ? { choice: row.picked.value, strength: row.picked.strength ?? null } : { rating: row.picked.value });
      else if (row.kind !== "scale") answers[row.name] = said(row, row.text ? row.text.value.trim() : row.picked.value);
      else answers[row.name] = said(row, [...(answers[row.name]?.value ?? []), row.picked.value]);
    }
    for (const [name, { value }] of Object.entries(answers)) {
      if (Array.isArray(value) && value.length < task.completions.length) return notice(`“${name}” is answered for only one completion; answer it for both or for neither.`, 6);
    }
    give({ ...main, answers });
  }

  const said = (row, value) => ({ value, ...(row.picked?.strength ? { strength: row.picked.strength } : {}), ...(row.why?.value.trim() ? { reason: row.why.value.trim() } : {}) });

  function key(event) {
    const name = event.key.toLowerCase();
    if (name === "enter") submit();
    else if (name === "w" && (all[last].why ?? all[current].why)) (all[last].why ?? all[current].why).focus();
    else if (name === "arrowdown" || name === "arrowup") go(Math.min(all.length - 1, Math.max(0, current + (name === "arrowdown" ? 1 : -1))));
    else {
      const option = all[current]?.options?.find((each) => each.key === name);
      if (!option) return false;
      pick(current, option);
    }
    return true;
  }

  count();
  all[0].node.classList.add("current");
  return { key, node: el("div", { class: "sheet card" }, ...all.map((row) => row.node), el("div", { class: "row between send" }, left, send)) };
}
