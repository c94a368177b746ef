// Creation of elements. Text always becomes a text node, so no string can become markup.

const SVG = "http://www.w3.org/2000/svg";

/** Return the element of the page with this id. */
export const $ = (id) => document.getElementById(id);

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => (child ?? false) !== false));
  return node;
}

/** Return an HTML element. Attributes that start with "on" are listeners. Children that are null, undefined or false are skipped. */
export const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);

/** Return an SVG element. */
export const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

/** Return a button that does not submit a form. */
export const button = (attributes, ...children) => el("button", { type: "button", ...attributes }, ...children);

/** Return a key cap, which screen readers skip. */
export const cap = (key) => el("kbd", { "aria-hidden": "true" }, key);

/** Return a select element whose options are [value, label] pairs. */
export const select = (attributes, options, chosen) =>
  el("select", attributes, ...options.map(([value, label]) => el("option", { value, selected: value === chosen }, label)));

/** Return a box that scrolls, also by keyboard, if its content is too wide. */
export const wide = (label, ...content) => el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": label }, ...content);

/** Return a name as text in which a line can break after each part. */
export const parted = (name) => name.split(/(?<=[/_.-])/).flatMap((part) => [part, el("wbr")]);

/** Let the arrow keys move the focus through the elements of `node` that match `selector`; `here` returns the current one. */
export function arrows(node, selector, here = () => document.activeElement) {
  node.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    const all = [...node.querySelectorAll(selector)];
    all[Math.max(0, Math.min(all.length - 1, all.indexOf(here()) + step))]?.focus();
    event.preventDefault();
  });
}

let fading;

/** Show a message at the bottom of the page for some seconds. */
export function notice(text, seconds = 6) {
  const box = $("notice");
  box.textContent = text;
  box.hidden = false;
  clearTimeout(fading);
  fading = setTimeout(() => { box.hidden = true; }, seconds * 1000);
}
