// Elements by hand. Text only ever becomes a text node; there is no way here to make markup out of a string.

const SVG = "http://www.w3.org/2000/svg";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An HTML element; attributes that start with "on" are listeners. */
export const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);

/** An SVG element. */
export const svg = (tag, attributes, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);

/** A name as text that may break after each of its parts. */
export const parted = (name) => name.split(/(?<=[/_.-])/).flatMap((part) => [part, el("wbr")]);

let fading;

/** A message across the bottom of the page, gone after a while. */
export function notice(text, seconds = 6) {
  const box = document.getElementById("notice");
  box.textContent = text;
  box.hidden = false;
  clearTimeout(fading);
  fading = setTimeout(() => { box.hidden = true; }, seconds * 1000);
}
