// The display of texts: rendered, as written, or as the difference from another text. The user's choice applies to all pages.
import { el } from "./dom.js";
import { differing } from "./difference.js";

const KEPT = "psigrad-reading";
/** A text without any of these looks the same rendered and as written. */
const MARKUP = /[*_`#>|~$\\]|\[[^\]]*\]|^\s*(?:[-+]|\d{1,9}[.)])\s|https?:/m;
const LONGEST = 20_000;

/** Return the user's choice: "rendered" or "written". */
export const chosen = () => (localStorage.getItem(KEPT) === "written" ? "written" : "rendered");
export const choose = (reading) => localStorage.setItem(KEPT, reading);

/** Return a text as written, with the blanks at its ends marked. */
export function written(text) {
  const begin = /^\s*/.exec(text)[0], end = text.length > begin.length ? /\s*$/.exec(text)[0] : "";
  return el("div", { class: "text" }, blanks(begin), text.slice(begin.length, text.length - end.length), blanks(end));
}

const blanks = (text) => (text === "" ? null : el("span", {}, ...[...text].map((sign) => el("span", { class: sign === "\n" ? "blank line-end" : "blank" }, sign))));

/** Return a text with Markdown and formulas rendered. Until that is done, it is shown as written. */
export function rendered(text) {
  const node = written(text);
  node.classList.add("rendered");
  if (!MARKUP.test(text) || text.length > LONGEST) return node;
  import("./markup.js").then(async ({ marked, formulas }) => {
    const { nodes, waiting } = marked(text);
    node.className = "rich rendered";
    node.replaceChildren(...nodes);
    await formulas(waiting);
  }).catch(() => { /* the text stays as written */ });
  return node;
}

/** Return a text in the chosen display. */
export const read = (text, reading = chosen()) => (reading === "written" ? written(text) : rendered(text));

/** Return `text` as written, with the words marked that `other` lacks at that place. */
export function compared(text, other) {
  const parts = differing(text, other);
  const node = el("div", { class: "text" }, ...parts.map(({ words, own }) => (own ? el("mark", { class: "own" }, words) : words)));
  if (!parts.some(({ own }) => own)) node.append(el("span", { class: "soft" }, text === other ? " (the same text)" : " (nothing that the other lacks)"));
  return node;
}
