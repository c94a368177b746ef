"""Reports on runs: the page report.html on one or several run folders, and the terminal output. Run folders are only read."""

from __future__ import annotations

from psigrad.records.report.html import write

__all__ = ["write"]
