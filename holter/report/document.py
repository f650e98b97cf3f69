"""A run as one self-contained HTML file: it opens offline, and nothing in it reaches out."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from holter.report.buckets import buckets_for
from holter.report.drawing import compact
from holter.report.reading import Follower
from holter.report.view import run_view
from holter.run import Run

PAGE = Path(__file__).parent / "page"
STYLE = PAGE / "style.css"
SCRIPTS = ("dom.js", "charts.js", "marks.js", "strip.js", "layer.js", "sections.js", "flow.js", "run.js")
_CELLS = 26_000  # of a strip chart, up to twice as many: more would make the file of a large model too heavy
_EMPTY_STYLE = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"  # plotly's own style element begins empty


def view_of(run: Path) -> dict[str, Any]:
    """All of a run, read and examined, as its page draws it."""
    follower = Follower(run, buckets=buckets_for(len(Run(run).layers), _CELLS), examine=True)
    follower.read_on()
    return run_view(follower, follower.examined())


def report(view: Mapping[str, Any]) -> str:
    maps = [{**one, "values": compact(one["values"])} for one in view.get("maps", ())]
    return document(view["run"]["name"], {**view, "maps": maps}, [STYLE], [PAGE / name for name in SCRIPTS])


def document(title: str, view: Mapping[str, Any], styles: Sequence[Path], scripts: Sequence[Path]) -> str:
    """A page with everything in it. The last script shows the view."""
    jinja2 = _needed("jinja2")
    template = jinja2.Environment(autoescape=True).from_string((PAGE / "shell.html").read_text("utf-8"))
    sheets = [path.read_text("utf-8") for path in styles]
    codes = [plotly_path().read_text("utf-8"), *(path.read_text("utf-8") for path in scripts)]
    return str(
        template.render(title=title, styles=sheets, scripts=codes, view=embedded(view), csp=_policy(sheets, codes))
    )


def embedded(value: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def plotly_path() -> Path:
    """plotly's own JavaScript, as its package brings it. Importing the package would take a second for nothing."""
    found = find_spec("plotly")
    if found is None or found.origin is None:
        raise ValueError("this needs plotly: pip install 'holter[report]'")
    return Path(found.origin).parent / "package_data" / "plotly.min.js"


def _needed(package: str) -> Any:
    try:
        return __import__(package)
    except ImportError as error:
        raise ValueError(f"this needs {package}: pip install 'holter[report]'") from error


def _policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Only what is in this file may run; nothing may be fetched."""
    allowed = {
        "default-src": ["'none'"],
        "script-src": [_hash(code) for code in scripts],
        "style-src": [*(_hash(style) for style in styles), _EMPTY_STYLE],
        "img-src": ["data:", "blob:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    return "; ".join(f"{name} {' '.join(values)}" for name, values in allowed.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
