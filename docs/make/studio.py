"""Takes the pictures of docs/studio.md, docs/images/studio_*.png, with Chromium.

PYTHONPATH=tests/support python docs/make/studio.py [RUNS]

RUNS is a folder that holds the demo of `psigrad demo`, and in compare/ `psigrad compare rloo grpo --seeds 0 1 2` from its SFT
model; without it the pictures of the chat page and of the runs page are left as they are.
"""

from __future__ import annotations

import contextlib
import random
import sys
from io import BytesIO
from pathlib import Path

from browser import chromium
from live_desk import bring, guest, project, told
from live_studio import LiveStudio, live_studio
from PIL import Image
from playwright.sync_api import Browser, Page, expect

IMAGES = Path(__file__).resolve().parents[1] / "images"
COLOURS = 200
ROOMS = "map=5W5/5W3G1/11/5W5/5W5/1W2WWWW1WW/5W2T2/5W5/11/S4W5/5W5&discount=0.95"
# name: width, height, theme, what the address says
PICTURES = {
    "laptop_light": (1280, 860, "light", "slip=0.1&at=11&cell=3,2"),
    "laptop_dark": (1280, 860, "dark", f"{ROOMS}&slip=0.1&at=40&run=policy_iteration,q_learning&cell=2,5"),
    "phone_light": (390, 844, "light", "slip=0.1&at=11&cell=3,2"),
    "phone_dark": (390, 844, "dark", "slip=0.1&at=60&run=sarsa&cell=5,6"),
}


CHAT = {"chat_laptop_light": (1280, 860, "light"), "chat_phone_dark": (390, 844, "dark")}
QUESTION = "Spell this word backward (example: sun -> nus): "


def chat_pictures(runs: Path) -> None:
    """The chat page with the models that `psigrad demo` left in `runs`/demo."""
    with live_studio(runs=runs) as studio, chromium() as browser:
        for name, (width, height, theme) in CHAT.items():
            page = entered(studio, browser, width, height, theme)
            page.goto(f"{studio.base}/chat")
            page.select_option("#first", label="demo/grpo, final model")
            page.fill("#seed", "1")
            page.fill("#message", f"{QUESTION}maneuver")
            page.press("#message", "Enter")
            expect(page.locator("#status")).to_have_text("The answer has ended.", timeout=60_000)
            page.check("#compare")
            page.select_option("#second", label="demo/sft, final model")
            page.fill("#message", f"{QUESTION}window")
            page.press("#message", "Enter")
            expect(page.locator(".choices button").first).to_be_visible(timeout=60_000)
            save(page.screenshot(), name)
            page.context.close()


LABELS = {
    "label_pair_light": (1280, 800, "light", "work"),
    "label_results_dark": (1280, 1180, "dark", "results"),
    "label_phone_light": (390, 844, "light", "work"),
    "label_phone_dark": (390, 844, "dark", "results"),
}
ANSWERS = {
    "step 0": "Just wait. Trains are late all the time, and they will understand.",
    "step 100": "Write that you are sorry and will be late.\n\n1. Say why.\n2. Say when you will be there.\n3. Offer a call.",
    "step 200": "Call rather than write: a short call shows that you care. Say that the train is late, give the time at which "
    "you will be there, and ask whether that still suits them or another day is better.",
}


def label_pictures() -> None:
    """The labelling page with a project that three people have labelled."""
    with live_studio() as studio, chromium() as browser:
        number = labelled(studio)
        for name, (width, height, theme, part) in LABELS.items():
            page = entered(studio, browser, width, height, theme)
            page.goto(f"{studio.base}/label#project={number}&part={part}")
            page.wait_for_selector("html[data-ready]")
            page.wait_for_load_state("networkidle")
            if part == "work" and width > 1000:
                page.keyboard.press("b")
            save(page.screenshot(), name)
            page.context.close()


READ = {"label_rendered_light": (900, 780, "light", ""), "label_difference_dark": (900, 780, "dark", "d")}
SOLVED = (
    " Multiply both sides by $2$, so $x^2 = 16$, and take the root:\n\n$$x = \\pm\\sqrt{16} = \\pm 4$$\n\n"
    "**Check:** $\\frac{1}{2} \\cdot 4^2 = 8$.",
    " Multiply both sides by $2$, so $x^2 = 16$, and take the root:\n\n$$x = \\sqrt{16} = 4$$\n\n"
    "```python\nprint(0.5 * 4**2)  # 8.0\n```",
)


def reading_pictures() -> None:
    """The labelling page with formulas and code: rendered, and by the difference."""
    with live_studio() as studio, chromium() as browser:
        number = project(studio, 0, "Which is right?", instructions="Choose the answer that is complete.")
        bring(studio, number, [{"prompt": "Solve $\\frac{1}{2}x^2 = 8$ for **all** $x$.", "completions": [*SOLVED]}])
        for name, (width, height, theme, key) in READ.items():
            page = entered(studio, browser, width, height, theme)
            page.goto(f"{studio.base}/label#project={number}&part=work")
            page.wait_for_selector(".completion math")
            if key:
                page.keyboard.press(key)
            page.wait_for_timeout(500)
            save(page.screenshot(), name)
            page.context.close()


