"""The layers of a role as a table: for each role the columns that tell something about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from holter.layer_summary import FAR, Layer, Role
from holter.tables import Column, FittingTable, bar, logarithms, name_cell, sparkline
from holter.words import amount, number, printable, share, times

WORST = 15  # layers of a role that are shown unless all are asked for
_WIDE_SPREAD = 100.0  # between layers of a role
_BLOCKS = 4  # and ends of a model that make a flow of their own
_ODD_SHARE = 0.5  # of a layer's units or values
_MEASURES = {"norm": "norms", "ratio": "ratios", "rms": "rms", "rms_ratio": "ratios", "max_logit": "logits"}

_OVER_TIME = ("change", "growth", "trend", "median")  # columns that one look cannot fill

LayerColumn = Column[Layer]


def render_role(role: Role, most: int) -> list[RenderableType]:
    shown = _some_in_depth(role.layers, most) if role.in_depth else role.layers[:most]
    places = set(map(id, shown))
    rest = [layer for layer in role.layers if id(layer) not in places]
    parts: list[RenderableType] = [role_heading(role), layer_table(role, shown)]
    if rest:
        parts.append(Text(f" {_about_the_rest(role, rest)}", "dim"))
    return parts


def _some_in_depth(layers: Sequence[Layer], most: int) -> Sequence[Layer]:
    """What is odd, and some evenly over the depth: of the blocks where there are any, so that like follows like."""
    if len(layers) <= most:
        return layers
    names = [layer.layer for layer in layers]
    holders = {prefix for name in names for prefix in accumulate(name.split(".")[:-1], "{}.{}".format)}
    ends = 0, len(layers) - 1
    blocks = [place for place, name in enumerate(names) if name in holders or place in ends]
    odd = _evenly([place for place, layer in enumerate(layers) if _is_odd(layer)], most)
    ordinary = blocks if len(blocks) >= _BLOCKS else range(len(layers))
    chosen = {*odd, *_evenly([place for place in ordinary if place not in odd], most - len(odd))}
    return [layers[place] for place in sorted(chosen)]


def _evenly(places: Sequence[int], most: int) -> list[int]:
    if len(places) <= most:
        return list(places)
    return [places[round(i)] for i in np.linspace(0, len(places) - 1, most)] if most > 0 else []


def _is_odd(layer: Layer) -> bool:
    return layer.nonfinite > 0 or layer.extra("near_overflow") > 0 or _is_idle(layer)


def _is_idle(layer: Layer) -> bool:
    return layer.extra("dead") > _ODD_SHARE or layer.extra("saturated") > _ODD_SHARE


# Words around the table -----------------------------------------------------------------------------------------


def role_heading(role: Role) -> Text:
    looks = f"  measured in {_count(role.steps, 'steps')}, last at {role.last_step:,}"
    line = Text.assemble((printable(role.role).replace("_", " "), "bold"), looks)
    for place, siblings in enumerate(role.siblings if role.role != "batch" else ()):
        line.append("; " if place else ": ").append(_count(siblings.count, siblings.kind))
        if siblings.spread >= 1.05 and not role.in_depth:
            is_wide = siblings.spread > _WIDE_SPREAD
            line.append(f", {_MEASURES[role.measure]} {times(siblings.spread)} apart", "yellow" if is_wide else "")
    if role.role == "activation":
        line.append(_flow(role.layers))
    zero = sum(layer.value == 0 for layer in role.layers)
    line.append(f"; {zero} exactly zero" if zero else "", "" if role.role == "weight" else "yellow")
    bad = sum(layer.nonfinite > 0 for layer in role.layers)
    return line.append(f"; {bad} not finite" if bad else "; all finite", "bold red" if bad else "")


def _flow(layers: Sequence[Layer]) -> str:
    """How the size of what flows changes from the first layer to the last."""
    known = [layer.rms for layer in layers if layer.rms > 0]
    return f", rms {number(known[0])} at the input, {number(known[-1])} at the output" if len(known) > 1 else ""


def _count(count: int, kind: str) -> str:
    one = {"matrices": "matrix", "biases": "bias", "vectors": "vector", "layers": "layer", "steps": "step"}
    return f"{count:,} {one[kind] if count == 1 else kind}"


def _about_the_rest(role: Role, rest: Sequence[Layer]) -> str:
    more = f"… and {len(rest):,} more layer{'' if len(rest) == 1 else 's'}"
    bad = sum(layer.nonfinite > 0 for layer in rest)
    far = 0 if role.in_depth else sum(layer.is_far for layer in rest if not layer.nonfinite)
    kinds = [f"{bad:,} of them not finite"] if bad else []
    kinds += [f"{far:,} of them more than {FAR:g}× from the median"] if far else []
    near = "" if role.in_depth else f" within {FAR:g}× of the median"
    return f"{', '.join([more, *kinds]) if kinds else f'{more}{near}'}: --all shows them"


# Columns --------------------------------------------------------------------------------------------------------


def layer_table(role: Role, layers: Sequence[Layer]) -> RenderableType:
    columns = _COLUMNS.get(role.role, _of_norms)(role, layers)
    if all(layer.looks == 1 for layer in layers):
        columns = [column for column in columns if column.title not in _OVER_TIME]
    if any(layer.nonfinite for layer in layers):
        columns.append(Column("non-finite", 3, lambda a: Text(_nonfinite(a), "bold red" if a.nonfinite else "")))
    if any(layer.shape for layer in layers):
        columns.append(Column("shape", 6, lambda a: Text((a.shape or "–").replace("-", " ")), right=False))
    return Padding(FittingTable(columns, layers), (0, 0, 0, 1))


def _nonfinite(layer: Layer) -> str:
    return "0" if not layer.nonfinite else f"{amount(layer.nonfinite)} since {layer.nonfinite_since}"


def _of_norms(role: Role, layers: Sequence[Layer]) -> list[LayerColumn]:
    change = "growth" if role.role == "weight" else "change"
    columns = [
        _name(_compared),
        _number("norm", 1, lambda a: a.norm, _compared),
        Column("vs siblings", 2, lambda a: Text(times(a.siblings), _compared(a))),
        _change(change, 4),
        _trend(8, logarithms),
        _number("median", 7, lambda a: a.median),
        _number("rms", 9, lambda a: a.rms),
        _number("min", 10, lambda a: a.min),
        _number("max", 10, lambda a: a.max),
        _share("zeros", 5, lambda a: a.zero_share, _ODD_SHARE),
    ]
    if any(_does_not_learn(layer) for layer in layers):
        columns.insert(3, Column("learns", 3, _learns, right=False))
    return columns


def _learns(layer: Layer) -> Text:
    return Text(_does_not_learn(layer), "yellow") if _does_not_learn(layer) else Text("yes", "dim")


def _does_not_learn(layer: Layer) -> str:
    """Why a weight does not learn; empty where it does, or nobody knows."""
    if layer.extra("requires_grad") == 0:
        return "frozen"
    return "not held" if layer.extra("held") == 0 else ""


def _of_updates(role: Role, layers: Sequence[Layer]) -> list[LayerColumn]:
    return [
        _name(_compared),
        _extra("ratio", 1, "ratio", _compared),
        Column("vs siblings", 4, lambda a: Text(times(a.siblings), _compared(a))),
        _extra("planned", 3, "planned_ratio"),
        _share("unchanged", 2, lambda a: a.extra("unchanged"), _ODD_SHARE),
        _extra("cosine", 5, "cosine"),
        _change("change", 7),
        _trend(8, logarithms),
        _number("norm", 9, lambda a: a.norm),
        _number("median", 10, lambda a: a.median),
        _number("min", 11, lambda a: a.min),
        _number("max", 11, lambda a: a.max),
    ]


def _of_second_moments(role: Role, layers: Sequence[Layer]) -> list[LayerColumn]:
    return [
        _name(_compared),
        _extra("rms of g/√v", 1, "rms_ratio", _compared),
        _share("below eps", 2, lambda a: a.extra("below_eps"), _ODD_SHARE),
        _change("change", 4),
        _trend(7, logarithms),
        _number("mean", 3, lambda a: a.mean),
        _number("min", 9, lambda a: a.min),
        _number("max", 9, lambda a: a.max),
        _share("zeros", 5, lambda a: a.zero_share, _ODD_SHARE),
    ]


def _of_activations(role: Role, layers: Sequence[Layer]) -> list[LayerColumn]:
    lengths = dict(zip(map(id, layers), _bar_lengths([layer.rms for layer in layers]), strict=True))
    columns = [
        _name(_idle),
        _number("rms", 1, lambda a: a.rms),
        Column[Layer]("flow", 5, lambda a: Text(bar(lengths[id(a)], 10) or "–", "cyan"), right=False),
        _number("mean", 8, lambda a: a.mean),
        _number("std", 4, lambda a: a.std),
        _change("change", 7),
        _share("dead", 2, lambda a: a.extra("dead"), _ODD_SHARE),
    ]
    if any(not math.isnan(layer.extra("saturated")) for layer in layers):
        columns.append(_share("saturated", 2, lambda a: a.extra("saturated"), _ODD_SHARE))
    if any(layer.extra("near_overflow") > 0 for layer in layers):
        columns.append(_share("near overflow", 2, lambda a: a.extra("near_overflow"), 0.0))
    return [
        *columns,
        _extra("rank", 3, "rank"),
        _number("min", 9, lambda a: a.min),
        _number("max", 9, lambda a: a.max),
        _share("zeros", 10, lambda a: a.zero_share, 1.0),  # half of them is what a ReLU does
    ]


def _bar_lengths(values: Sequence[float]) -> list[float]:
    """Shares of the longest bar, on a log scale whose lowest value has a tenth of it."""
    found = np.array(values, dtype=np.float64)
    logs = logarithms(np.where(found > 0, found, np.nan))
    low, high = np.nanmin(logs, initial=np.inf), np.nanmax(logs, initial=-np.inf)
    reach = max(float(high - low), 1.0)  # layers that are nearly equal look nearly equal
    return [0.1 + 0.9 * (value - float(high) + reach) / reach for value in logs.tolist()]


def _of_attention(role: Role, layers: Sequence[Layer]) -> list[LayerColumn]:
    return [
        _name(lambda a: ""),
        _extra("largest logit", 1, "max_logit"),
        _extra("entropy", 2, "entropy"),
        _change("change", 3),
        _trend(4, lambda values: values),
    ]


def _of_batches(role: Role, layers: Sequence[Layer]) -> list[LayerColumn]:
    columns = [_name(lambda a: "")]
    columns += [_extra("size", 1, "size")] if any("size" in a.extras for a in layers) else []
    columns += [_extra("label entropy", 2, "label_entropy")] if any("label_entropy" in a.extras for a in layers) else []
    return [
        *columns,
        _number("mean", 3, lambda a: a.mean),
        _number("std", 3, lambda a: a.std),
        _number("min", 4, lambda a: a.min),
        _number("max", 4, lambda a: a.max),
        _share("zeros", 5, lambda a: a.zero_share, 1.0),
        _change("change", 7),
        _trend(8, lambda values: values),
    ]


_COLUMNS: dict[str, Callable[[Role, Sequence[Layer]], list[LayerColumn]]] = {
    "update": _of_updates,
    "second_moment": _of_second_moments,
    "activation": _of_activations,
    "attention": _of_attention,
    "batch": _of_batches,
}


# Cells ----------------------------------------------------------------------------------------------------------

Style = Callable[[Layer], str]


def _compared(layer: Layer) -> str:
    return "bold red" if layer.nonfinite else "yellow" if layer.is_far else ""


def _idle(layer: Layer) -> str:
    return "bold red" if layer.nonfinite else "yellow" if _is_idle(layer) else ""


def _plainly(layer: Layer) -> str:
    return ""


def _name(style: Style) -> LayerColumn:
    return Column("layer", 0, lambda a: name_cell(a.layer, style(a)), right=False)


def _number(title: str, rank: int, value: Callable[[Layer], float], style: Style = _plainly) -> LayerColumn:
    return Column(title, rank, lambda a: Text(number(value(a)), style(a)))


def _extra(title: str, rank: int, name: str, style: Style = _plainly) -> LayerColumn:
    """What a row does not hold; a dash where it is not known."""
    return Column(title, rank, lambda a: Text(_known(a.extra(name)), style(a)))


def _known(value: float) -> str:
    return "–" if math.isnan(value) else number(value)


def _share(title: str, rank: int, value: Callable[[Layer], float], odd: float) -> LayerColumn:
    return Column(title, rank, lambda a: Text(share(value(a)), "yellow" if value(a) > odd else ""))


def _change(title: str, rank: int) -> LayerColumn:
    return Column(title, rank, lambda a: Text("from 0" if math.isinf(a.change) else times(a.change)))


def _trend(rank: int, scale: Callable[..., np.ndarray[tuple[int], np.dtype[np.float64]]]) -> LayerColumn:
    return Column("trend", rank, lambda a: Text(sparkline(scale(a.values), 12), "cyan"), right=False)
