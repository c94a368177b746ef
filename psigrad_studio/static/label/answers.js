// The controls of each kind of question. Each is {node, key(event), read(reading)}, and calls `give(answer)` with the answer.
import { button, cap, el } from "../dom.js";
import { GRADES } from "./grades.js";
import { sheet } from "./questions.js";
import * as texts from "./texts.js";

export const LETTERS = "ABCDEFGHIJKL";
const press = (key, label, onclick, attributes) => button({ onclick, ...attributes }, el("span", {}, label), cap(key));

/** Return the controls for a task. Their `read(reading)` shows the completions rendered, as written, or as a difference. */
export function controls(project, task, give) {
  const made = project.questions.length ? asked(project, task, give) : ({ pair, ranking }[project.kind] ?? rating)(project, task, give);
  const read = (reading) => {
    for (const node of made.node.querySelectorAll(".words")) {
      const at = Number(node.dataset.at), content = task.completions[at];
      const differs = reading === "difference" && task.completions.length === 2;
      node.replaceChildren(differs ? texts.difference(content, task.completions[1 - at]) : texts.completion(content, reading));
    }
  };
  return { ...made, read };
}

function card(letter, at, extra = {}) {
  const label = letter === null ? "The completion" : `Completion ${letter}`;
  const head = letter && el("header", {}, el("span", { class: "letter", "aria-hidden": "true" }, letter), ...(extra.tools ?? []));
  return el("article", { class: "completion card", "aria-label": label }, head, el("div", { class: "words", "data-at": at, ...extra.words }));
}

/** Return the completions, with the sheet of custom questions below them. */
function asked(project, task, give) {
  const made = sheet(project, task, give), one = task.completions.length === 1;
  const cards = task.completions.map((_, i) => card(one ? null : LETTERS[i], i));
  return { key: made.key, node: el("div", { class: one ? "one" : "pair" }, one ? cards[0] : el("div", { class: "sides" }, ...cards), made.node) };
}

// ---- two side by side

function pair(project, task, give) {
  const grades = project.strengths;
  let side = null;
  const cards = task.completions.map((_, i) => card(LETTERS[i], i));
  const buttons = {
    left: press("A", "A is better", () => choose("left"), { class: "side" }),
    tie: project.ties ? press("T", "Tie", () => choose("tie")) : null,
    both_bad: project.both_bad ? press("X", "Both bad", () => choose("both_bad")) : null,
    right: press("B", "B is better", () => choose("right"), { class: "side" }),
  };
  const scale = el("div", { class: "grades", role: "group", "aria-label": "How much better", hidden: true });

  function choose(choice) {
    if (!grades || (choice !== "left" && choice !== "right")) return give({ choice });
    side = choice;
    cards.forEach((each, i) => each.classList.toggle("chosen", (i === 0) === (side === "left")));
    for (const name of ["left", "right"]) buttons[name].setAttribute("aria-pressed", name === side);
    const letter = side === "left" ? "A" : "B";
    scale.replaceChildren(
      el("span", { class: "soft" }, `How much better is ${letter}?`),
      ...Array.from({ length: grades }, (_, i) => press(i + 1, GRADES(i + 1, grades), () => give({ choice: side, strength: i + 1 }))),
      press("Enter", "Don't say", () => give({ choice: side }), { class: "quiet" }),
    );
    scale.hidden = false;
    scale.lastElementChild.focus();
  }

  function key(event) {
    const name = event.key.toLowerCase();
    const choices = { a: "left", arrowleft: "left", b: "right", arrowright: "right", t: project.ties && "tie", x: project.both_bad && "both_bad" };
    if (choices[name]) choose(choices[name]);
    else if (side !== null && /^[1-9]$/.test(name) && Number(name) <= grades) give({ choice: side, strength: Number(name) });
    else if (side !== null && name === "enter") give({ choice: side });
    else return false;
    return true;
  }

  const choices = el("div", { class: "choices", role: "group", "aria-label": "Your answer" }, ...Object.values(buttons));
  return { node: el("div", { class: "pair" }, el("div", { class: "sides" }, ...cards), el("div", { class: "dock" }, choices, scale)), key };
}

// ---- one on a scale

