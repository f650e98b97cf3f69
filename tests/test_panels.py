"""Which layers a sink shows of a record, and at which steps: never more than a dashboard bears, never none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from holter.diagnosis.finding import Finding
from holter.record import LayerRows, Record
from holter.sinks.panels import MOST_TIMES, Panel, Panels
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, Rows

NAMES = tuple(f"blocks.{place}.up.weight" for place in range(100))


def rows(names: Sequence[str], histograms: bool = False) -> LayerRows:
    values = np.ones((len(names), len(COLUMNS)))
    values[:, COLUMNS.index("sum_squares")] = 10.0 ** np.linspace(0, 1, len(names))
    return LayerRows(tuple(names), Rows(values, Histograms.of([np.ones(3)] * len(names)) if histograms else None))


def record(step: int, names: Sequence[str] = NAMES, roles: Sequence[str] = ("gradient",)) -> Record:
    return Record(step, 0.0, {"loss": 1.0}, {role: rows(names) for role in roles})


def layers(panel: Panel) -> set[str]:
    return {tag.split("/")[1] for tag in panel.scalars if "/" in tag}


def finding(layer: str) -> Finding:
    return Finding("dead-units", "layer", 0, 1, layer=layer)


# How many ---------------------------------------------------------------------------------------------------------


class Name(str):
    """A layer's name that counts how often it was taken apart or looked up."""

    looks = 0

    def rpartition(self, separator: str, /) -> tuple[str, str, str]:  # type: ignore[override]
        Name.looks += 1
        return super().rpartition(separator)


@pytest.mark.parametrize("found", [0, 20])
def test_what_a_record_costs_does_not_grow_with_those_that_are_chosen(found: int) -> None:
    """P16: as many looks as there are names, whatever was found."""
    names = [Name(name) for name in NAMES]
    panels = Panels(layers=8)
    panels.of(record(0, names))
    for name in names[20 : 20 + found]:
        panels.note(finding(name))
    Name.looks = 0
    assert len(layers(panels.of(record(1, names)))) == 8 + found
    assert Name.looks <= len(names)


def test_a_module_goes_with_its_parameters_and_they_with_it() -> None:
    names = ["a", "a.weight", "a.bias", "a.b.weight", "c", "c.weight", "c.bias", "d.weight", "weight"]
    panels = Panels(layers=0)
    for layer in ("a", "c.weight"):
        panels.note(finding(layer))
    assert layers(panels.of(record(0, names))) == {"a", "a.weight", "a.bias", "c", "c.weight"}


@pytest.mark.parametrize(("asked", "most"), [(0, 4), (1, 4), (8, 32)])
def test_layers_of_findings_join_until_there_are_four_times_as_many(asked: int, most: int) -> None:
    """The first ones stay: thousands of findings make no thousands of panels."""
    panels = Panels(layers=asked)
    first = layers(panels.of(record(0)))
    for name in NAMES:
        panels.note(finding(name))
    shown = layers(panels.of(record(1)))
    assert len(first) == asked and len(shown) == most and first <= shown
    assert most == MOST_TIMES * max(asked, 1)
    others = [name for name in NAMES if name not in first]
    assert shown - first == set(others[: most - asked])
    assert layers(panels.of(record(2))) == shown


def test_where_all_are_shown_findings_take_none_away() -> None:
    panels = Panels(layers="all")
    for name in NAMES:
        panels.note(finding(name))
    assert layers(panels.of(record(0))) == set(NAMES)


def test_who_is_chosen_stays_alone_when_another_gets_worse_and_nothing_was_found() -> None:
    """As the words say: nobody joins for a norm that jumps, a layer that a finding names does."""
    panels = Panels(layers=2)
    first = layers(panels.of(record(0)))
    jumped = record(1)
    jumped.rows["gradient"].rows.values[50, COLUMNS.index("sum_squares")] = 1e12
    assert layers(panels.of(jumped)) == first == {NAMES[0], NAMES[-1]}
    panels.note(finding(NAMES[50]))
    assert layers(panels.of(jumped)) == first | {NAMES[50]}


# When -------------------------------------------------------------------------------------------------------------


def steps_shown(panels: Panels, steps: Sequence[int]) -> list[int]:
    return [step for step in steps if layers(panels.of(record(step)))]


def test_one_of_so_many_steps_has_layers_whichever_were_measured() -> None:
    """The budget chooses the steps; none of these can be divided by ten."""
    assert steps_shown(Panels(every=10), [5, 15, 25, 35]) == [5, 15, 25, 35]
    assert steps_shown(Panels(every=10), range(3, 40)) == [3, 10, 20, 30]
    assert steps_shown(Panels(every=10), [0, 7, 14, 21, 28, 35]) == [0, 14, 21, 35]
    assert steps_shown(Panels(every=1), [0, 1, 1, 5, 2]) == [0, 1, 1, 5, 2], "also those that a resume takes again"


def test_steps_without_rows_take_no_turn() -> None:
    panels = Panels(every=10)
    for step in range(10, 17):
        assert not layers(panels.of(Record(step, 0.0, {"loss": 1.0})))
    assert steps_shown(panels, [17, 18]) == [17]


def test_a_role_that_is_measured_rarely_has_turns_of_its_own() -> None:
    panels = Panels(every=10)
    shown: dict[str, list[int]] = {"gradients": [], "weights": []}
    for step in range(40):
        panel = panels.of(record(step, roles=("gradient", "weight") if step % 13 == 7 else ("gradient",)))
        for role in {tag.split("/")[0] for tag in panel.scalars if "/" in tag}:
            shown[role].append(step)
    assert shown == {"gradients": [0, 10, 20, 30], "weights": [7, 20, 33]}


def test_histograms_that_are_measured_rarely_have_turns_of_their_own() -> None:
    panels = Panels(every=10)
    found = []
    for step in range(40):
        panel = panels.of(Record(step, 0.0, rows={"gradient": rows(NAMES, histograms=step % 13 == 7)}))
        found += [step] if panel.histograms else []
    assert found == [7, 20, 33]


def test_parts_of_one_step_that_come_apart_are_all_shown() -> None:
    """As a tracker writes its histograms, one by one."""
    panels = Panels(every=10)
    panel = [panels.of(Record(5, 0.0, rows={"histogram": rows([name], histograms=True)})) for name in ("a", "b")]
    assert [set(one.histograms) for one in panel] == [{"a"}, {"b"}]
