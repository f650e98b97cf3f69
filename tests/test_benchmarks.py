"""The benchmarks' own arithmetic, turns and tables: a wrong figure would be worse than none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holter
from benchmarks import gpu, observation
from benchmarks.figures import (
    evenly,
    ratio_of_means,
    ratio_of_medians,
    ratio_of_tails,
    rounds_within,
    spread,
    turn_order,
)
from benchmarks.models import gpt2_shapes
from benchmarks.observers import MOMENTS, OBSERVERS, Call, Given, wandb_histogram
from benchmarks.table import BEGIN, END, put_into, render, table
from benchmarks.turns import take_turns
from benchmarks.watched import VARIANTS, leave_idle_time_out

# Statistics -------------------------------------------------------------------------------------------------------


def test_a_single_long_step_moves_the_mean_and_the_p99_but_not_the_median() -> None:
    found = spread([1.0] * 99 + [101.0])
    assert found is not None
    assert (found.count, found.median, found.mean) == (100, 1.0, 2.0)
    assert found.p99 == pytest.approx(np.quantile([1.0] * 99 + [101.0], 0.99)) and found.p99 > 1.0
    assert spread([]) is None


def test_a_drift_of_the_machine_leaves_the_ratio_alone() -> None:
    """One contender sits out the late, slow rounds; only rounds that both took part in may be compared."""
    drift = np.geomspace(1, 10, 50)
    reference = {number: float(drift[number]) for number in range(50)}
    slower = {number: 1.1 * float(drift[number]) for number in range(10)}
    found = ratio_of_medians(slower, reference)
    assert found is not None and found.low is not None and found.high is not None
    assert found.value == pytest.approx(1.1)
    assert found.low > 1.0  # the rounds are resampled whole
    planted = np.median(list(slower.values())) / np.median(list(reference.values()))
    assert planted < 0.5, "the medians of all rounds would call the slower one twice as fast"


def test_the_interval_holds_one_for_noise_and_leaves_it_out_for_a_difference() -> None:
    random = np.random.default_rng(1)
    noise = [dict(enumerate(random.normal(10, 1, 60))) for _ in range(2)]
    slower = {number: 1.3 * value for number, value in noise[1].items()}
    same, different = ratio_of_medians(noise[1], noise[0]), ratio_of_medians(slower, noise[0])
    assert same is not None and different is not None
    assert same.low is not None and same.high is not None and different.low is not None
    assert same.low < 1.0 < same.high < 1.1
    assert different.low > 1.1


def test_rare_long_steps_show_in_the_ratio_of_means_only() -> None:
    plain = dict.fromkeys(range(20), 1.0)
    rare = {number: 3.0 if number == 7 else 1.0 for number in plain}
    medians, means = ratio_of_medians(rare, plain), ratio_of_means(rare, plain)
    assert medians is not None and medians.value == 1.0
    assert means is not None and means.value == pytest.approx(1.1)


def test_too_few_rounds_give_a_ratio_but_no_interval() -> None:
    found = ratio_of_medians({4: 6.0}, {0: 1.0, 1: 2.0, 2: 3.0, 4: 2.0})
    assert found is not None and (found.value, found.low, found.high) == (3.0, None, None)
    assert ratio_of_medians({}, {0: 1.0}) is None


def test_slow_contenders_take_few_turns_spread_over_all_rounds() -> None:
    assert rounds_within(0.001, limit=2, rounds=50) == 50
    assert rounds_within(0.1, limit=2, rounds=50) == 20
    assert rounds_within(1.5, limit=2, rounds=50) == 3
    assert rounds_within(5, limit=2, rounds=50) == 1
    assert evenly(3, 50) == {0, 24, 49}
    assert evenly(50, 50) == set(range(50)) and evenly(5, 2) == {0, 1}


# Turns ------------------------------------------------------------------------------------------------------------


def unfairness(order: Callable[[int, int], Sequence[int]], count: int) -> list[str]:
    """In 2 x count rounds everyone should have every place twice, and follow more than one other."""
    rounds = [list(order(count, number)) for number in range(2 * count)]
    faults = []
    for one in range(count):
        if any(sum(taken[place] == one for taken in rounds) != 2 for place in range(count)):
            faults.append(f"{one} does not have every place equally often")
        before = [taken[taken.index(one) - 1] for taken in rounds if taken[0] != one]
        if len(set(before)) < 2:
            faults.append(f"{one} always follows the same one")
    return faults


@pytest.mark.parametrize("count", [3, 7, 13])
def test_everyone_has_every_place_equally_often(count: int) -> None:
    assert unfairness(turn_order, count) == []


@pytest.mark.parametrize(
    "planted",
    [lambda count, _: range(count), lambda count, number: [(place + number) % count for place in range(count)]],
    ids=["never rotated", "rotated one way only"],
)
def test_an_unfair_order_is_found(planted: Callable[[int, int], Sequence[int]]) -> None:
    assert unfairness(planted, 7)


def test_one_that_raises_is_out_and_the_others_go_on() -> None:
    calls: list[str] = []

    def fails() -> float:
        calls.append("fails")
        raise RuntimeError("planted\nand more")

    turns = take_turns({"a": lambda: 1.0, "fails": fails, "b": lambda: 2.0}, 6, {"a": frozenset({0, 5}), **_all(6)})
    assert turns.failed == {"fails": "RuntimeError: planted"} and calls == ["fails"]
    assert turns.taken["a"].keys() == {0, 5} and turns.taken["b"].keys() == set(range(6))


def _all(rounds: int) -> dict[str, frozenset[int]]:
    return dict.fromkeys(("fails", "b"), frozenset(range(rounds)))


@pytest.mark.parametrize("left_out", [True, False], ids=["left out", "planted: counted"])
def test_the_turns_of_others_are_no_training_time(left_out: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elapsed = []
    with holter.watch(model, optimizer, run=False) as monitor:
        for pause in (0.0, 0.3):
            time.sleep(pause)
            if left_out:
                leave_idle_time_out(monitor)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            elapsed.append(monitor._budget.elapsed)
    assert (elapsed[1] - elapsed[0] < 0.3) is left_out


# Contenders -------------------------------------------------------------------------------------------------------


def test_the_shapes_are_those_of_gpt2() -> None:
    for (layers, width), parameters in {(12, 768): 124_439_808, (48, 1600): 1_557_611_200}.items():
        shapes = gpt2_shapes(layers, width)
        assert sum(int(np.prod(shape)) for shape in shapes.values()) == parameters
        assert len(shapes) == 12 * layers + 4


def test_the_way_of_wandb_counts_as_numpy_does() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    found = wandb_histogram(torch.cat([values, torch.tensor([torch.nan, torch.inf])]).reshape(2, 501))
    assert found is not None
    counts, edges = np.histogram(values.numpy(), bins=64)
    assert found[0] == pytest.approx(counts, abs=1)  # a value on an edge may fall to either side
    assert sum(found[0]) == 1000 and found[1] == pytest.approx(edges, abs=1e-5)
    assert wandb_histogram(torch.full((3,), 2.0)) == ([3.0], [2.0, 2.0])
    assert wandb_histogram(torch.full((3,), torch.nan)) is wandb_histogram(torch.empty(0)) is None


# Tables -----------------------------------------------------------------------------------------------------------


def test_results_replace_what_is_between_the_markers_and_nothing_else() -> None:
    document = f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe end.\n"
    once = put_into(document, "new\n")
    assert once == f"# Title\n\n{BEGIN}\n\nnew\n\n{END}\n\nThe end.\n" == put_into(once, "new")


@pytest.mark.parametrize("document", ["no markers", f"{END} {BEGIN}", BEGIN])
def test_a_document_without_both_markers_is_refused(document: str) -> None:
    with pytest.raises(ValueError, match="results"):
        put_into(document, "new")


def test_a_table_has_a_cell_a_column_and_lines_of_one_length() -> None:
    lines = table(("name", "ms"), [("a", "1.25"), ("longer", "3")]).splitlines()
    assert lines[0] == "| name   |   ms |" and lines[1] == "|--------|-----:|"
    assert lines[3] == "| longer |    3 |" and len({len(line) for line in lines}) == 1


# The program ------------------------------------------------------------------------------------------------------


def _no_nan(word: str) -> float:
    raise ValueError(f"{word} is no JSON")


def _run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "result.json"
    gpu.main(["--device", "cpu", "--model", "small", "--rounds", "3", *arguments, "--json", str(file)])
    found: dict[str, Any] = json.loads(file.read_text("utf-8"), parse_constant=_no_nan)
    return found


def test_a_small_run_writes_every_contender(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _run(tmp_path, "--parameters", "40")
    assert result["failed"] == {} and torch.__version__.startswith(result["machine"]["torch"])
    assert [found["dtype"] for found in result["observation"]] == ["float32", "bfloat16"]
    for found in result["observation"]:
        names = {cost["contender"] for cost in found["costs"]}
        assert names | found["left_out"].keys() == {observer.name for observer in OBSERVERS}
        assert set(found["left_out"]) <= {"wandb.watch itself", "TensorBoard add_histogram"}
        assert all(cost["error"] is None and cost["wall_ms"]["median"] > 0 for cost in found["costs"])
    (training,) = result["training"]
    assert [cost["variant"] for cost in training["costs"]] == list(VARIANTS)
    assert all(cost["error"] is None and cost["step_ms"]["count"] == 15 for cost in training["costs"])
    watched = [cost for cost in training["costs"] if cost["monitor_cost"] is not None]
    assert len(watched) == 3
    assert all(cost["dropped"] == 0 and cost["rows_share"] == 1 and not cost["findings"] for cost in watched)
    assert [cost["parameters"] for cost in result["python"]] == [40, 40]
    assert all(cost["error"] is None and cost["measured_own_ms"]["median"] > 0 for cost in result["python"])
    printed = capsys.readouterr().out
    assert render(result) in printed
    assert all(f"| {name}" in printed for name in VARIANTS)


def test_a_contender_that_fails_is_told_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken_call(given: Given, stack: ExitStack) -> Call:
        def fail() -> None:
            raise RuntimeError("planted in the call")

        return fail

    def broken_build(given: Given, stack: ExitStack) -> Call:
        raise OSError("planted in the building")

    faults = {MOMENTS: broken_call, OBSERVERS[2].name: broken_build}
    planted = tuple(replace(one, build=faults.get(one.name, one.build)) for one in OBSERVERS)
    monkeypatch.setattr(observation, "OBSERVERS", planted)
    result = _run(tmp_path, "--only", "observation", "--dtype", "float32")
    (found,) = result["observation"]
    errors = {cost["contender"]: cost["error"] for cost in found["costs"]}
    assert errors.pop(MOMENTS) == "RuntimeError: planted in the call"
    assert errors.pop(OBSERVERS[2].name) == "OSError: planted in the building"
    assert errors and all(error is None for error in errors.values())
    assert found["moments_gb_per_s"] is None
    assert "planted in the call" in render(result) and "training" not in result


def test_a_ratio_of_tails_is_that_of_the_99th_percentiles_of_all_single_steps() -> None:
    rounds = {number: [1.0, 1.0, 1.0, 1.0, 1.0 + number / 100] for number in range(60)}
    slower = {number: [2 * step for step in steps] for number, steps in rounds.items()}
    once = {number: [*steps[:4], 5.0 if number % 10 == 0 else steps[4]] for number, steps in rounds.items()}

    found = ratio_of_tails(slower, rounds)
    assert found is not None and found.value == pytest.approx(2.0)
    assert found.low is not None and found.high is not None and found.low <= 2.0 <= found.high
    rare = ratio_of_tails(once, rounds)
    everyone = np.array([step for steps in rounds.values() for step in steps])
    assert rare is not None and rare.value == pytest.approx(5.0 / np.quantile(everyone, 0.99), rel=0.01)
    assert ratio_of_tails({}, rounds) is None
