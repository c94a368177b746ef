"""Markdown, formulas and differences as the pages show them: the right elements, nothing hidden, nothing that could run."""

from __future__ import annotations

import gzip
import itertools
import random
import re
from functools import partial

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import Visits
from live_desk import bring, project
from live_studio import live_studio
from playwright.sync_api import expect
from run_folders import append, make_run, rollout
from timing import quickest, until

HOSTILE = [
    "<script>window.ran = 1</script> and <img src=x onerror='window.ran=2'>",
    "[click](javascript:window.ran=3) ![picture](http://127.0.0.1:9/x.png) <http://127.0.0.1:9/auto>",
    "<svg onload=window.ran=4><iframe srcdoc='<script>window.ran=5</script>'></iframe>",
    "```<script>\n</code></pre><script>window.ran=6</script>\n```",
    "$\\href{javascript:window.ran=7}{x}$ and $\\includegraphics{http://127.0.0.1:9/x}$ and $\\class{notice}{x}$",
    "$\\text{<img src=x onerror=window.ran=8>}$ \\(\\unicode{60}script\\) $$\\htmlStyle{position:fixed}{x}$$",
    "<!-- hidden words --> <think>\nthought of\n</think> [reference]: http://127.0.0.1:9/r",
    "<style>* { display: none }</style> <form action=http://127.0.0.1:9><input name=a></form> <base href=http://127.0.0.1:9>",
    "$\\rule{9999em}{9999em}$ $\\hspace{-9999em} over$ $\\pmb{x} \\sideset{}{'}\\sum$ $\\gdef\\x{\\x\\x}\\x$",
    "| a | b |\n|---|---|\n| <b onclick=window.ran=9>c</b> | `d` |\n\n# <u>Heading</u>\n\n> **quoted** _so_ ~~gone~~ &lt;in&gt;",
]
HTML = ["div", "span", "p", "br", "hr", "strong", "em", "s", "code", "pre", "ul", "ol", "li", "blockquote"]
ALLOWED = {*HTML, "table", "thead", "tbody", "tr", "th", "td"}
MATHML = re.compile(
    r"math|m(row|i|o|n|s|text|space|frac|sqrt|root|sub|sup|subsup|under|over|underover|table|tr|td|style|padded|phantom)"
)


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    runs = tmp_path_factory.mktemp("reading") / "runs"
    run = make_run(runs / "grpo", steps=2)
    rows = [rollout(9, 99, k, completion=text, prompt=HOSTILE[0]) for k, text in enumerate(HOSTILE)]
    append(run / "rollouts.jsonl", *rows)
    with live_studio(runs=runs, requests_per_second=1e6, burst=10**6) as running:
        yield running


def opened(studio, visits, path: str, scheme: str = "light"):
    page = visits.page("laptop", scheme)
    page.goto(f"{studio.base}/enter?key={studio.settings.key}")
    page.goto("about:blank")
    page.goto(studio.base + path)
    page.wait_for_selector("html[data-ready]")
    return page


@pytest.fixture
def visit(studio, browser):
    """visit(path, …) -> a page that is ready; what it logged and asked for is looked at in the end."""
    visits = Visits(browser)
    yield partial(opened, studio, visits)
    visits.close(bases=[studio.base])


@pytest.fixture(scope="module")
def reader(studio, browser):
    """A page whose modules are asked directly."""
    visits = Visits(browser)
    yield opened(studio, visits, "/chat")
    visits.close(bases=[studio.base])


def rendered(page, text: str):
    """`text` as the pages render it, in a page of its own."""
    return page.evaluate(
        """async text => {
            const { marked, formulas } = await import("/static/markup.js");
            const { nodes, waiting } = marked(text), box = document.createElement("div");
            box.append(...nodes);
            document.body.append(box);
            await formulas(waiting);
            const all = [...box.querySelectorAll("*")];
            const found = { tags: all.map(e => e.localName), html: box.innerHTML, text: box.textContent, width: box.scrollWidth,
                attributes: all.flatMap(e => e.getAttributeNames().map(n => [n, e.getAttribute(n)])) };
            box.remove();
            return found;
        }""",
        text,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("**a** *b* ~~c~~ `d`", "<p><strong>a</strong> <em>b</em> <s>c</s> <code>d</code></p>"),
        ("# T\n\nx\ny", '<p class="heading depth-1">T</p><p>x<br>y</p>'),
        (
            "1. a\n2. b\n\n- [x] c",
            "<ol><li><span>a</span></li><li><span>b</span></li></ol><ul><li><span>☑ </span><span>c</span></li></ul>",
        ),
        ("7) a", '<ol start="7"><li><span>a</span></li></ol>'),
        ("> q\n\n---", "<blockquote><p>q</p></blockquote><hr>"),
        ("[w](http://a.b)", '<p><span class="link">w<span class="soft"> (http://a.b)</span></span></p>'),
        ("![w](u) <b>x</b>", "<p>![w](u) &lt;b&gt;x&lt;/b&gt;</p>"),
        ("It costs $5 and $6.", "<p>It costs $5 and $6.</p>"),
        ("a\\*b &lt;c&gt;", "<p>a*b &lt;c&gt;</p>"),
        ("<think>\n**a**\n</think>", "<p>&lt;think&gt;<br><strong>a</strong><br>&lt;/think&gt;</p>"),
    ],
)
def test_markdown_becomes_these_elements(reader, text, expected):
    assert rendered(reader, text)["html"] == expected


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("$\\frac{1}{2}$", {"mfrac"}),
        ("so \\(\\sqrt{x}\\) is", {"msqrt"}),
        ("$$\n\\sum_{i=1}^n i\n=\n1\n$$", {"munderover"}),
        ("\\[x^2\\]", {"msup"}),
        ("\\begin{align}\na &= b \\\\\nc &= d\n\\end{align}", {"mtable"}),
        ("\\(\\boxed{42}\\)", {"mn"}),
        ("$\\pmb{x}$", {"math"}),
    ],
)
def test_formulas_become_mathml(reader, text, tags):
    found = rendered(reader, text)
    assert tags <= set(found["tags"]) and "unread" not in found["html"]
    assert not any(name == "style" and "bold" in value for name, value in found["attributes"])


