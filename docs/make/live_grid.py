"""Builds the live grid world of the documentation: a folder that needs no server, also when it is opened from a disk.

`build(folder)` writes index.html, one script, one style sheet, and a script of frames for each world. The boards, charts and
panels are those of the studio's grid page, put together into one script, because browsers load no modules from a disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from psigrad.tabular import GridWorld
from psigrad_studio import playback
from psigrad_studio.playback import ALGORITHMS, Frame, PlaybackCache, PlaybackOptions, PlaybackSpec

SOURCES = Path(__file__).parents[1] / "live"
STATIC = Path(playback.__file__).parent / "static"
# In the order in which they need one another; what the page has of its own stands in `SOURCES`.
PLOTS = ("dom.js", "vendor/uplot/uPlot.js", "plot.js")
MODULES = {
    **{name: STATIC / name for name in (*PLOTS, "grid/chart.js", "grid/board.js", "grid/world.js")},
    "grid/playback.js": SOURCES / "playback.js",
    "grid/panel.js": STATIC / "grid/panel.js",
    "main.js": SOURCES / "main.js",
}
STYLES = (STATIC / "vendor/uplot/uPlot.min.css", STATIC / "base.css", STATIC / "grid/style.css", SOURCES / "style.css")
RUN = ("value_iteration", "policy_iteration", "q_learning", "sarsa")
EPISODES, LEARNED = 10, 120
"""Episodes of a learner in each frame, and its frames."""


@dataclass(frozen=True)
class LiveWorld:
    """A world of the page."""

    name: str
    title: str
    says: str
    grid: GridWorld


OPEN = """
........
......+.
........
....-...
........
........
........
........
"""
ROOMS = """
.....#.....
.....#...+.
...........
.....#.....
.....#.....
.#..####.##
.....#..-..
.....#.....
...........
S....#.....
.....#.....
"""
CLIFF = """
........
........
........
S------+
"""
CLASSIC = """
...+
.#.-
S...
"""
WORLDS = (
    LiveWorld(
        "open",
        "Open field",
        "Values spread from the treasure, a cell further with each sweep. One move in ten slips.",
        GridWorld.from_text(OPEN, slip=0.1),
    ),
    LiveWorld(
        "rooms",
        "Four rooms",
        "Doors make detours. Q-learning has to find the treasure by chance first.",
        GridWorld.from_text(ROOMS, slip=0.1, gamma=0.95),
    ),
    LiveWorld(
        "cliff",
        "Cliff",
        "A fall costs 1. Compare Q-learning, which values the edge as if it never erred, with SARSA, which knows that it does.",
        GridWorld.from_text(CLIFF, step_reward=-0.02, gamma=0.98),
    ),
    LiveWorld(
        "classic",
        "Classic 3 × 4",
        "The world of the textbooks: each move costs 0.04, and one in five slips.",
        GridWorld.from_text(CLASSIC, slip=0.2, step_reward=-0.04, gamma=0.99),
    ),
)


def build(folder: Path) -> None:
    """Write the page into `folder`."""
    (folder / "worlds").mkdir(parents=True, exist_ok=True)
    transport = re.search(r'<div class="transport.*?\n    </div>', (STATIC / "grid/page.html").read_text(), re.DOTALL)
    assert transport is not None
    (folder / "index.html").write_text((SOURCES / "index.html").read_text().replace("[transport]", transport[0]))
    (folder / "style.css").write_text("\n".join(path.read_text() for path in STYLES))
    listed = [{"name": w.name, "title": w.title, "says": w.says, "map": compact(w.grid), "episodes": EPISODES} for w in WORLDS]
    told = {"worlds": listed, "algorithms": {name: asdict(ALGORITHMS[name]) for name in RUN}}
    (folder / "page.js").write_text(f"window.psigradLive = {json.dumps(told)};\n{bundle(MODULES)}")
    for world in WORLDS:
        frames = json.dumps(prepared(world), separators=(",", ":"))
        (folder / "worlds" / f"{world.name}.js").write_text(f"psigradWorld({json.dumps(world.name)}, {frames});\n")


def prepared(world: LiveWorld) -> dict[str, Any]:
    """The frames of each algorithm, and the exact values."""
    found: dict[str, Any] = {}
    for name in RUN:
        options = PlaybackOptions(episodes=EPISODES)
        made = PlaybackCache(1 << 30).playback(PlaybackSpec(world.grid, name, options), LEARNED + 1, 600.0)
        found[name] = {"frames": [row(frame) for frame in made.frames[: LEARNED + 1]], "note": made.note if made.ended else ""}
        found["exact"] = [rounded(value) for value in made.target]
    return found


def row(frame: Frame) -> dict[str, Any]:
    """A frame as the page's panels read it, with as many digits as are shown."""
    episode = frame.episode
    said = episode and {
        "states": episode.states.tolist(),
        "return": rounded(episode.rewards.sum()),
        "terminated": episode.terminated,
    }
    return {
        "index": frame.index,
        "step": frame.step,
        "value": [rounded(value) for value in frame.value],
        "actions": frame.actions.tolist(),
        "residual": rounded(frame.residual),
        "error": rounded(frame.error),
        "bound": None if frame.error_bound is None else rounded(frame.error_bound),
        "changed": frame.changed,
        "episode": said,
    }


