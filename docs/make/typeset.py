"""Formulas of the pages and docstrings as MathML: they are written in plain text, and typeset when the site is built.

    mathml("∇J = E[ Σ_t ∇log π(a_t|s_t)·Ψ_t ]")

`_` begins an index and `^` an exponent, up to the end of a name, or what is in brackets. A fraction's bar stands for "/" between
two factors; brackets around a whole numerator or denominator go. Words of several letters are upright.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from xml.etree import ElementTree

SIGNS = set("⇔Σ∇πψΨρσβγαδελθÂ←≤≥·−∞²½‖Π")
CODE = re.compile(r"[\"#`\\;]|==|\bimport\b|\bdef\b|\breturn\b|\bpsigrad\b|\bpython\b|\bself\b|\(\)|://")
LARGE = {"Σ": "∑", "Π": "∏"}
SPACE = '<mspace width="0.28em"/>'
UNDER = {"max", "min", "argmax", "argmin"}
FUNCTIONS = {"log", "exp", "max", "min", "arcsin"}
TEX = {
    "∑": r"\sum ", "∏": r"\prod ", "∇": r"\nabla ", "π": r"\pi ", "ψ": r"\psi ", "Ψ": r"\Psi ", "ρ": r"\rho ", "σ": r"\sigma ",
    "β": r"\beta ", "γ": r"\gamma ", "α": r"\alpha ", "δ": r"\delta ", "ε": r"\varepsilon ", "λ": r"\lambda ", "θ": r"\theta ",
    "μ": r"\mu ", "τ": r"\tau ", "Â": r"\hat A", "û": r"\hat u", "←": r"\leftarrow ", "≤": r"\le ", "≥": r"\ge ", "·": r"\cdot ",
    "−": "-", "∞": r"\infty ", "‖": r"\Vert ", "∝": r"\propto ", "≈": r"\approx ", "…": r"\dots ", "′": r"\prime ",
    "½": r"\tfrac12 ", "{": r"\{", "}": r"\}", "%": r"\%", "&": r"\&", "#": r"\#", "_": r"\_", "$": r"\$",
}  # fmt: skip
CLOSING = {"(": ")", "[": "]", "{": "}"}
SUPERSCRIPTS = str.maketrans("⁰¹²³⁺⁻", "0123+−")
SUBSCRIPTS = str.maketrans("₀₁₂₃₄", "01234")
TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<code>[A-Za-z]{3,}_[a-z]{3,}_[a-z_]+)|(?P<bars>\|[^|\s()]+\|)|(?P<number>\d+(?:\.\d+)?(?:e[−-]?\d+)?)|(?P<name>[A-Za-zÀ-ÿ]{2,}(?:'s\b)?|[A-Za-zÀ-ÿͰ-Ͽ∇]'?)"
    r"|(?P<sup>[⁰¹²³⁺⁻]+)|(?P<sub>[₀₁₂₃₄]+)|(?P<sign><=|>=|.)"
)


class NotAFormula(ValueError):
    """Text that cannot be read as one."""


@dataclass
class Token:
    """A piece of a formula, and how much space stood before it."""

    kind: str
    text: str
    space: int


@dataclass
class Item:
    """A factor as MathML. `inner` is what stands in its brackets, where it is nothing but brackets."""

    markup: str
    inner: str = ""


def is_formula(block: list[str]) -> bool:
    """Whether these lines are formulas and no program, table or output."""
    lines = [line for line in block if line.strip()]
    said = any(sign in line for line in lines for sign in ("=", "E[", "←", "log ", "≤", "·", "keep"))
    named = re.match(r"[A-Za-z]+_[a-z](\(\w+\))? = ", lines[0].strip()) if lines else None
    return said and bool(named or SIGNS & set(lines[0])) and not any(CODE.search(line) for line in lines)


def mathml(formula: str) -> str:
    """The formula as a block of MathML, with its plain text beside it for who copies it.

    Raises `NotAFormula` where brackets do not match.
    """
    text = formula.strip()
    tokens = list(_tokens(text))
    markup, rest = _row(tokens, 0, "")
    if rest != len(tokens):
        raise NotAFormula(formula)
    annotation = f'<annotation encoding="text/plain">{escape(text)}</annotation>'
    return f'<math display="block"><semantics><mrow>{markup}</mrow>{annotation}</semantics></math>'


def html(block: list[str]) -> str:
    """Lines of formulas, one below the other."""
    return '<div class="formula">' + "".join(map(mathml, joined(block))) + "</div>"


def joined(block: list[str]) -> list[str]:
    """The formulas of a block: a line that is indented further goes on with the one above."""
    lines: list[str] = []
    least = min(len(line) - len(line.lstrip()) for line in block if line.strip())
    for line in filter(str.strip, block):
        if lines and line[least:].startswith("  "):
            lines[-1] += "  " + line.strip()
        else:
            lines.append(line.strip())
    return lines


def latex(formula: str) -> str:
    """The formula in LaTeX, from its MathML."""
    markup = mathml(formula).partition("<semantics>")[2].partition("<annotation")[0]
    return _latex(ElementTree.fromstring(markup)).strip()


def _latex(node: ElementTree.Element) -> str:
    inner, text = [_latex(child) for child in node], node.text or ""
    match node.tag:
        case "mfrac":
            return rf"\frac{{{inner[0]}}}{{{inner[1]}}}"
        case "msqrt":
            return rf"\sqrt{{{inner[0]}}}"
        case "msub" | "munder" | "msup" | "mover":
            return f"{inner[0]}{'_' if node.tag in ('msub', 'munder') else '^'}{{{inner[1]}}}"
        case "msubsup" | "munderover":
            return f"{inner[0]}_{{{inner[1]}}}^{{{inner[2]}}}"
        case "mspace":
            return r"\quad " if "2em" in node.get("width", "") else r"\;"
        case "mtext":
            return rf"\texttt{{{text.replace('_', chr(92) + '_')}}}"
        case "mi" if text in FUNCTIONS:
            return rf"\{text} "
        case "mi" if node.get("mathvariant") == "normal":
            return rf"\mathrm{{{text}}}"
        case "mi" | "mn" | "mo":
            return "".join(TEX.get(sign, sign) for sign in text)
    return "".join(inner)


def typeset(text: str) -> str:
    """Markdown with its indented blocks that are formulas as MathML. Everything else stays as it is."""
    return _replaced(text, lambda block: ["```{raw} html", html(block), "```"])


def with_latex(text: str) -> str:
    """The same with LaTeX between dollars, as notebooks read it."""
    return _replaced(text, lambda block: [line for formula in joined(block) for line in ("$$", latex(formula), "$$")])


def _replaced(text: str, made: Callable[[list[str]], list[str]]) -> str:
    out: list[str] = []
    block: list[str] = []
    fenced = False
    for line in [*text.split("\n"), "end"]:
        if line.startswith("```"):
            fenced = not fenced
        if not fenced and line.startswith("    ") and (block or not out or not out[-1].strip()):
            block.append(line)
            continue
        if block:
            out += made(block) if is_formula(block) else block
            block = []
        out.append(line)
    return "\n".join(out[:-1])


def _tokens(text: str) -> Iterator[Token]:
    space = 0
    for match in TOKEN.finditer(text.replace("`", "")):
        if match.lastgroup == "space":
            space = len(match[0])
            continue
        yield Token(str(match.lastgroup), match[0], space)
        space = 0


def _row(tokens: list[Token], at: int, closing: str) -> tuple[str, int]:
    """Everything up to `closing`: its markup, and the place behind it."""
    items: list[Item] = []
    before = Token("space", "", 0)
    while at < len(tokens):
        token = tokens[at]
        if closing and token.text == closing:
            return "".join(item.markup for item in items), at + 1
        if token.text in ")]}":
            raise NotAFormula(token.text)
        if token.text == "/" and items and at + 1 < len(tokens):
            first = tokens[at + 1]
            below, at = _item(tokens, at + 1)
            if first.text in LARGE and at < len(tokens):  # a sum ends with what is summed
                summed, at = _item(tokens, at)
                below = Item(below.markup + summed.markup)
            while _is_word(first) and at < len(tokens) and _is_word(tokens[at]):
                below, at = Item(f"{below.markup}{SPACE}{_named(tokens[at].text)}"), at + 1
            above = items.pop()
            if token.space and len(items) > 1 and items[-1].markup == SPACE and items[-2].markup == _named("log"):
                above = Item(
                    "".join(item.markup for item in (*items[-2:], above))
                )  # "log π / n" divides the logarithm, "log π/n" does not
                del items[-2:]
            items.append(
                Item(f"<mfrac><mrow>{above.inner or above.markup}</mrow><mrow>{below.inner or below.markup}</mrow></mfrac>")
            )
            continue
        if token.space > 2 and items:
            items.append(Item('<mspace width="2em"/>'))
        elif token.space and items and (_is_word(token) or (_is_word(before) and token.kind != "sign") or token.text in CLOSING):
            items.append(Item(SPACE))
        item, at = _item(tokens, at)
        items.append(item)
        before = tokens[at - 1] if _is_word(tokens[at - 1]) else token
    if closing:
        raise NotAFormula(closing)
    return "".join(item.markup for item in items), at


def _is_word(token: Token) -> bool:
    return token.kind == "name" and len(token.text.strip("'")) > 1


def _item(tokens: list[Token], at: int) -> tuple[Item, int]:
    """A factor with its indices, its exponent and, of a function, its arguments."""
    if at >= len(tokens):
        raise NotAFormula("it ends too early")
    token = tokens[at]
    base, inner, at = _atom(tokens, at)
    below = above = ""
    while at < len(tokens) and not tokens[at].space:
        mark = tokens[at]
        if mark.kind == "sub":
            below, at = f"{below}<mn>{mark.text.translate(SUBSCRIPTS)}</mn>", at + 1
        elif mark.text == "_" and (token.kind != "sign" or inner or token.text in LARGE):
            found, at = _script(tokens, at + 1)
            below += found
        elif mark.kind == "sup":
            above, at = above + f"<mn>{mark.text.translate(SUPERSCRIPTS)}</mn>", at + 1
        elif mark.text == "^":
            found, at = _script(tokens, at + 1)
            above += found
        elif mark.text == "*" and token.kind == "name":
            above, at = above + "<mo>*</mo>", at + 1
        else:
            break
    under = token.text in LARGE or token.text in UNDER
    markup = _scripted(base, below, above, under)
    if token.kind == "name" and at < len(tokens) and not tokens[at].space and tokens[at].text in "([" and token.text not in LARGE:
        arguments, _, at = _atom(tokens, at)
        return Item(f"<mrow>{markup}{arguments}</mrow>"), at
    return Item(markup, inner if not below and not above else ""), at


def _scripted(base: str, below: str, above: str, under: bool) -> str:
    rows = [base, *(f"<mrow>{script}</mrow>" for script in (below, above) if script)]
    if len(rows) == 1:
        return base
    name = ("under" if under else "sub") if below else ""
    name += ("over" if under else "sup") if above else ""
    return f"<m{name}>{''.join(rows)}</m{name}>"


def _atom(tokens: list[Token], at: int) -> tuple[str, str, int]:
    """(markup, what is in its brackets, the place behind it) of what a factor begins with."""
    token = tokens[at]
    text = token.text
    if text in CLOSING:
        inside, after = _row(tokens, at + 1, CLOSING[text])
        fence = "" if "<mfrac" in inside else ' stretchy="false"'
        whole = f"<mrow><mo{fence}>{text}</mo>{inside}<mo{fence}>{CLOSING[text]}</mo></mrow>"
        return whole, inside if text == "(" else "", after
    if text == "√" and at + 1 < len(tokens):
        if tokens[at + 1].text in CLOSING:
            markup, inner, after = _atom(tokens, at + 1)
        else:
            (item, after), inner = _item(tokens, at + 1), ""
            markup = item.markup
        return f"<msqrt><mrow>{inner or markup}</mrow></msqrt>", "", after
    if token.kind == "code":
        return f"<mtext>{text}</mtext>", "", at + 1
    if token.kind == "bars":
        inside, _ = _row(list(_tokens(text[1:-1])), 0, "")
        return f'<mrow><mo stretchy="false">|</mo>{inside}<mo stretchy="false">|</mo></mrow>', "", at + 1
    if token.kind == "number":
        return f"<mn>{text.replace('-', '−')}</mn>", "", at + 1
    if token.kind == "name":
        return _named(text), "", at + 1
    if text in LARGE:
        return f"<mo>{LARGE[text]}</mo>", "", at + 1
    sign = {"<=": "≤", ">=": "≥", "-": "−", "*": "·", "|": "|"}.get(text, text)
    fence = ' stretchy="false"' if sign in "|‖" else ""
    return f"<mo{fence}>{escape(sign)}</mo>", "", at + 1


def _named(text: str) -> str:
    """A variable in italics, a word upright; with its primes."""
    bare = text if text.endswith("'s") else text.rstrip("'")
    if bare in LARGE:
        return f"<mo>{LARGE[bare]}</mo>"
    found = f"<mi>{bare}</mi>" if len(bare) == 1 else f'<mi mathvariant="normal">{bare}</mi>'
    return f"<msup>{found}<mo>′</mo></msup>" if bare != text else found


def _script(tokens: list[Token], at: int) -> tuple[str, int]:
    """An index or exponent: what is in brackets, or signs and one name or number. Indices of two letters are two."""
    if at >= len(tokens):
        raise NotAFormula("an index is missing")
    if tokens[at].text in "{(":
        return _row(tokens, at + 1, CLOSING[tokens[at].text])
    signs = ""
    while at < len(tokens) and tokens[at].text in "<>≤≥=−-+":
        signs += f"<mo>{escape(tokens[at].text.replace('-', '−'))}</mo>"
        at += 1
    if at >= len(tokens) or tokens[at].kind not in ("name", "number"):
        if signs:
            return signs, at
        raise NotAFormula("an index is missing")
    text = tokens[at].text
    if tokens[at].kind == "name" and text in ("it", "ij", "ti"):
        return signs + "".join(f"<mi>{letter}</mi>" for letter in text), at + 1
    return signs + (_named(text) if tokens[at].kind == "name" else f"<mn>{text}</mn>"), at + 1