def labelled(studio: LiveStudio) -> int:
    """A project with answers of people who mostly like the later steps better."""
    number = project(studio, 0, "Which answer helps?", overlap=2, strengths=3, instructions="Choose what you would rather get.")
    asked = "My train is late and I will miss the interview at {} o'clock. What should I write to them?"
    rows = [
        {
            "prompt": asked.format(hour),
            "completions": [f"{text}{' ' * hour}" for text in ANSWERS.values()],
            "samplers": [*ANSWERS],
        }
        for hour in range(1, 13)
    ]
    bring(studio, number, rows)
    draw, worth = random.Random(1), {text[:4]: n for n, text in enumerate(ANSWERS.values())}
    for name in ("Ada", "Ben", "Cem"):
        who = guest(studio, number, name=name)
        for _ in range(18):
            task = who.next(number)
            left, right = (worth[text[:4]] + draw.gauss(0, 0.9) for text in task["completions"])
            told(who.vote(task, choice="left" if left > right else "right", strength=draw.randint(1, 3)))
    return number


# name: width, height, theme, the runs that are chosen (how their names begin), what else the address says
RUNS = {
    "runs_curves_light": (1280, 860, "light", "compare/", "smooth=0.5"),
    "runs_group_dark": (1280, 860, "dark", "compare/grpo-0", "tab=rollouts&step=10"),
    "runs_phone_light": (390, 844, "light", "compare/grpo", "smooth=0.5"),
}


def run_pictures(runs: Path) -> None:
    """The runs page with what `psigrad compare rloo grpo --seeds 0 1 2` left in `runs`/compare."""
    with contextlib.chdir(runs.parent), live_studio(runs=Path(runs.name)) as studio, chromium() as browser:
        ids = {run["name"]: run["id"] for run in studio.ask("GET", "/api/runs").json["runs"]}
        for name, (width, height, theme, chosen, rest) in RUNS.items():
            page = entered(studio, browser, width, height, theme)
            page.goto(f"{studio.base}/runs#runs={'.'.join(i for n, i in ids.items() if n.startswith(chosen))}&{rest}")
            page.wait_for_selector("html[data-ready]")
            shown = page.locator(".members .tokens" if "rollouts" in rest else "#charts canvas").first
            expect(shown).to_be_visible(timeout=60_000)
            page.wait_for_timeout(500)
            if width < 500:
                page.locator("#charts").evaluate("node => window.scrollTo(0, node.offsetTop - 130)")
            save(page.screenshot(), name, all_colours="rollouts" in rest)  # the tokens' are many and on few pixels
            page.context.close()


def sending_picture(runs: Path) -> None:
    """Two completions of a group of `runs`/demo/grpo, about to be sent to the labelling desk."""
    with contextlib.chdir(runs.parent), live_studio(runs=Path(runs.name)) as studio, chromium() as browser:
        project(studio, 0, "Which is nearer")
        run = next(run["id"] for run in studio.ask("GET", "/api/runs").json["runs"] if run["name"] == "demo/grpo")
        page = browser.new_page(viewport={"width": 1280, "height": 860}, device_scale_factor=1.5, reduced_motion="reduce")
        page.goto(f"{studio.base}/enter?key={studio.settings.key}")
        page.goto("about:blank")
        page.goto(f"{studio.base}/runs#runs={run}&tab=rollouts&step=1")
        members = page.locator(".member")
        expect(members.first).to_be_visible()
        texts = page.locator(".member :is(.tokens, .said)").all_text_contents()
        for number in (0, next(n for n, text in enumerate(texts) if text != texts[0])):
            members.nth(number).get_by_label("compare").check()
        expect(page.locator(".sending button.primary")).to_be_visible()
        save(page.screenshot(), "runs_send_light")


def save(screenshot: bytes, name: str, all_colours: bool = False) -> None:
    """docs/images/studio_NAME.png."""
    picture = Image.open(BytesIO(screenshot)).convert("RGB")
    picture = picture if all_colours else picture.quantize(COLOURS, dither=Image.Dither.NONE)
    target = IMAGES / f"studio_{name}.png"
    picture.save(target, optimize=True)
    print(f"wrote {target} ({target.stat().st_size // 1024} KB)")


def entered(studio: LiveStudio, browser: Browser, width: int, height: int, theme: str) -> Page:
    """A page of this size and theme, logged in and empty: an address that differs behind # alone would not load anew."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, device_scale_factor=1.5, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(f"{studio.base}/enter?key={studio.settings.key}")
    page.goto("about:blank")
    return page


def grid_pictures() -> None:
    """The grid page."""
    with live_studio() as studio, chromium() as browser:
        for name, (width, height, theme, fragment) in PICTURES.items():
            page = entered(studio, browser, width, height, theme)
            page.goto(f"{studio.base}/grid#{fragment}")
            expect(page.locator("#cell .result")).to_be_visible()
            page.wait_for_load_state("networkidle")
            save(page.screenshot(), name)
            page.context.close()


if __name__ == "__main__":
    grid_pictures()
    label_pictures()
    reading_pictures()
    for folder in sys.argv[1:]:
        chat_pictures(Path(folder))
        run_pictures(Path(folder))
        sending_picture(Path(folder))
