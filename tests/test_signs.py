"""Signs: what is wrong with a real training is plain in `holter show`, and a healthy one shows nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.cells import cell_len

import holter
from holter.cli import main
from holter.history import History
from holter.journal import Journal
from holter.record import EXECUTION_ORDER, LayerRows, Record
from holter.signs import Sign, signs_of
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, Rows
from tests import models, sick_trainings


def show(run: Path, *options: str, width: int = 100) -> str:
    result = CliRunner().invoke(main, ["show", str(run), *options], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.stdout


def told(run: Path) -> str:
    """The signs as they are printed, line breaks aside; empty where the run has none."""
    text = show(run)
    after = text[text.index("\nsigns") :].split("\n\n")[0].removeprefix("\nsigns")
    return " ".join(after.split()).replace("nothing odd was seen", "")


def signs_in(run: Path) -> tuple[Sign, ...]:
    opened = holter.open_run(run)
    return signs_of(opened.history.latest(), opened.layers)


def make(name: str, path: Path, **options: Any) -> Path:
    torch.manual_seed(0)
    training: Callable[..., Path] = getattr(sick_trainings, name)
    return training(path / name, **options)


# Real trainings -------------------------------------------------------------------------------------------------

FAULTS = {
    "dead_relu": ["dead relu: 100 % of its units are dead", "from the first step on"],
    "saturated_tanh": [r"saturated tanh: \d\d % of its values are at a bound"],
    "frozen_layer": ["frozen encoder.weight, encoder.bias: frozen, requires_grad is off though an optimizer holds"],
    "layer_not_held": ["not held branch.0.weight, branch.0.bias: not held by any optimizer though they require"],
    "detached_branch": [r"no gradient branch\.\*: no gradient at all while 6 other layers have one \(detached\?\)"],
    "repeated_batch": ["same batch the batch of step 10 repeats that of step 9, and 13 more repeat an earlier one"],
    "float16_underflow": [
        r"underflow encoder\.\*, .*: \d\d to 100 % of the gradient is exactly zero",
        "near 5.96e-08, the smallest that float16 can hold",
    ],
    "float16_rounding": ["underflow encoder", "near 5.96e-08, the smallest that float16 can hold"],
    "bfloat16_updates_lost": ["unchanged .*encoder.weight.* keep their bits at a step: updates are lost in rounding"],
    "nan_in_weights": [
        "not finite the loss is not finite, since step 12",
        r"not finite middle, tanh, head \(activation\): NaN or infinite values, first in step 12",
    ],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_plain_in_what_is_printed(fault: str, tmp_path: Path) -> None:
    """C9, C16, D6: by name, with its number, and since when."""
    run = make(fault, tmp_path)
    for words in FAULTS[fault]:
        assert re.search(words, told(run)), told(run)
    printed = json.loads(CliRunner().invoke(main, ["show", str(run), "--json"]).stdout)["signs"]
    assert [sign["text"] for sign in printed] == [sign.text for sign in signs_in(run)]


@pytest.mark.parametrize("fault", list(FAULTS)[:7])
def test_a_fault_is_plain_with_the_settings_as_they_come(fault: str, tmp_path: Path) -> None:
    """One look at the activations and the weights of a short run, and whatever the budget leaves."""
    as_they_come = {"weights": 100, "updates": 10, "activations": 100, "histograms": 100, "budget": 0.01}
    words = FAULTS[fault][0].split(", and")[0]  # how many of them are seen depends on how fast the machine is
    assert re.search(words, told(make(fault, tmp_path, **as_they_come)))
    assert signs_in(make("healthy", tmp_path, **as_they_come)) == ()


def test_the_same_training_without_a_fault_shows_no_sign(tmp_path: Path) -> None:
    """The gate that can fail: all that the faults above have in common is not what is seen."""
    run = make("healthy", tmp_path)
    assert signs_in(run) == () and "signs  nothing odd was seen" in show(run)


CONTROLS = {
    "low_rank": "frozen",
    "low_rank_first_step": "frozen",
    "tied_weights": "",
    "sparse_rows": "",
    "sparse_gradients": "",
    "frozen_backbone": "frozen",
    "dropout_and_small_batches": "",
    "single_examples": "",
    "zero_gains": "",
    "zero_biases": "",
    "idle_experts": "no gradient",
    "teacher": "frozen",
    "sure_of_itself": "",
    "scaler_that_searches": "",
    "warm_up_to_decay": "",
    "before_the_warm_up": "",
    "epochs_in_order": "same batch",
}


@pytest.mark.parametrize("control", CONTROLS)
def test_what_only_looks_frightening_is_told_at_most(control: str, tmp_path: Path) -> None:
    found = signs_in(make(control, tmp_path))
    assert {sign.level for sign in found} <= {"info"}, found
    assert " ".join(sorted({sign.kind for sign in found})) == CONTROLS[control], found


def test_the_scaler_that_searches_did_skip(tmp_path: Path) -> None:
    """Otherwise the control above would say nothing."""
    history = holter.open_run(make("scaler_that_searches", tmp_path)).history
    skipped = history.scalar("skipped")[1]
    assert skipped[:3].all() and not skipped[20:].any()


@pytest.mark.parametrize("name", models.MODELS)
def test_ordinary_models_show_no_sign(name: str, tmp_path: Path) -> None:
    training = models.make(name)
    options: dict[str, Any] = {"weights": 4, "updates": 2, "activations": 4, "histograms": 8, "budget": None}
    with holter.watch(
        training.model, training.optimizer, run=tmp_path / "run", scaler=training.scaler, **options
    ) as training.monitor:
        for _ in range(24):
            training.step()
    assert signs_in(tmp_path / "run") == ()


@pytest.mark.parametrize("width", [60, 80, 100, 160])
@pytest.mark.parametrize("fault", ["dead_relu", "float16_underflow", "nan_in_weights"])
def test_sick_runs_fit_the_terminal(fault: str, width: int, tmp_path: Path) -> None:
    text = show(make(fault, tmp_path), "--all", width=width)
    assert max(map(cell_len, text.splitlines())) <= width


# Records by hand ------------------------------------------------------------------------------------------------


def rows_of(values: Mapping[str, Sequence[float]], extras: Mapping[str, Sequence[float]] | None = None) -> LayerRows:
    """Measured from these values by layer, histograms too."""
    arrays = {name: np.array(numbers, dtype=np.float64) for name, numbers in values.items()}
    measured = np.zeros((len(arrays), len(COLUMNS)))
    for row, x in zip(measured, arrays.values(), strict=True):
        ours = {"count": len(x), "zeros": (x == 0).sum(), "sum": x.sum(), "sum_abs": np.abs(x).sum()}
        ours |= {"sum_squares": (x**2).sum(), "sum_fourths": (x**4).sum(), "min": x.min(), "max": x.max()}
        for column, number in ours.items():
            row[COLUMNS.index(column)] = number
    histograms = Histograms.of(list(arrays.values()))
    further = {name: np.array(numbers, dtype=np.float64) for name, numbers in (extras or {}).items()}
    return LayerRows(tuple(arrays), Rows(measured, histograms), further)


def blank(layers: Sequence[str], **extras: Sequence[float]) -> LayerRows:
    return rows_of({layer: [1.0, -1.0] for layer in layers}, extras)


def found(records: Sequence[Record], layers: Sequence[Mapping[str, Any]] = ()) -> tuple[Sign, ...]:
    return signs_of(History(records), tuple(layers))


def parameters(*names: str, **told: Any) -> list[dict[str, Any]]:
    return [{"name": name, "shape": [2], "dtype": "float32", "trained": True, **told} for name in names]


def test_layers_that_cannot_learn_are_told_apart() -> None:
    """Held or not, required or not: what both say together decides."""
    names = ("a.weight", "b.weight", "c.weight", "d.weight")
    requires, held = [1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]
    weights = {"weight": blank(names, requires_grad=requires, held=held)}
    signs = found([Record(step, 0.0, rows=weights) for step in (0, 100)], parameters(*names))
    assert [(sign.kind, sign.layers, sign.level) for sign in signs] == [
        ("frozen", ("b.weight",), "warning"),
        ("not held", ("d.weight",), "warning"),
        ("frozen", ("c.weight",), "info"),
    ]
    assert "requires_grad is off though an optimizer holds it" in signs[0].text
    assert "not held by any optimizer though it requires a gradient" in signs[1].text


def test_a_layer_that_is_frozen_later_says_since_when() -> None:
    def record(step: int, requires: float) -> Record:
        return Record(step, 0.0, rows={"weight": blank(["a.weight"], requires_grad=[requires], held=[1.0])})

    signs = found([record(0, 1.0), record(100, 0.0), record(200, 0.0)], parameters("a.weight"))
    assert [(sign.since, sign.text) for sign in signs] == [
        (100, "a.weight: frozen, requires_grad is off though an optimizer holds it, since step 100")
    ]
    assert found([record(0, 0.0), record(100, 1.0)], parameters("a.weight")) == (), "gradually unfrozen"


def test_what_nobody_holds_but_someone_writes_is_no_warning() -> None:
    weights = [rows_of({"copy.weight": [value, 1.0]}, {"requires_grad": [1.0], "held": [0.0]}) for value in (1.0, 2.0)]
    records = [Record(step, 0.0, rows={"weight": rows}) for step, rows in enumerate(weights)]
    (sign,) = found(records, parameters("copy.weight"))
    assert sign.level == "info" and "something changes it" in sign.text


def test_tied_names_are_not_missed() -> None:
    records = [Record(step, 0.0, rows={"gradient": blank(["table.weight"])}) for step in range(5)]
    assert found(records, parameters("table.weight", tied_to=["head.weight"])) == ()


def test_layers_that_the_user_left_out_are_not_missed() -> None:
    records = [Record(step, 0.0, rows={"gradient": blank(["a.weight"])}) for step in range(5)]
    assert found(records, parameters("a.weight") + parameters("b.weight", selected=False)) == ()
    assert found(records, parameters("a.weight") + parameters("c.weight", trained=False, selected=False)) == ()


def test_a_layer_that_no_forward_used_is_no_detached_one() -> None:
    order = {EXECUTION_ORDER: json.dumps(["", "a", "a.weight", "b", "b.weight", "c.weight"])}
    records = [Record(step, 0.0, rows={"gradient": blank(["b.weight"])}, notes=order) for step in range(3)]
    signs = found(records, parameters("a.weight", "b.weight", "c.weight"))
    assert [(sign.layers, sign.level) for sign in signs] == [(("a.weight",), "warning"), (("c.weight",), "info")]
    assert found(records[:2], parameters("a.weight", "b.weight")) == (), "two steps say little"


@pytest.mark.parametrize(
    ("ago", "words", "level"),
    [
        ([0] * 30 + [1] * 30, "the batch of step 30 repeats that of step 29, and 29 more", "warning"),
        ([0] * 40 + [3] + [0] * 19, "the batch of step 40 repeats that of step 37", "warning"),
        ([0, 0] + [2] * 58, "the batch of step 2 repeats that of step 0", "warning"),
        ([0] * 12 + [12] * 48, "the same 12 batches come round in the same order, since step 12", "info"),
    ],
)
def test_batches_that_come_again(ago: list[float], words: str, level: str, tmp_path: Path) -> None:
    records = [Record(step, 0.0, {"loss": 1.0, "batch/repeated": float(back)}) for step, back in enumerate(ago)]
    (sign,) = found(records)
    assert words in sign.text and sign.level == level
    journal = Journal(tmp_path / "rank-0.journal")
    for record in records:
        journal.append(record)
    journal.close()
    assert words in told(tmp_path) and "seen before" in show(tmp_path)


def test_batches_that_do_not_come_again() -> None:
    assert found([Record(step, 0.0, {"batch/repeated": 0.0}) for step in range(20)]) == ()


@pytest.mark.parametrize(("every", "is_sign"), [(3, True), (10, False)])
def test_a_scaler_that_goes_on_skipping(every: int, is_sign: bool) -> None:
    records = [
        Record(step, 0.0, {"skipped": float(step < 8 or (step > 60 and step % every == 0)), "loss_scale": 1024.0})
        for step in range(200)
    ]
    signs = found(records)
    assert [sign.kind for sign in signs] == ["skipped"] * is_sign
    if signs:
        assert signs[0].since in range(60, 64) or signs[0].since == 0
        assert "of the steps were skipped" in signs[0].text and "the loss scale is 1,024" in signs[0].text


def test_values_near_the_limit_of_their_format() -> None:
    def look(step: int, share: float, largest: float) -> Record:
        rows = rows_of({"mlp": [1.0, largest]}, {"near_overflow": [share]})
        return Record(step, 0.0, rows={"activation": rows})

    (sign,) = found([look(0, 0.0, 10.0), look(100, 0.001, 40_000.0), look(200, 0.5, 60_000.0)])
    assert (sign.kind, sign.layers, sign.since, sign.value) == ("near overflow", ("mlp",), 100, 0.5)
    assert "up to 60,000" in sign.text
    assert found([look(0, 0.5, 60_000.0), look(100, 0.0, 10.0)]) == (), "that is over"


@pytest.mark.parametrize(
    ("logits", "entropies", "is_sign"),
    [
        ((3.0, 8.0), (4.0, 2.0), False),
        ((20.0, 130.0), (2.0, 1.0), True),
        ((130.0, 130.0), (2.0, 2.0), False),  # as a pretrained model has them
        ((60.0,), (0.01,), True),
        ((1.0,), (0.0,), False),  # one token has nowhere else to look
    ],
)
def test_attention_at_its_limit(logits: Sequence[float], entropies: Sequence[float], is_sign: bool) -> None:
    records = [
        Record(step, 0.0, rows={"attention": blank(["block.attention"], max_logit=[logit], entropy=[entropy])})
        for step, (logit, entropy) in enumerate(zip(logits, entropies, strict=True))
    ]
    signs = found(records)
    assert [sign.layers for sign in signs] == [("block.attention",)] * is_sign


def test_the_worst_comes_first_and_information_last() -> None:
    rows = {
        "weight": blank(["w"], requires_grad=[0.0], held=[0.0]),
        "activation": blank(["tanh", "out"], saturated=[0.9, math.nan], dead=[0.0, 0.0]),
    }
    records = [Record(step, 0.0, {"loss": math.nan, "batch/repeated": float(step > 0)}, rows) for step in range(3)]
    kinds = [sign.kind for sign in found(records, parameters("w"))]
    assert kinds == ["not finite", "saturated", "same batch", "frozen"]


def test_a_loss_that_recovered_is_told_all_the_same() -> None:
    losses = [1.0, math.nan, math.inf, 1.0]
    (sign,) = found([Record(step, 0.0, {"loss": loss}) for step, loss in enumerate(losses)])
    assert sign.text == "the loss was not finite in 2 steps, first in step 1"


@pytest.mark.parametrize(
    ("losses", "since"),
    [
        ([2.0] * 10 + [1.0] * 20 + [50.0] * 10, 30),
        ([2.0] * 10 + [1.0] * 20 + [500.0] + [1.0] * 10, None),  # a spike that came down
        ([2.0] * 10 + [6.0] * 20, None),  # as losses of two that play against each other may rise
        ([-2.0] * 10 + [50.0] * 10, None),  # without a zero there is no ratio
        ([2.0] * 5 + [50.0] * 4, None),
    ],
)
def test_a_loss_that_ends_far_above_its_start(losses: list[float], since: int | None) -> None:
    signs = found([Record(step, 0.0, {"loss": loss}) for step, loss in enumerate(losses)])
    assert [(sign.kind, sign.since) for sign in signs] == ([] if since is None else [("loss", since)])


# Underflow ------------------------------------------------------------------------------------------------------


def gradients(values: Mapping[str, np.ndarray[Any, Any]], **scalars: float) -> list[Record]:
    rows = rows_of({name: numbers.tolist() for name, numbers in values.items()})
    return [Record(step, 0.0, scalars, {"gradient": rows}) for step in range(3)]


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("seed", range(3))
def test_underflow_is_seen_at_any_scale_and_in_float16_only(scale: float, seed: int) -> None:
    """The truth is numpy's own rounding to float16."""
    values = np.random.default_rng(seed).normal(0, 6e-8, 4000)
    rounded = values.astype(np.float16).astype(np.float64) / scale
    assert 0.1 < (rounded == 0).mean() < 0.9
    scalars = {"loss_scale": scale} if scale > 1 else {}
    (sign,) = found(gradients({"early": rounded, "late": 1e3 * values}, **scalars))
    assert sign.kind == "underflow" and sign.layers == ("early",) and sign.value == (rounded == 0).mean()
    assert found(gradients({"early": values / scale, "late": 1e3 * values}, **scalars)) == (), "in float32"


