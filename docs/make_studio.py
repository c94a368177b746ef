"""Takes the pictures of docs/studio.md, docs/images/studio_*.png, with Chromium.

PYTHONPATH=tests/support python docs/make_studio.py
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

from browser import chromium
from live_studio import live_studio
from PIL import Image
from playwright.sync_api import expect

IMAGES = Path(__file__).parent / "images"
COLOURS = 200
ROOMS = "map=5W5/5W3G1/11/5W5/5W5/1W2WWWW1WW/5W2T2/5W5/11/S4W5/5W5&discount=0.95"
# name: width, height, theme, what the address says
PICTURES = {
    "laptop_light": (1280, 860, "light", "slip=0.1&at=11&cell=3,2"),
    "laptop_dark": (1280, 860, "dark", f"{ROOMS}&slip=0.1&at=40&run=policy_iteration,q_learning&cell=2,5"),
    "phone_light": (390, 844, "light", "slip=0.1&at=11&cell=3,2"),
    "phone_dark": (390, 844, "dark", "slip=0.1&at=60&run=sarsa&cell=5,6"),
}


def main() -> None:
    """All pictures."""
    with live_studio() as studio, chromium() as browser:
        for name, (width, height, theme, fragment) in PICTURES.items():
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme=theme,
                device_scale_factor=1.5,
                reduced_motion="reduce",
            )
            page = context.new_page()
            page.goto(f"{studio.base}/enter?key={studio.settings.key}")
            page.goto("about:blank")
            page.goto(f"{studio.base}/grid#{fragment}")
            expect(page.locator("#cell .result")).to_be_visible()
            page.wait_for_load_state("networkidle")
            picture = Image.open(BytesIO(page.screenshot())).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
            target = IMAGES / f"studio_{name}.png"
            picture.save(target, optimize=True)
            print(f"wrote {target} ({target.stat().st_size // 1024} KB)")
            context.close()


if __name__ == "__main__":
    main()