def rounded(value: float) -> float:
    """Six significant digits."""
    return float(f"{value:.6g}")


def compact(grid: GridWorld) -> str:
    """The map as the page's `World.parse` reads it: rows apart by a slash, runs of free cells as numbers."""
    signs = {".": " ", "#": "W", "S": "S", "+": "G", "-": "T"}
    rows = ["".join(signs[sign] for sign in line) for line in grid.to_text().splitlines()]
    return "/".join(re.sub(" +", lambda run: str(len(run[0])), line) for line in rows)


def bundle(modules: Mapping[str, Path]) -> str:
    """Modules by name as one script that is no module: each becomes a function that returns what it exports."""
    parts = ['(() => {\n"use strict";\nconst modules = {};']
    for name, path in modules.items():
        code, exported = scoped(path.read_text(), Path(name).parent)
        parts.append(f"modules[{json.dumps(name)}] = (() => {{\n{code}\nreturn {{ {', '.join(exported)} }};\n}})();")
    return "\n".join([*parts, "})();\n"])


def scoped(source: str, folder: Path) -> tuple[str, list[str]]:
    """A module's code with its imports as constants, and what it exports as properties."""

    def imported(match: re.Match[str]) -> str:
        names, path = match[1], match[2]
        where = path if not path.startswith(".") else _joined(folder, path)
        if names.startswith("{"):
            return f"const {names.replace(' as ', ': ')} = modules[{json.dumps(where)}];"
        return f"const {names} = modules[{json.dumps(where)}].default;"

    code = re.sub(r'^import (\{[^}]*\}|\w+) from "([^"]+)";$', imported, source, flags=re.MULTILINE)
    exported = re.findall(r"^export (?:async )?(?:const|let|class|function\*?) (\w+)", code, flags=re.MULTILINE)
    exported += [f"default: {name}" for name in re.findall(r"^export default (\w+);$", code, flags=re.MULTILINE)]
    code = re.sub(r"^export default \w+;$", "", code, flags=re.MULTILINE)
    code = re.sub(r"^export (?=async |const |let |class |function)", "", code, flags=re.MULTILINE)
    if re.search(r"^(?:import|export)\b", code, flags=re.MULTILINE):
        raise ValueError("A module imports or exports in a form that is not put together here.")
    return code, exported


def _joined(folder: Path, path: str) -> str:
    """A relative import as a path in static/."""
    parts = list(folder.parts)
    for part in path.split("/"):
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)
