"""Reports: report.html of one or several run folders, and the terminal output. The code only reads run folders."""

from __future__ import annotations

from psigrad.records.report.html import write

__all__ = ["write"]
