// The editor of a project's custom questions.
import { button, el, select } from "../dom.js";
import { field, number, text, tick, values } from "./forms.js";

const KINDS = { better: "Which of the two is better", scale: "A scale for each completion", choice: "A choice among options", text: "A text" };

/** Return an editor, {node, adapt(), given()}. `kind()` is the project's kind. Existing questions keep their kind, name and scale. */
export function questions(old, kind) {
  const list = el("ol", { class: "own" });
  const add = button({ onclick: () => { list.append(one(null)); adapt(); list.lastElementChild.querySelector("input").focus(); } }, "Add a question");
  const node = el("fieldset", { class: "lines" }, el("legend", {}, "Custom questions"),
    el("p", { class: "soft small" }, "Aspects, choices and texts. Each is answered separately, and can be exported alone or in a weighted sum."), list, el("div", { class: "row" }, add));

  function one(question) {
    const was = question ?? { name: "", kind: kind().endsWith("pair") ? "better" : "scale", ask: "", options: [], top: 5, required: true, why: false, weight: 1 };
    const there = question !== null;
    const type = select({ name: "questions.kind", disabled: there, onchange: adapt }, Object.entries(KINDS), was.kind);
    const options = field("Options, one per line", el("textarea", { name: "questions.options", rows: 3, maxlength: 6000 }, was.options.join("\n")));
    const top = field("Highest value", number("questions.top", { min: 2, max: 10, value: was.top, readonly: there, required: true }));
    const share = number("questions.weight", { min: 0, max: 1000, step: "any", value: was.weight, required: true });
    const weight = field("Weight", share, "Used in the weighted export.");
    const name = text("questions.name", { value: was.name, required: true, maxlength: 60, readonly: there });
    const move = (by) => { const other = by < 0 ? item.previousElementSibling : item.nextElementSibling; if (other) (by < 0 ? other.before(item) : other.after(item)); };
    const remove = () => { const next = item.nextElementSibling ?? item.previousElementSibling; item.remove(); (next?.querySelector("input") ?? add).focus(); };
    const tool = (sign, label, onclick) => button({ class: "icon quiet", "aria-label": label, title: label, onclick }, sign);
    const item = el("li", { class: "lines" },
      el("div", { class: "row between" }, el("span", { class: "soft" }, there ? "Already asked. Only its text and weight can change" : "A new question"),
        el("span", { class: "row tight" }, tool("↑", "Move up", () => move(-1)), tool("↓", "Move down", () => move(1)), !there && tool("×", "Remove", remove))),
      el("div", { class: "pairs" }, field("Name", name, "Used in exports."), field("Kind", type)),
      field("Text for labellers", text("questions.ask", { value: was.ask, maxlength: 2000 }), "Empty: the name is shown."),
      options,
      el("div", { class: "pairs" }, top, weight),
      el("div", { class: "row" }, tick("questions.required", "Must be answered", was.required), tick("questions.why", "Ask for a reason", was.why)),
    );
    item.adapt = () => {
      type.options[0].disabled = !kind().endsWith("pair");
      if (type.value === "better" && type.options[0].disabled) type.value = "scale";
      options.hidden = type.value !== "choice";
      top.hidden = type.value !== "scale";
      weight.hidden = !["better", "scale"].includes(type.value);
    };
    return item;
  }

  function adapt() {
    for (const item of list.children) item.adapt();
  }

  function given(item) {
    const { name, ask, options, ...rest } = values(item).questions;
    const lines = rest.kind === "choice" ? options.split("\n").map((each) => each.trim()).filter(Boolean) : [];
    return { ...rest, name: name.trim(), ask: ask.trim(), options: lines };
  }

  list.append(...old.map(one));
  return { node, adapt, given: () => [...list.children].map(given) };
}
