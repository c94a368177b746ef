// The questions of a project's own, as they are written and changed in its settings.
import { el } from "../dom.js";
import { field } from "./projects.js";

const KINDS = { better: "Which of the two is better", scale: "A scale for each completion", choice: "A choice among options", text: "A text" };

/** An editor: {node, adapt(), given()}. `kind()` is that of the project; questions that are there keep their kind, name and scale. */
export function questions(old, kind) {
  const list = el("ol", { class: "own" });
  const add = el("button", { type: "button", onclick: () => { list.append(one(null)); adapt(); list.lastElementChild.querySelector("input").focus(); } }, "Add a question");
  const node = el("fieldset", { class: "lines" }, el("legend", {}, "Custom questions"),
    el("p", { class: "soft small" }, "Aspects, choices and texts. Each is answered separately, and can be exported alone or in a weighted sum."), list, el("div", { class: "row" }, add));

  function one(question) {
    const was = question ?? { name: "", kind: kind().endsWith("pair") ? "better" : "scale", ask: "", options: [], top: 5, required: true, why: false, weight: 1 };
    const there = question !== null;
    const input = (value, more) => el("input", { type: "text", value, autocomplete: "off", ...more });
    const name = input(was.name, { required: true, maxlength: 60, readonly: there });
    const ask = input(was.ask, { maxlength: 2000 });
    const type = el("select", { disabled: there, onchange: adapt }, ...Object.entries(KINDS).map(([value, label]) => el("option", { value, selected: value === was.kind }, label)));
    const options = el("textarea", { rows: 3, maxlength: 6000 }, was.options.join("\n"));
    const top = el("input", { type: "number", min: 2, max: 10, step: 1, value: was.top, readonly: there, required: true });
    const weight = el("input", { type: "number", min: 0, max: 1000, step: "any", value: was.weight, required: true });
    const required = el("input", { type: "checkbox", checked: was.required }), why = el("input", { type: "checkbox", checked: was.why });
    const move = (by) => { const other = by < 0 ? item.previousElementSibling : item.nextElementSibling; if (other) (by < 0 ? other.before(item) : other.after(item)); };
    const tool = (sign, label, act) => el("button", { type: "button", class: "icon quiet", "aria-label": label, title: label, onclick: act }, sign);
    const item = el("li", { class: "lines inner" },
      el("div", { class: "row between" }, el("span", { class: "soft" }, there ? "Already asked. Only its text and weight can change" : "A new question"),
        el("span", { class: "row tight" }, tool("↑", "Move up", () => move(-1)), tool("↓", "Move down", () => move(1)),
          there ? null : tool("×", "Remove", () => { const next = item.nextElementSibling ?? item.previousElementSibling; item.remove(); (next?.querySelector("input") ?? add).focus(); }))),
      el("div", { class: "pairs" }, field("Name", name, "Used in exports."), field("Kind", type)),
      field("Text for labellers", ask, "Empty: the name is shown."),
      field("Options, one per line", options),
      el("div", { class: "pairs" }, field("Highest value", top), field("Weight", weight, "Used in the weighted export.")),
      el("div", { class: "row" }, el("label", { class: "row" }, required, "Must be answered"), el("label", { class: "row" }, why, "Ask for a reason")),
    );
    item.adapt = () => {
      type.options[0].disabled = !kind().endsWith("pair");
      if (type.value === "better" && type.options[0].disabled) type.value = "scale";
      options.parentElement.hidden = type.value !== "choice";
      top.parentElement.hidden = type.value !== "scale";
      weight.parentElement.hidden = !["better", "scale"].includes(type.value);
    };
    item.given = () => ({
      name: name.value.trim(), kind: type.value, ask: ask.value.trim(), top: Number(top.value), required: required.checked, why: why.checked, weight: Number(weight.value),
      options: type.value === "choice" ? options.value.split("\n").map((each) => each.trim()).filter(Boolean) : [],
    });
    return item;
  }

  function adapt() {
    for (const item of list.children) item.adapt();
  }

  list.append(...old.map(one));
  return { node, adapt, given: () => [...list.children].map((item) => item.given()) };
}
