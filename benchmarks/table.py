"""A result of benchmarks.gpu as Markdown: python -m benchmarks.table RESULT.json [--into docs/benchmarks.md]"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results -->", "<!-- /results -->"
_NONE = "–"
_MACHINE = (
    "machine",
    "processor_cores",
    "driver",
    "cuda",
    "python",
    "torch",
    "triton",
    "transformers",
    "commit",
    "date",
)

Part = Mapping[str, Any]


def render(result: Part) -> str:
    """Every part that the result has, as headings and tables."""
    parts = [_machine(result["machine"])]
    parts += [_observation(found) for found in result.get("observation", [])]
    for found in result.get("training", []):
        parts += [_training(found), _waits(found["waits"]), _memory(found["memory"])]
    if result.get("python"):
        parts.append(_python(result["python"]))
    if result.get("failed"):
        parts.append("\n".join(f"Failed: {part}: {error}" for part, error in result["failed"].items()))
    return "\n\n".join(part for part in parts if part) + "\n"


def put_into(document: str, text: str) -> str:
    """The document with the text between its two markers, in place of what was there."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no {BEGIN} followed by {END}: add both where the results belong")
    return f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns are padded, so that it reads as well in a terminal; all but the first are numbers."""
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    lines = [_line(head, widths), "|" + "|".join(_rule(place, width) for place, width in enumerate(widths)) + "|"]
    return "\n".join([*lines, *(_line(row, widths) for row in rows)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cells[0].ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)),
    ]
    return "| " + " | ".join(padded) + " |"


def _rule(place: int, width: int) -> str:
    return "-" * (width + 2) if place == 0 else "-" * (width + 1) + ":"


# The parts --------------------------------------------------------------------------------------------------------


def _machine(machine: Part) -> str:
    known = [(name.replace("_", " "), machine.get(name)) for name in _MACHINE]
    return ", ".join(f"{value}" if name == "machine" else f"{name} {value}" for name, value in known if value) + "."


def _observation(found: Part) -> str:
    title = f"### One look at the gradients of {found['model']}, {found['dtype']}"
    size = f"{found['tensors']} tensors, {found['elements']:,} values, {found['bytes'] / 1e9:.2f} GB."
    head = (
        "contender",
        "wall ms",
        "p99",
        "host ms",
        "device ms",
        "queued ms",
        "× clip, wall",
        "× clip, queued",
        "turns",
    )
    rows = [_observation_row(cost) for cost in found["costs"]]
    return "\n\n".join([title, f"{size} {_bandwidth(found)}", table(head, rows), *_left_out(found["left_out"])])


def _observation_row(cost: Part) -> list[str]:
    if cost["error"]:
        return [f"{cost['contender']}: {cost['error']}", *[_NONE] * 8]
    clocks = [_middle(cost[clock]) for clock in ("host_ms", "device_ms", "queued_ms")]
    ratios = [_ratio(cost["wall_ratio"]), _ratio(cost["queued_ratio"])]
    wall = cost["wall_ms"]
    turns = str(wall["count"]) if wall else "0"
    return [cost["contender"], _middle(wall), _number(wall and wall["p99"]), *clocks, *ratios, turns]


def _bandwidth(found: Part) -> str:
    copy = f"A copy moves {_number(found['copy_gb_per_s'])} GB/s, read and written"
    if found["moments_gb_per_s"] is None:
        return copy + "."
    share = 100 * found["moments_share_of_copy"]
    return f"{copy}; Holter's moments read {_number(found['moments_gb_per_s'])} GB/s, {share:.0f} % of that."


def _left_out(reasons: Mapping[str, str]) -> list[str]:
    return ["Left out: " + "; ".join(f"{name} ({reason})" for name, reason in reasons.items()) + "."] if reasons else []


def _training(found: Part) -> str:
    title = f"### Training steps of {found['model']}"
    words = (
        f"{found['description']}: {found['parameters']:,} parameters, batch {found['batch']} x {found['length']}, "
        f"{found['steps']} steps a variant."
    )
    head = (
        "variant",
        "step ms",
        "p99",
        "wall ms",
        "× nothing",
        "× nothing, mean",
        "× nothing, p99",
        "× clip",
        "own",
        "rows",
        "dropped",
    )
    return "\n\n".join([title, words, table(head, [_training_row(cost) for cost in found["costs"]])])


def _training_row(cost: Part) -> list[str]:
    if cost["error"]:
        return [f"{cost['variant']}: {cost['error']}", *[_NONE] * 10]
    step = cost["step_ms"]
    ratios = [_ratio(cost[name], digits=4) for name in ("to_nothing", "mean_to_nothing", "p99_to_nothing", "to_clip")]
    own = [_percent(cost["monitor_cost"], 2), _percent(cost["rows_share"], 0)]
    dropped = _NONE if cost["dropped"] is None else str(cost["dropped"])
    return [
        cost["variant"],
        _middle(step),
        _number(step and step["p99"]),
        _middle(cost["wall_ms"]),
        *ratios,
        *own,
        dropped,
    ]


def _waits(waits: Part | None) -> str:
    if waits is None:
        return ""
    names = list(waits["warned"])
    kinds = sorted({kind for counts in waits["traced"].values() for kind in counts})
    rows = [
        [
            name,
            str(waits["warned"].get(name, _NONE)),
            *(str(waits["traced"].get(name, {}).get(kind, _NONE)) for kind in kinds),
            "some" if waits["refused"].get(name, _NONE) else "none",
        ]
        for name in names
    ]
    words = f"Waits for the device in {waits['steps']} steps, the model's own and the profiler's last one among them:"
    return f"{words}\n\n{table(('variant', 'warned', *kinds, 'from clip to log'), rows)}"


def _memory(memory: Part | None) -> str:
    if memory is None:
        return ""
    rows = [
        [name, f"{peak / 1e6:,.0f}", f"{memory['peak_ratio'].get(name, 1):.4f}", f"{memory['growth'].get(name, 0):,}"]
        for name, peak in memory["peak"].items()
    ]
    head = ("variant", "peak MB", "× nothing", "bytes grown in 50 steps")
    small = f"A small model grew by {memory['small_model_growth']:,} bytes in 1,000 watched steps."
    return f"{table(head, rows)}\n\n{small}"


def _python(costs: Sequence[Part]) -> str:
    title = f"### The training thread, {costs[0]['parameters']:,} parameters"
    head = ("variant", "own ms", "own ms, measured", "first step", "whole step ms", "rows", "own share")
    return f"{title}\n\n{table(head, [_python_row(cost) for cost in costs])}"


def _python_row(cost: Part) -> list[str]:
    name = f"{cost['variant']}, {cost['device']}"
    if cost["error"]:
        return [f"{name}: {cost['error']}", *[_NONE] * 6]
    times = [_middle(cost["own_ms"]), _middle(cost["measured_own_ms"]), _number(cost["first_step_ms"])]
    return [name, *times, _middle(cost["step_ms"]), _percent(cost["rows_share"], 0), _percent(cost["monitor_cost"], 2)]


# Numbers ----------------------------------------------------------------------------------------------------------


def _middle(spread: Part | None) -> str:
    return _NONE if spread is None else _number(spread["median"])


def _number(value: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _ratio(ratio: Part | None, digits: int = 2) -> str:
    if ratio is None:
        return _NONE
    if ratio["low"] is None:
        return f"{ratio['value']:.{digits}f}"
    return f"{ratio['value']:.{digits}f} [{ratio['low']:.{digits}f}, {ratio['high']:.{digits}f}]"


def _percent(share: float | None, digits: int) -> str:
    return _NONE if share is None else f"{100 * share:.{digits}f} %"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("result", type=Path, help="what benchmarks.gpu wrote")
    parser.add_argument("--into", type=Path, metavar="FILE", help=f"rewrite what is between {BEGIN} and {END} there")
    arguments = parser.parse_args()
    text = render(json.loads(arguments.result.read_text("utf-8")))
    if arguments.into is None:
        print(text)
    else:
        arguments.into.write_text(put_into(arguments.into.read_text("utf-8"), text), "utf-8")


if __name__ == "__main__":
    main()