function rating(project, task, give) {
  const top = Number(project.kind.split("-")[1]);
  const marks = Array.from({ length: top }, (_, i) => button(
    { onclick: () => give({ rating: i + 1 }), "aria-label": `${i + 1} of ${top}` }, el("span", {}, i + 1), i === 9 && cap(0)));
  const [bad, good] = ["bad", "good"].map((word) => el("span", { class: "soft" }, word));
  const scale = el("div", { class: "scale", role: "group", "aria-label": `Rating from 1 to ${top}` }, bad, ...marks, good);
  function key(event) {
    if (!/^[0-9]$/.test(event.key)) return false;
    const value = event.key === "0" ? 10 : Number(event.key);
    if (value > top) return false;
    give({ rating: value });
    return true;
  }
  return { node: el("div", { class: "one" }, card(null, 0), el("div", { class: "dock choices" }, scale)), key };
}

// ---- several in order

function ranking(project, task, give) {
  // rows are [{index, equal}], best first; `equal` means as good as the row above
  let rows = task.completions.map((_, index) => ({ index, equal: false }));
  const list = el("ol", { class: "order", "aria-label": "Completions, the best first" });
  const said = el("p", { class: "visually-hidden", role: "status" });
  const items = task.completions.map((_, index) => item(index));

  function item(index) {
    const letter = LETTERS[index];
    const tool = (sign, label, onclick) => button({ class: "icon quiet", "aria-label": `${label} ${letter}`, title: label, onclick }, sign);
    const rank = el("span", { class: "rank soft" });
    const equals = project.ties ? tool("=", "As good as the one above:", () => toggle(index)) : null;
    const tools = [rank, el("span", { class: "grow" }), equals, tool("↑", "Move up", () => move(index, -1)), tool("↓", "Move down", () => move(index, 1))];
    const words = { tabindex: "0", role: "group", "aria-label": `Text of ${letter}` };
    const node = el("li", { tabindex: "-1", "data-index": index }, card(letter, index, { tools, words }));
    return { node, equals, rank };
  }

  const at = (index) => rows.findIndex((row) => row.index === index);
  /** The rank of each row: its place, or the rank of the row above if they are equal. */
  const ranks = () => rows.reduce((found, row, i) => [...found, i > 0 && row.equal ? found[i - 1] : i + 1], []);

  function draw(focus) {
    rows[0].equal = false;
    const places = ranks();
    rows.forEach((row, i) => {
      const { node, rank, equals } = items[row.index];
      rank.textContent = row.equal ? `${places[i]} (as above)` : String(places[i]);
      node.classList.toggle("equal", row.equal);
      if (equals) {
        equals.setAttribute("aria-pressed", row.equal);
        equals.disabled = i === 0;
      }
      if (list.children[i] !== node) list.insertBefore(node, list.children[i] ?? null);
      node.tabIndex = i === 0 && focus === undefined ? 0 : row.index === focus ? 0 : -1;
    });
    if (focus !== undefined) items[focus].node.focus();
  }

  function move(index, by) {
    const from = at(index), to = from + by;
    if (to < 0 || to >= rows.length) return;
    const [row] = rows.splice(from, 1);
    // a row that equals the one above must not become equal to another one
    if (rows[from] && !row.equal) rows[from].equal = false;
    rows.splice(to, 0, { ...row, equal: false });
    if (rows[to + 1]) rows[to + 1].equal = false;
    draw(index);
    said.textContent = `${LETTERS[index]} is now ${to + 1} of ${rows.length}.`;
  }

  function toggle(index) {
    const row = rows[at(index)];
    if (at(index) > 0) row.equal = !row.equal;
    draw(index);
    said.textContent = row.equal ? `${LETTERS[index]} is as good as the one above.` : `${LETTERS[index]} is below the one above.`;
  }

  function submit() {
    const places = ranks();
    give({ ranks: task.completions.map((_, index) => places[at(index)]) });
  }

  const focused = () => Number(document.activeElement?.closest?.("li[data-index]")?.dataset.index ?? NaN);

  function key(event) {
    const index = focused(), name = event.key;
    if (name === "Enter") submit();
    else if (name === "ArrowUp" || name === "ArrowDown") {
      const by = name === "ArrowUp" ? -1 : 1;
      if (Number.isNaN(index)) draw(rows[0].index);
      else if (event.shiftKey) move(index, by);
      else draw(rows[Math.min(rows.length - 1, Math.max(0, at(index) + by))].index);
    } else if (name === "=" && project.ties && !Number.isNaN(index)) toggle(index);
    else if (LETTERS.slice(0, rows.length).includes(name.toUpperCase()) && name.length === 1) draw(LETTERS.indexOf(name.toUpperCase()));
    else return false;
    return true;
  }

  draw();
  const send = press("Enter", "Submit this order", submit, { class: "primary" });
  return { node: el("div", { class: "ranking" }, list, said, el("div", { class: "dock choices" }, send)), key };
}