def test_a_formula_that_cannot_be_read_is_shown_as_it_was_written(reader):
    found = rendered(reader, "before $\\frac{1}{$ after $\\sideset{a}{b}\\sum$")
    assert "math" not in found["tags"] and found["text"] == "before $\\frac{1}{$ after $\\sideset{a}{b}\\sum$"


def strange(tags: list[str]) -> list[str]:
    """Elements that no text may become."""
    return [tag for tag in tags if tag not in ALLOWED and not MATHML.fullmatch(tag)]


def letters(text: str) -> list[str]:
    return sorted(filter(str.isalpha, text))


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_become_only_elements_of_the_list_and_hide_nothing(reader, text):
    found = rendered(reader, text)
    assert strange(found["tags"]) == []
    assert not any(name in ("href", "src", "id", "action") or name.startswith("on") for name, _ in found["attributes"])
    assert all(
        value in CLASSES or value.startswith("tml-")
        for name, value in found["attributes"]
        if name == "class"
        for value in value.split()
    )
    assert found["width"] <= 1280 and reader.evaluate("window.ran") is None
    if "$" not in text:
        assert letters(found["text"]) == letters(text.replace("&lt;", "").replace("&gt;", ""))


CLASSES = {"link", "soft", "formula", "unread", "display", "code", "language", "heading", "depth-1", "wide", "as-written"}


def test_negative_control_the_list_would_notice():
    assert strange(["img", "a", "script", "maction", "semantics"]) == ["img", "a", "script", "maction", "semantics"]


LONG = {
    "quotes": ">" * 20_000,
    "brackets": "[" * 20_000,
    "links": "[a](" * 5_000,
    "dollars": "$$" * 10_000,
    "stars": "**_" * 6_600,
    "ticks": "`a``b```c" * 2_200,
    "tags": "<!--" * 5_000,
    "lists": "\n".join(" " * 2 * i + "- x" for i in range(130)),
    "tables": "|a|b\n|-|-\n" + "|" * 19_000,
    "blanks": "a" + " " * 19_900 + "b",
    "environments": "\\begin{align}" * 1_500,
}


@pytest.mark.parametrize("name", LONG)
def test_no_text_of_20_000_signs_holds_the_page_up(reader, name):
    """Quadratic reading would take seconds; the bound leaves room for a machine with much else to do."""
    read = """async text => {
        const { marked } = await import("/static/markup.js");
        marked(text);
    }"""
    assert quickest(lambda: reader.evaluate(read, LONG[name]), 8) < 8


def test_the_labelling_page_shows_texts_rendered_as_written_and_by_their_difference(visit, studio):
    number = project(studio, 0, "Reading", instructions="Read.")
    bring(studio, number, [{"prompt": "What is $x$?", "completions": [" It is **four** `4`", " It is **five** `5` [now]"]}])
    page = visit(f"/label#project={number}&part=work")
    expect(page.locator(".completion strong")).to_have_count(2)
    expect(page.locator(".asked math")).to_have_count(1)
    page.keyboard.press("m")
    expect(page.locator(".completion strong")).to_have_count(0)
    assert sorted(page.locator(".words").all_text_contents()) == [" It is **five** `5` [now]", " It is **four** `4`"]
    expect(page.locator(".words .blank")).to_have_count(2)
    page.keyboard.press("d")
    owns = lambda: sorted(sorted(page.locator(".words").nth(i).locator("mark").all_text_contents()) for i in range(2))  # noqa: E731
    until(lambda: owns() == [[" [now]", "5", "five"], ["4", "four"]])
    for scheme_step in ("light", "dark"):
        assert not Axe().run(page).response["violations"], scheme_step
        page.click("#theme")
    page.keyboard.press("m")
    page.reload()
    page.wait_for_selector(".words .text, .words .rich")
    assert page.locator("[data-reading][aria-pressed=true]").get_attribute("data-reading") in ("written", "rendered")