@pytest.mark.parametrize("seed", range(5))
def test_other_zeros_are_no_underflow(seed: int) -> None:
    """Units that are off, rows that a batch does not use, one value for all, and small values that float16 holds."""
    random = np.random.default_rng(seed)
    off = random.random(4000) < 0.6
    cases = {
        "masked": np.where(off, 0, random.normal(0, 1e-7, 4000)),
        "masked, larger": np.where(off, 0, random.normal(0, 1e-3, 4000)),
        "one value": np.where(off, 0, 2.0**-12),
        "held": random.normal(0, 1e-4, 4000).astype(np.float16).astype(np.float64),
        "masked and held": np.where(off, 0, random.normal(0, 1e-4, 4000)).astype(np.float16).astype(np.float64),
    }
    for name, values in cases.items():
        assert found(gradients({name: values})) == (), name
        if (values.astype(np.float16) == values).all():
            assert found(gradients({name: values}), parameters(name, dtype="float16")) == (), name


def test_a_float16_gradient_without_a_histogram_is_judged_by_its_size() -> None:
    values = np.random.default_rng(0).normal(0, 3e-8, 4000).astype(np.float16).astype(np.float64)
    full = rows_of({"early": values.tolist()})
    bare = LayerRows(full.layers, Rows(full.rows.values))
    records = [Record(step, 0.0, rows={"gradient": bare}) for step in range(3)]
    (sign,) = found(records, parameters("early", dtype="float16"))
    assert sign.kind == "underflow" and "smallest" not in sign.text
    assert found(records, parameters("early")) == ()
