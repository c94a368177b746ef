"""llms.txt and llms-full.txt of the site: the pages for a language model that reads them, as https://llmstxt.org proposes."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1]
LINK = re.compile(r"^(?:- )?\[([^\]]+)\]\(([^)\s]+)\)(.*)", re.MULTILINE)
MODULE = re.compile(r"^\| \[([^\]]+)\]\((\w+)\.md\) \| (.*) \|$", re.MULTILINE)


def write(out: Path) -> None:
    """Write both files into the folder of the site: the list of pages, and the guides in full."""
    index = (DOCS / "index.md").read_text()
    title = "# psigrad\n\n> A Python library: reinforcement learning from a grid world to the post-training of language models."
    sections = []
    for part in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        pages = [f"- [{name}]({re.sub(r'[.](md|ipynb)$', '.html', target)}){rest}" for name, target, rest in LINK.findall(body)]
        sections.append(f"## {heading.strip()}\n\n" + "\n".join(pages))
    modules = MODULE.findall((DOCS / "api" / "index.md").read_text())
    sections.append("## API\n\n" + "\n".join(f"- [{name}](api/{page}.html): {said}" for name, page, said in modules))
    (out / "llms.txt").write_text("\n\n".join([title, *sections]) + "\n")
    guides = [target for _, target, _ in LINK.findall(index) if target.endswith(".md") and not target.startswith("api/")]
    texts = [f"<!-- {target} -->\n\n{(DOCS / target).read_text().strip()}" for target in dict.fromkeys(guides)]
    (out / "llms-full.txt").write_text("\n\n".join([title, *texts]) + "\n")
