"""Generated parts of a page, each between `<!-- NAME -->` and `<!-- end of NAME -->`. The rest is written by hand."""

from __future__ import annotations


def fill(page: str, **parts: str) -> str:
    """Return the page with each part in place of what its marks hold. Raises ValueError if the page lacks a part's marks."""
    for name, text in parts.items():
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->\n")
        if not (begin and end):
            raise ValueError(f"The page lacks the marks <!-- {name} --> and <!-- end of {name} -->.")
        page = f"{before}{begin}\n{text.strip()}\n\n{end}{after}"
    return page
