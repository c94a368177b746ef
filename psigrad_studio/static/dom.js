// Elements by hand. Text only ever becomes a text node; there is no way here to make markup out of a string.

const SVG = "http://www.w3.org/2000/svg";

/** The element of the page with this id. */
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

/** An HTML element; attributes that start with "on" are listeners. Children that are null, undefined or false are left out. */
export const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);

/** An SVG element. */
export const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

/** A button that sends no form. */
export const button = (attributes, ...children) => el("button", { type: "button", ...attributes }, ...children);

/** The cap of a key, which only those who see it need. */
export const cap = (key) => el("kbd", { "aria-hidden": "true" }, key);

/** A select with [value, label] pairs as its options. */
export const select = (attributes, options, chosen) =>
  el("select", attributes, ...options.map(([value, label]) => el("option", { value, selected: value === chosen }, label)));

/** Something that scrolls by itself, also by keyboard, where it is wider than its place. */
export const wide = (label, ...content) => el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": label }, ...content);

/** A name as text that may break after each of its parts. */
export const parted = (name) => name.split(/(?<=[/_.-])/).flatMap((part) => [part, el("wbr")]);

/** Let the arrow keys move the focus through those elements in `node` that `selector` finds, from where `here` says that it is. */
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

/** A message across the bottom of the page, gone after a while. */
export function notice(text, seconds = 6) {
  const box = $("notice");
  box.textContent = text;
  box.hidden = false;
  clearTimeout(fading);
  fading = setTimeout(() => { box.hidden = true; }, seconds * 1000);
}
