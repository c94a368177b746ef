// Helpers for the forms and tables of the labelling page.
import { post } from "../api.js";
import { button, el, notice, wide } from "../dom.js";

export const day = (ms) => new Date(ms).toLocaleDateString(undefined, { day: "numeric", month: "short", year: "numeric" });

let fields = 0;

/** Return a labelled control, with the description `say` below it. */
export function field(label, input, say) {
  const id = `field-${++fields}`;
  input.setAttribute("aria-labelledby", id);
  if (say) input.setAttribute("aria-describedby", `${id}-say`);
  return el("label", { class: "line" }, el("span", { id }, label), input, say && el("small", { class: "soft", id: `${id}-say` }, say));
}

export const number = (name, attributes) => el("input", { type: "number", name, step: 1, ...attributes });
export const text = (name, attributes) => el("input", { type: "text", name, autocomplete: "off", ...attributes });

/** Return a labelled checkbox. */
export const tick = (name, label, checked = false) => el("label", { class: "row" }, el("input", { type: "checkbox", name, checked }), label);

/** Return the value of a control: a boolean, a number (null if it is empty), or a text. */
function value({ type, checked, value: written }) {
  if (type === "checkbox") return checked;
  return type !== "number" ? written : written === "" ? null : Number(written);
}

/** Return the values of the named controls in `node`, by name; `a.b` is the field b of an object a. */
export function values(node) {
  const found = {};
  for (const input of node.querySelectorAll("[name]")) {
    const [name, part] = input.name.split(".");
    if (part) (found[name] ??= {})[part] = value(input);
    else found[name] = value(input);
  }
  return found;
}

/** Return a form whose button sends the values of the controls. An error is shown above the button. */
export function form(label, controls, send, attributes = {}) {
  const trouble = el("p", { class: "failure", role: "alert", hidden: true });
  const submit = el("button", { type: "submit", class: "primary" }, label);
  async function onsubmit(event) {
    event.preventDefault();
    trouble.hidden = submit.disabled = true;
    try {
      await send(values(node));
    } catch (error) {
      trouble.textContent = error.message;
      trouble.hidden = false;
    } finally {
      submit.disabled = false;
    }
  }
  const node = el("form", { class: "card lines", onsubmit, ...attributes }, ...controls, trouble, el("div", { class: "row" }, submit));
  return node;
}

/** Send a request, then call `then`. An error is shown as a notice. */
export async function asked(path, content, then) {
  try {
    await post(path, content);
    await then();
  } catch (error) {
    notice(error.message);
  }
}

/** Return a box with a secret that is shown once, and a button that copies it. */
export function once(label, value) {
  const input = el("input", { type: "text", readonly: true, value, "aria-label": label, onfocus: () => input.select() });
  async function copy() {
    try {
      await navigator.clipboard.writeText(value);
      notice("Copied.", 2);
    } catch {
      input.select();
      notice("Press Ctrl+C to copy the selected text.");
    }
  }
  return el("div", { class: "once" }, el("p", {}, label), el("div", { class: "row" }, input, button({ onclick: copy }, "Copy")));
}

/** Return a table. A head that begins with a space is for numbers; the first column with a head has the rows' names. */
export function table(heads, rows) {
  const names = heads.map((head) => head.trim()), first = names.findIndex(Boolean);
  const line = (cells, tag) => el("tr", {}, ...cells.map((cell, i) => el(...tag(i), cell)));
  const figures = (i) => heads[i].startsWith(" ") && "n";
  const head = line(names, (i) => (names[i] ? ["th", { scope: "col", class: figures(i) }] : ["td", {}]));
  const body = rows.map((cells) => line(cells, (i) => (i === first ? ["th", { scope: "row" }] : ["td", { class: figures(i) }])));
  return wide(`Table: ${names.filter(Boolean).join(", ")}`, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}
