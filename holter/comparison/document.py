"""A comparison as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holter.report.document import PAGE as REPORT
from holter.report.document import STYLE, document

PAGE = Path(__file__).parent / "page"
_SHARED = ("dom.js", "charts.js", "sections.js")  # of a run's page


def comparison_page(view: Mapping[str, Any]) -> str:
    title = ", ".join(run["name"] for run in view["runs"])
    return document(
        title, view, [STYLE, PAGE / "compare.css"], [*(REPORT / name for name in _SHARED), PAGE / "compare.js"]
    )
