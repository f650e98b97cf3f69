"""Runs for the terminal: a summary in, a rich renderable out. Nothing is printed here.

Names come from the user's model and disk, and may hold anything: all of them pass through `printable`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from holter.glance import Glance
from holter.header import STATE_STYLES, render_header
from holter.layer_tables import WORST, layer_table, render_role, role_heading
from holter.summary import Summary
from holter.tables import Column, FittingTable, name_cell
from holter.words import amount, duration, number, printable, size

_SIGNS = 12  # that are shown unless all are asked for


def render_runs(glances: Sequence[Glance], now: float) -> RenderableType:
    columns: list[Column[Glance]] = [
        Column("run", 0, lambda g: name_cell(g.path.name), right=False),
        Column("state", 1, lambda g: Text(printable(g.state), STATE_STYLES.get(g.state, "dim")), right=False),
        Column("steps", 3, lambda g: Text("–" if g.steps is None else f"{g.steps:,}")),
        Column("loss", 3, lambda g: Text(number(g.loss), _bad_if(g.loss is not None and not np.isfinite(g.loss)))),
        Column("model", 6, lambda g: name_cell(g.model or "–"), right=False),
        Column("parameters", 8, lambda g: Text(amount(g.parameters))),
        Column("age", 5, lambda g: Text("–" if g.created is None else duration(now - g.created))),
        Column("size", 7, lambda g: Text(size(g.size))),
    ]
    if any(glance.trouble for glance in glances):
        columns.append(Column("what is wrong", 2, lambda g: Text(printable(g.trouble), "red"), right=False, folds=True))
    return FittingTable(columns, glances)


def _bad_if(condition: bool) -> str:
    return "bold red" if condition else ""


def render_run(summary: Summary, *, all_layers: bool = False) -> RenderableType:
    """The header, what is odd, then a table a role."""
    signs = render_signs(summary, len(summary.signs) if all_layers else _SIGNS)
    parts: list[RenderableType] = [render_header(summary), Text(), *signs]
    for role in summary.roles:
        parts += [Text(), *render_role(role, len(role.layers) if all_layers else WORST)]
    if not summary.roles:
        parts += [Text(), Text("No layers were measured.", "dim")]
    return Group(*parts)


def render_signs(summary: Summary, most: int) -> list[RenderableType]:
    """A line each, the worst first; and how much was looked at, where that is little."""
    signs = summary.signs
    if not signs:
        return [Text.assemble(("signs", "bold"), f"  nothing odd was seen{_coverage(summary)}")]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for sign in signs[:most]:
        kind_style, text_style = ("dim", "dim") if sign.level == "info" else ("bold yellow", "")
        grid.add_row(Text(sign.kind, kind_style), Text(printable(sign.text), text_style))
    parts: list[RenderableType] = [Text("signs", "bold"), Padding(grid, (0, 0, 0, 1))]
    rest = len(signs) - most
    return [*parts, Text(f" … and {rest:,} more: --all shows them", "dim")] if rest > 0 else parts


def _coverage(summary: Summary) -> str:
    """What the budget left out: nothing odd in one step of a thousand says little."""
    looks = {role.role: role.steps for role in summary.roles}
    seen = looks.get("gradient", 0)
    if 2 * seen >= summary.steps:
        return ""
    return f", but gradients were measured in {seen:,} of {summary.steps:,} steps (budget=None measures all)"


def render_demo(summary: Summary) -> RenderableType:
    """What the demo recorded, in short, and what to try next."""
    parts: list[RenderableType] = [Text(), render_header(summary), Text(), *render_signs(summary, _SIGNS), Text()]
    parts += [role_heading(role) for role in summary.roles]
    gradients = next((role for role in summary.roles if role.role == "gradient"), None)
    if gradients is not None:
        parts += [Text("\nfarthest from their siblings", "dim"), layer_table(gradients, gradients.layers[:5])]
    run = printable(shlex.quote(summary.path))
    commands = (f"holter show {run}", f"holter export {run} --to csv")
    parts += [Text("\nnext", "dim"), *(Text(f" {command}", "bold") for command in commands)]
    return Group(*parts)
