// Conversion of Markdown and formulas in texts of people and models to elements. marked parses the text, temml makes MathML.
// Only the kinds listed here become elements. Everything else is shown as written: tags, pictures, the addresses of links.
import { el, wide } from "./dom.js";
import { Marked } from "./vendor/marked/marked.esm.js";

const FORMULAS = 200, LONGEST_FORMULA = 4000;
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };
/** Replace entities by their characters, as Markdown does, without a browser's HTML parser. */
const plain = (text) => text.replace(/&(?:amp|lt|gt|quot|#39|nbsp);/g, (entity) => ENTITIES[entity]);

// [expression of a formula, true if it is displayed on a separate line]; lengths are bounded, so the time is linear in the text
const INLINE = [
  [/^\$\$([^]{1,4000}?)\$\$/, true],
  [/^\\\[([^]{1,4000}?)\\\]/, true],
  [/^\\\(([^]{1,4000}?)\\\)/, false],
  // as in pandoc: no blank just inside the dollars, and no digit after them, so that prices are no formulas
  [/^\$(?![\s$])((?:\\.|[^\\$\n]){0,999}(?:\\.|[^\\$\s]))\$(?!\d)/, false],
];
const BLOCK = [
  /^ {0,3}\$\$([^]{1,4000}?)\$\$[ \t]*(?:\n|$)/,
  /^ {0,3}\\\[([^]{1,4000}?)\\\][ \t]*(?:\n|$)/,
  /^ {0,3}(\\begin\{((?:align|aligned|equation|gather|gathered|cases|array|[pbvBV]?matrix)\*?)\}[^]{1,4000}?\\end\{\2\})[ \t]*(?:\n|$)/,
];

const formula = (found, display) => found && { type: "formula", raw: found[0], text: found[1].trim(), display };
const reader = new Marked({
  gfm: true,
  breaks: true,
  // tags and definitions are plain text, so that nothing of the text is hidden
  tokenizer: { html: () => undefined, tag: () => undefined, def: () => undefined },
  extensions: [
    {
      name: "formula",
      level: "inline",
      start: (text) => /\$|\\[([]/.exec(text)?.index,
      tokenizer: (text) => INLINE.reduce((found, [sign, display]) => found ?? formula(sign.exec(text), display) ?? undefined, undefined),
    },
    {
      name: "formulas",
      level: "block",
      start: (text) => /\n {0,3}(?:\$\$|\\\[|\\begin\{)/.exec(text)?.index,
      tokenizer: (text) => BLOCK.reduce((found, sign) => found ?? formula(sign.exec(text), true) ?? undefined, undefined),
    },
  ],
});

/** Return `text` as nodes. Its formulas are drawn once `formulas` has been awaited. */
export function marked(text) {
  const waiting = [];
  try {
    return { nodes: blocks(reader.lexer(text), waiting), waiting };
  } catch {
    return { nodes: [el("p", { class: "as-written" }, text)], waiting: [] }; // the text is nested too deeply
  }
}

/** Draw the formulas of `marked`. */
export async function formulas(waiting) {
  if (waiting.length === 0) return;
  const { default: temml } = await import("./vendor/temml/temml.js");
  for (const { node, text, display } of waiting.slice(0, FORMULAS)) {
    const source = node.textContent;
    try {
      if (text.length > LONGEST_FORMULA || /\\sideset/.test(text)) continue;
      temml.render(text, node, {
        displayMode: display, throwOnError: true, trust: false, strict: false, maxExpand: 200, maxSize: [8, 80],
        macros: { "\\pmb": "\\boldsymbol" }, // the only other command that sets a style attribute, which the content security policy forbids
      });
      node.querySelector("math")?.setAttribute("aria-label", text);
      node.title = source;
    } catch {
      node.replaceChildren(source);
      node.classList.add("unread");
    }
  }
}

/** The element for each kind of block. */
const BLOCKS = {
  space: () => "",
  // not a heading element, which would appear in the page's outline
  heading: ({ depth }, inside) => el("p", { class: `heading depth-${Math.min(4, depth)}` }, ...inside()),
  paragraph: (_, inside) => el("p", {}, ...inside()),
  text: (token, inside) => el("span", {}, ...(token.tokens ? inside() : [plain(token.text)])),
  code: ({ lang, text }) => el("div", { class: "code" }, lang && el("span", { class: "language" }, lang),
    el("pre", { tabindex: "0", role: "group", "aria-label": `Code${lang ? `, ${lang}` : ""}` }, el("code", {}, text))),
  blockquote: ({ tokens }, _, waiting) => el("blockquote", {}, ...blocks(tokens, waiting)),
  list: ({ ordered, start, items }, _, waiting) => el(ordered ? "ol" : "ul", { start: ordered && start !== 1 && String(Number(start)) },
    ...items.map(({ tokens }) => el("li", {}, ...blocks(tokens, waiting)))),
  checkbox: ({ checked }) => el("span", {}, checked ? "☑ " : "☐ "),
  table: (token, _, waiting) => table(token, waiting),
  hr: () => el("hr"),
  formula: (token, _, waiting) => el("p", { class: "display" }, waitingFor(token, waiting)),
};

/** The node for each kind of text inside a block. */
const SPANS = {
  text: (token, inside) => (token.tokens ? el("span", {}, ...inside()) : plain(token.text)),
  escape: ({ text }) => text,
  strong: (_, inside) => el("strong", {}, ...inside()),
  em: (_, inside) => el("em", {}, ...inside()),
  del: (_, inside) => el("s", {}, ...inside()),
  codespan: ({ text }) => el("code", {}, text),
  br: () => el("br"),
  // the address is shown, and cannot be followed
  link: ({ autolink, href, text }, inside) =>
    el("span", { class: "link" }, ...inside(), !autolink && href !== text && el("span", { class: "soft" }, ` (${href})`)),
  formula: (token, _, waiting) => waitingFor(token, waiting),
};

/** Return the node of a token; undefined for kinds that are not listed. */
const made = (kinds, token, waiting) => kinds[token.type]?.(token, () => inline(token.tokens ?? [], waiting), waiting);
const blocks = (tokens, waiting) => tokens.map((token) => made(BLOCKS, token, waiting) ?? el("p", { class: "as-written" }, token.raw)).filter(Boolean);
const inline = (tokens, waiting) => tokens.map((token) => made(SPANS, token, waiting) ?? token.raw);

function table({ header, rows }, waiting) {
  const cell = (tag, { tokens, align }) => el(tag, { class: align ? `to-${align}` : null, scope: tag === "th" ? "col" : null }, ...inline(tokens, waiting));
  const line = (tag, cells) => el("tr", {}, ...cells.map((each) => cell(tag, each)));
  return wide("Table", el("table", {}, el("thead", {}, line("th", header)), el("tbody", {}, ...rows.map((row) => line("td", row)))));
}

function waitingFor({ raw, text, display }, waiting) {
  const node = el("span", { class: "formula" }, raw.trim());
  waiting.push({ node, text, display });
  return node;
}