@pytest.mark.quick
def test_rollouts_are_rendered_and_run_nothing(visit, studio):
    run = studio.ask("GET", "/api/runs").json["runs"][0]["id"]
    page = visit(f"/runs#runs={run}&tab=rollouts&step=9")
    expect(page.locator(".member")).to_have_count(len(HOSTILE))
    page.check(".ways input")
    expect(page.locator(".member .rich")).not_to_have_count(0)
    expect(page.locator(".member math").first).to_be_attached()
    assert page.evaluate("window.ran") is None
    assert strange(page.evaluate("[...document.querySelectorAll('.said *')].map(e => e.localName)")) == []
    assert not Axe().run(page).response["violations"]
    for n in (0, 1):
        page.locator(".member input").nth(n).check()
    page.get_by_role("button", name="Difference").click()
    expect(page.locator(".apart mark").first).to_be_visible()
    page.uncheck(".ways input")
    expect(page.locator(".member .rich")).to_have_count(0)


DIFFERING = """async pairs => {
    const { differing } = await import("/static/difference.js");
    return pairs.map(([a, b]) => differing(a, b));
}"""


def longest_common(a: list[str], b: list[str]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        before = row
        row = [0]
        for j, y in enumerate(b):
            row.append(before[j] + 1 if x == y else max(before[j + 1], row[j]))
    return row[-1]


def test_differences_are_a_longest_common_subsequence_seen_alike_from_both_sides(reader):
    """Held against the textbook's recurrence, on texts without two blanks that could be common between different words."""
    draw = random.Random(0)
    texts = ["-".join(draw.choice("abc") for _ in range(draw.randint(0, 30))) for _ in range(24)] + ["", "x", "a-b", "b-a"]
    pairs = list(itertools.combinations(texts, 2))[:200]
    there, back = (reader.evaluate(DIFFERING, each) for each in (pairs, [(b, a) for a, b in pairs]))
    for (a, b), mine, theirs in zip(pairs, there, back, strict=True):
        assert ("".join(p["words"] for p in mine), "".join(p["words"] for p in theirs)) == (a, b)
        common = ["".join(p["words"] for p in parts if not p["own"]) for parts in (mine, theirs)]
        assert common[0] == common[1]
        assert len(re.findall(r"\w+|-", common[0])) == longest_common(re.findall(r"\w+|-", a), re.findall(r"\w+|-", b))


def test_blanks_between_own_words_are_marked_with_them(reader):
    (parts,) = reader.evaluate(DIFFERING, [["one two three end", "a b c end"]])
    assert parts == [{"words": "one two three", "own": True}, {"words": " end", "own": False}]
    (far,) = reader.evaluate(DIFFERING, [["a " * 3000 + "x", "b " * 3000 + "x"]])
    assert far[0]["own"] and far[-1]["words"].endswith("x")


# ---- budgets

SCRIPTS = """() => {
    const scripts = performance.getEntriesByType("resource").filter(e => e.name.endsWith(".js"));
    const sum = name => scripts.reduce((all, e) => all + e[name], 0);
    return [sum("decodedBodySize"), sum("encodedBodySize"), scripts.length];
}"""
BUDGET = 150_000


@pytest.mark.parametrize("name", ["grid", "runs", "label", "chat"])
def test_pages_open_with_less_than_150_kb_of_scripts(visit, name):
    whole, _, count = visit(f"/{name}").evaluate(SCRIPTS)
    assert count > 3 and whole < BUDGET


@pytest.mark.long  # a time, on a machine that may be busy
@pytest.mark.parametrize("name", ["grid", "runs", "label", "chat"])
def test_pages_paint_within_a_second(visit, studio, name):
    page = visit(f"/{name}")
    # a page with three fields says how busy the machine is with other things; on a quiet one it paints within 100 ms
    busy = max(1.0, first_paint(page, f"{studio.base}/join") / 200)
    assert first_paint(page, f"{studio.base}/{name}") < 1_000 * busy


def first_paint(page, address: str) -> float:
    """Milliseconds to the first contentful paint, the quickest of five."""
    found = []
    for _ in range(5):
        page.goto("about:blank")
        page.goto(address)
        until(lambda: page.evaluate("performance.getEntriesByName('first-contentful-paint').length > 0"))
        found.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    return min(found)


def test_with_markdown_and_formulas_still_less_than_150_kb_travel(visit, studio):
    run = studio.ask("GET", "/api/runs").json["runs"][0]["id"]
    page = visit(f"/runs#runs={run}&tab=rollouts&step=9")
    page.check(".ways input")
    expect(page.locator(".member math").first).to_be_attached()
    whole, travelled, _ = page.evaluate(SCRIPTS)
    assert whole > BUDGET > travelled > 50_000  # temml is there


def test_scripts_are_packed_only_for_those_who_take_them_so(studio):
    plain = studio.ask("GET", "/static/base.css", headers={"Host": studio.host})
    packed = studio.ask("GET", "/static/base.css", headers={"Host": studio.host, "Accept-Encoding": "br, gzip"})
    assert "content-encoding" not in plain.headers and packed.headers["content-encoding"] == "gzip"
    assert plain.headers["vary"] == packed.headers["vary"] == "accept-encoding"
    assert gzip.decompress(packed.body) == plain.body and len(packed.body) < len(plain.body)
