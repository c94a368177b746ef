// Markdown and formulas of other people's and models' texts, as elements. marked reads the text, temml makes MathML of formulas;
// what becomes an element is listed here, and everything else is shown as it was written: tags, pictures, the addresses of links.
import { el } from "./dom.js";
import { Marked } from "./vendor/marked/marked.esm.js";

const FORMULAS = 200, LONGEST_FORMULA = 4000;
const ENTITIES = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };
/** A sign is read as in Markdown: what a browser would make of an entity, without one. */
const plain = (text) => text.replace(/&(?:amp|lt|gt|quot|#39|nbsp);/g, (entity) => ENTITIES[entity]);

// [what opens it, the whole, whether it stands on a line of its own]; lengths are bounded, so that no text costs more than its length
const INLINE = [
  [/^\$\$([^]{1,4000}?)\$\$/, true],
  [/^\\\[([^]{1,4000}?)\\\]/, true],
  [/^\\\(([^]{1,4000}?)\\\)/, false],
  // as pandoc has it: no blank inside the dollars, no digit behind them, so that prices stay prices
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
  // a tag or a definition is text like any other: nothing of what was written may be hidden
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

/** `text` as nodes. Formulas are there when `formulas` of them has been awaited. */
export function marked(text) {
  const waiting = [];
  try {
    return { nodes: blocks(reader.lexer(text), waiting), waiting };
  } catch {
    return { nodes: [el("p", { class: "as-written" }, text)], waiting: [] }; // nested too deep to be read
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
        macros: { "\\pmb": "\\boldsymbol" }, // the only other command that sets a style attribute, which the policy forbids
      });
      node.querySelector("math")?.setAttribute("aria-label", text);
      node.title = source;
    } catch {
      node.replaceChildren(source);
      node.classList.add("unread");
    }
  }
}

const blocks = (tokens, waiting) => tokens.map((token) => block(token, waiting)).filter(Boolean);

function block(token, waiting) {
  const inside = () => inline(token.tokens ?? [], waiting);
  switch (token.type) {
    case "space":
      return null;
    case "heading":
      // no heading of the page: it would stand in its outline
      return el("p", { class: `heading depth-${Math.min(4, token.depth)}` }, ...inside());
    case "paragraph":
      return el("p", {}, ...inside());
    case "text":
      return el("span", {}, ...(token.tokens ? inside() : [plain(token.text)]));
    case "code":
      return el("div", { class: "code" }, token.lang ? el("span", { class: "language" }, token.lang) : null,
        el("pre", { tabindex: "0", role: "group", "aria-label": `Code${token.lang ? `, ${token.lang}` : ""}` }, el("code", {}, token.text)));
    case "blockquote":
      return el("blockquote", {}, ...blocks(token.tokens, waiting));
    case "list":
      return el(token.ordered ? "ol" : "ul", { start: token.ordered && token.start !== 1 ? String(Number(token.start)) : null },
        ...token.items.map((item) => el("li", {}, ...blocks(item.tokens, waiting))));
    case "checkbox":
      return el("span", {}, token.checked ? "☑ " : "☐ ");
    case "table":
      return table(token, waiting);
    case "hr":
      return el("hr");
    case "formula":
      return el("p", { class: "display" }, waitingFor(token, waiting));
    default:
      return el("p", { class: "as-written" }, token.raw);
  }
}

function table({ header, rows }, waiting) {
  const cell = (tag, { tokens, align }) => el(tag, { class: align ? `to-${align}` : null, scope: tag === "th" ? "col" : null }, ...inline(tokens, waiting));
  return el("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" }, el("table", {},
    el("thead", {}, el("tr", {}, ...header.map((each) => cell("th", each)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((each) => cell("td", each)))))));
}

const inline = (tokens, waiting) => tokens.map((token) => span(token, waiting));

function span(token, waiting) {
  const inside = () => inline(token.tokens ?? [], waiting);
  switch (token.type) {
    case "text":
      return token.tokens ? el("span", {}, ...inside()) : plain(token.text);
    case "escape":
      return token.text;
    case "strong":
      return el("strong", {}, ...inside());
    case "em":
      return el("em", {}, ...inside());
    case "del":
      return el("s", {}, ...inside());
    case "codespan":
      return el("code", {}, token.text);
    case "br":
      return el("br");
    case "link":
      // where it leads is said and not followed
      return el("span", { class: "link" }, ...inside(), token.autolink || token.href === token.text ? null : el("span", { class: "soft" }, ` (${token.href})`));
    case "formula":
      return waitingFor(token, waiting);
    default:
      return token.raw;
  }
}

function waitingFor({ raw, text, display }, waiting) {
  const node = el("span", { class: "formula" }, raw.trim());
  waiting.push({ node, text, display });
  return node;
}
