"""Reports on runs: the page report.html on one or more run folders, and the terminal output. Reports only read a run's data."""

from __future__ import annotations

from psigrad.records.report.html import write

__all__ = ["write"]
