"""The files of the dashboard: a fixed dictionary, read when it starts. No name that is asked for becomes a path."""

from __future__ import annotations

from pathlib import Path

from holter.comparison.document import PAGE as COMPARISON
from holter.dashboard.bodies import Body, body
from holter.report.document import PAGE as REPORT
from holter.report.document import SCRIPTS, plotly_path

_PAGE = Path(__file__).parent / "page"
_KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
_SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Holter</title>
<link rel="icon" href="/static/icon.svg">
{styles}
{scripts}
</head>
<body>
<div id="bar"></div>
<div id="page"><noscript><p>This page is drawn by scripts of its own; without them there is nothing to see.</p>
</noscript></div>
</body>
</html>
"""
# What each page loads after the scripts of the run page, in this order.
_OWN = {"runs": ("frame.js", "runs.js"), "run": ("frame.js", "live.js"), "compare": ("frame.js", "compare.js")}


def static_files() -> dict[str, Body]:
    """By name. ValueError where plotly is not installed."""
    own = [path for folder in (REPORT, COMPARISON, _PAGE) for path in sorted(folder.iterdir()) if path.suffix in _KINDS]
    found = {path.name: body(path.read_bytes(), _KINDS[path.suffix], level=6) for path in own}
    found["plotly.min.js"] = body(plotly_path().read_bytes(), _KINDS[".js"], level=6)
    return found


def pages(files: dict[str, Body]) -> dict[str, Body]:
    """The same for every run: what they show is fetched, so that no name ever stands in their text."""
    styles = "\n".join(
        f'<link rel="stylesheet" href="/static/{name}">'
        for name in ("style.css", "compare.css", "dashboard.css")
        if name in files
    )
    made = {}
    for page, own in _OWN.items():
        # plotly is the largest by far: last, so that the page can be read before it is there.
        shown = ("dom.js", "charts.js", *own) if page == "runs" else (*SCRIPTS, *own, "plotly.min.js")
        names = [name for name in shown if name in files]
        scripts = "\n".join(f'<script src="/static/{name}" defer></script>' for name in names)
        text = _SHELL.format(styles=styles, scripts=scripts)
        made[page] = body(text.encode(), "text/html; charset=utf-8")
    return made
