"""Views of runs as the page reads them, invented: empty, wide and hostile ones."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

from holter.diagnosis.finding import Finding

View = dict[str, Any]


def matrix(values: npt.ArrayLike) -> dict[str, str]:
    table = np.asarray(values, dtype="<f4")
    shape = ", ".join(map(str, table.shape))
    return {"dtype": "f4", "bdata": base64.b64encode(table.tobytes()).decode(), "shape": shape}


def unpacked(sent: View) -> npt.NDArray[np.float64]:
    """[rows, columns], as a page reads them: typed arrays, or the ladder of logarithms of a report."""
    data, shape = base64.b64decode(sent["bdata"]), [int(number) for number in sent["shape"].split(",")]
    if sent["dtype"] != "log":
        return np.frombuffer(data, f"<{sent['dtype']}").reshape(shape).astype(np.float64)
    special = {0: np.nan, 1: 0.0, 2: np.inf, 3: -np.inf}
    found = []
    for code in np.frombuffer(data, "<u2").tolist():
        place, is_negative = divmod(code - 4, sent["signs"])
        ladder = (-1 if is_negative else 1) * np.exp(sent["low"] + sent["step"] * place)
        found.append(special.get(code, ladder))
    return np.array(found).reshape(shape)


def plain(values: npt.ArrayLike) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in np.asarray(values, dtype=float)]


def empty_view(name: str = "empty") -> View:
    run: View = {"name": name, "state": "empty", "error": None, "model": None, "parameters": None, "optimizers": []}
    run |= {"scheduler": None, "versions": {}, "created": 1.79e9, "steps": 0, "last_step": None, "segments": 0}
    run |= {"dropped": 0, "unreadable_bytes": 0, "seconds": None, "monitor_cost": None}
    verdict = {"state": "unknown", "severity": None, "sentence": "Too early to say: 0 steps so far."}
    lists = ("findings", "events", "health", "signs", "maps", "flow", "thresholds", "unobserved", "notes")
    machine: View = {"stages": {}, "figures": []}
    return {"run": run, "verdict": verdict, "outlook": "", "scalars": {}, "histograms": {}, "machine": machine} | {
        one: [] for one in lists
    }


def scalar(steps: npt.ArrayLike, values: npt.ArrayLike) -> View:
    known = plain(values)
    return {"steps": np.asarray(steps).tolist(), "values": known, "low": known, "high": known}


def scalars_view() -> View:
    """Of a run that logged a loss and nothing else."""
    steps = np.arange(50)
    view = empty_view("scalars")
    view["run"] |= {"state": "finished", "steps": 50, "last_step": 49}
    view["scalars"] = {"loss": scalar(steps, 2 / (1 + steps))}
    return view


def wide_view(layers: int = 200, columns: int = 800) -> View:
    """As large as a page gets, with cells that are zero, not finite and not measured."""
    random = np.random.default_rng(0)
    names = [f"blocks.{place // 4}.{('norm', 'attention', 'mlp', 'out')[place % 4]}.weight" for place in range(layers)]
    steps = np.arange(columns) * 6
    values = 10 ** (random.normal(0, 0.4, (layers, columns)) - np.linspace(4, 0, layers)[:, None])
    values[10, 100:] = 0
    values[20, 300:] = np.inf
    values[:, 5] = np.nan
    view = scalars_view()
    view["run"] |= {"name": "wide", "steps": columns * 6, "last_step": int(steps[-1])}
    view["verdict"] = {"state": "sick", "severity": "critical", "sentence": "Vanishing gradient since step 600."}
    view["findings"] = [_card(Finding("vanishing-gradient", "layer", 600, 640, "critical", layer=names[10]))]
    for one in ("norm", "ratio"):
        view["maps"].append(_map("gradient", one, f"gradient {one}", names, steps, values))
    return view


def hostile_view(name: str) -> View:
    """Every text of a view is the same hostile name."""
    view = wide_view(24, 30)
    view["run"] |= {"name": name, "model": name, "optimizers": [name], "scheduler": name, "error": name}
    view["run"] |= {"versions": {name: name}}
    view["verdict"]["sentence"] = view["outlook"] = name
    evidence = {name: name, "norm": 1e-9}
    view["findings"] = [
        _card(Finding(name, "layer", 60, 66, "critical", name, 0.5, evidence, name, (name, name)))
        | {"charts": [{"title": name, "steps": [50, 60, 70], "values": [1.0, 2.0, 3.0], "log": True}]}
    ]
    view["events"] = [{"step": 60, "what": name}]
    view["health"] = [{"name": name, "state": "failed", "value": 1.0, "text": name}]
    view["signs"] = [{"text": name, "layer": name, "since": 60}]
    view["scalars"][name] = view["scalars"]["val_loss"] = view["scalars"]["loss"]
    for one in view["maps"]:
        one |= {"layers": [name, *one["layers"][1:]], "title": name}
    view["maps"][1]["id"] = name
    view["histograms"] = {name: _bins([name], np.arange(3), np.full((1, 3, 4), 0.25), [-1.0, -1e-3, 0, 1e-3, 1.0])}
    curves = [{"name": name, "step": 60, "values": [1.0, 2.0]}]
    view["flow"] = [{"id": "gradient", "title": name, "layers": [name, "b"], "log": True, "curves": curves}]
    view["machine"] = {"stages": {name: 1.0}, "figures": [{"name": name, "text": name}]}
    view["thresholds"] = [{"name": name, "value": 1.0, "requirement": name, "means": name}]
    view["unobserved"] = view["notes"] = [name]
    return view


def _card(finding: Finding) -> View:
    names = ("cause", "where", "layer", "since", "step", "until", "severity", "confidence", "advice")
    card = {name: getattr(finding, name) for name in names}
    return card | {"evidence": dict(finding.evidence), "alternatives": list(finding.alternatives), "charts": []}


def _map(role: str, name: str, title: str, layers: list[str], steps: Any, values: Any) -> View:
    view: View = {"id": f"{role}/{name}", "role": role, "statistic": name, "title": title, "log": True}
    return view | {"layers": layers, "steps": np.asarray(steps).tolist(), "values": matrix(values)}


def _bins(layers: list[str], steps: Any, shares: Any, edges: list[float]) -> View:
    found = {
        layer: {"steps": np.asarray(steps).tolist(), "counts": matrix(shares[at])} for at, layer in enumerate(layers)
    }
    return {"edges": edges, "layers": found}
