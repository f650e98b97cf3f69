"""Runs side by side: where they part, what went and came, whether a fix worked, and what is no more than noise."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import holter
from holter.cli import main
from holter.clinic.faults.lr import RateJump
from holter.clinic.training import train as train_case
from holter.comparison.comparing import Comparison, compare
from holter.comparison.render import render_comparison
from holter.comparison.series import (
    Level,
    align,
    common_level,
    departing,
    differing,
    judge_levels,
    last_level,
    steps_to,
    thin,
)
from holter.comparison.setup import Difference
from holter.comparison.verdict import Changes, changes_of
from holter.comparison.view import comparison_json, comparison_view
from holter.demo_fault import choose
from holter.diagnosis.finding import Finding
from holter.journal import Journal
from holter.record import Record
from holter.verdicts import compare_gradient_distributions, validate_fix_effectiveness
from tests.hostile_names import hostile_names
from tests.sick_trainings import Net, batches, train

CHANGED = 30  # the step before which a rate is changed
STEPS = 60
Trained = Callable[..., Path]


def text_of(comparison: Comparison, width: int = 100, colours: bool = False) -> str:
    console = Console(file=StringIO(), width=width, force_terminal=colours, record=False, highlight=False)
    console.print(render_comparison(comparison))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains a Net once for each way that is asked for, and gives the directory of its run."""
    root = tmp_path_factory.mktemp("runs")

    def get(name: str, *, seed: int = 0, factor: float = 1.0, size: int = 64, skip: int = 0, **options: Any) -> Path:
        if (root / name).exists():
            return root / name
        torch.manual_seed(seed)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

        def change(step: int) -> None:
            if step == CHANGED - 1:
                optimizer.param_groups[0]["lr"] *= factor

        data = islice(batches(size), skip, None)
        return train(root / name, model, optimizer, data, after=change, **{"steps": STEPS, "updates": 1, **options})

    return get


@pytest.fixture(scope="module")
def base(trained: Trained) -> Path:
    return trained("base")


@pytest.fixture(scope="module")
def sick_and_well(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A training whose rate jumps, and the same without the jump."""
    root = tmp_path_factory.mktemp("cases")
    long, twin = choose("lr-jump")
    recipe = replace(long.recipe, steps=130, validate=130, schedule="constant", warmup=0)
    train_case(replace(long, recipe=recipe, hooks=partial(RateJump, 70, 20.0), onset=70), root / "sick")
    train_case(replace(twin, recipe=recipe), root / "well")
    return root / "sick", root / "well"


def rewritten(run: Path, target: Path, edit: Callable[[Record], Record | None]) -> Path:
    """A copy of a run, each of its records edited or left out."""
    target.mkdir()
    shutil.copy(run / "run.json", target)
    journal = Journal(target / "rank-0.journal")
    for record in map(edit, holter.open_run(run).records):
        if record is not None:
            journal.append(record)
    journal.close()
    return target


# Where they part --------------------------------------------------------------------------------------------------


def test_the_same_training_twice_does_not_differ(trained: Trained, base: Path) -> None:
    """E27: the same seed gives the same run, to the bit, in everything but clocks."""
    comparison = compare(base, trained("again"))
    pair = comparison.pairs[0]
    assert pair.partings.difference is None and pair.partings.departure is None and pair.partings.steps == STEPS
    assert pair.partings.compared > 50, "the gate would pass on nothing"
    assert pair.verdict.state == "same" and pair.setup == () and not comparison.regressed
    assert "Nothing that was recorded differs" in text_of(comparison)


def test_runs_part_where_the_rate_was_changed(trained: Trained, base: Path) -> None:
    """E27: the step, what differs first, and the first layer; held against the records themselves."""
    other = trained("faster", factor=10.0)
    pair = compare(base, other).pairs[0]
    ours, theirs = (holter.open_run(path).history for path in (base, other))
    first = pair.partings.difference
    assert first is not None and (first.step, first.series, first.layer) == (CHANGED, "learning rate", None)
    assert first.reference == pytest.approx(3e-3) and first.other == pytest.approx(3e-2)
    # The update of that step is the first thing of a layer that can differ.
    layer = pair.partings.layer_difference
    assert layer is not None and layer.step == CHANGED and layer.role == "update"
    assert layer.layer in ours.layers("update") and layer.layers == len(ours.layers("update"))
    losses = ours.scalar("loss")[1], theirs.scalar("loss")[1]
    assert (losses[0][: CHANGED + 1] == losses[1][: CHANGED + 1]).all() and losses[0][-1] != losses[1][-1]
    [setting] = [found for found in pair.setup if found.what == "learning rate"]
    assert setting.since == CHANGED and setting.reference == "0.003" and "0.03" in setting.other


@pytest.mark.parametrize("step", [0, 17])
def test_one_bit_in_one_layer_is_found_but_does_not_matter(tmp_path: Path, base: Path, step: int) -> None:
    """E27: the first difference and the first material one are two answers."""
    layer = "middle.weight"

    def edit(record: Record) -> Record:
        if record.step == step and "gradient" in record.rows:
            rows = record.rows["gradient"]
            values, place = rows.rows.values.copy(), rows.layers.index(layer)
            values[place, 7] = np.nextafter(values[place, 7] * (1 + 1e-14), np.inf)
            return replace(
                record, rows={**record.rows, "gradient": replace(rows, rows=replace(rows.rows, values=values))}
            )
        return record

    pair = compare(base, rewritten(base, tmp_path / "edited", edit)).pairs[0]
    first = pair.partings.difference
    assert first is not None and (first.step, first.layer, first.layers) == (step, layer, 1)
    assert pair.partings.departure is None and pair.verdict.state == "no difference" and not pair.verdict.regressions


def test_what_grows_apart_slowly_matters_later(tmp_path: Path, base: Path) -> None:
    """E27: a loss that drifts away by 5 % a step from step 20 on differs at 20, and matters within the next steps."""
    drift = partial(_times, "loss", lambda step: 1.05 ** max(0, step - 19))
    partings = compare(base, rewritten(base, tmp_path / "edited", drift)).pairs[0].partings
    assert partings.difference is not None and partings.departure is not None
    assert partings.difference.step == 20 and partings.difference.series == "loss"
    assert 22 <= partings.departure.step < 55


def test_one_wild_value_in_equal_runs_matters_at_once(tmp_path: Path, base: Path) -> None:
    """E27: a single spike lasts for one step only."""
    spike = partial(_times, "loss", lambda step: 8.0 if step == 33 else 1.0)
    partings = compare(base, rewritten(base, tmp_path / "edited", spike)).pairs[0].partings
    assert partings.departure is not None and partings.departure.step == 33


def test_how_often_was_measured_is_no_difference(trained: Trained, base: Path) -> None:
    """E27: the pace of measuring belongs to the monitor, not to the training."""
    pair = compare(base, trained("seldom", weights=20, updates=10, activations=20, histograms=30)).pairs[0]
    assert pair.partings.difference is None and pair.setup == () and pair.verdict.state == "same"


def test_a_norm_that_torch_rounded_to_bfloat16_is_no_difference(tmp_path: Path, base: Path) -> None:
    """E27: its clip sums up in the dtype of the model; where gradients were measured too the norm is exact."""

    def rounded(by: float, record: Record) -> Record:
        norm = record.scalars.get("gradient_norm", float("nan")) * by
        if np.isnan(norm):
            return record
        halved = float((np.array([norm], np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)[0])
        told = halved if record.step % 3 else norm
        return replace(
            record, scalars={**record.scalars, "gradient_norm": told, "gradient_norm_clipped": told / (2 * halved)}
        )

    base = rewritten(base, tmp_path / "clipped", _clipped)
    same = compare(base, rewritten(base, tmp_path / "rounded", partial(rounded, 1.0))).pairs[0].partings
    assert same.difference is None and same.departure is None
    other = compare(base, rewritten(base, tmp_path / "other", partial(rounded, 1.02))).pairs[0].partings
    assert other.difference is not None and other.difference.series.startswith("gradient norm")


def _clipped(record: Record) -> Record:
    if "gradient_norm" not in record.scalars:
        return record
    return replace(record, scalars={**record.scalars, "gradient_norm_clipped": 0.5})


def _times(name: str, factor: Callable[[int], float], record: Record) -> Record:
    if name not in record.scalars:
        return record
    return replace(record, scalars={**record.scalars, name: record.scalars[name] * factor(record.step)})


# How they were set up ---------------------------------------------------------------------------------------------


class Wider(Net):
    """Another width in one place, a layer more and one less."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(64, 32, bias=False)
        self.branch = nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 8))
        self.extra = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.extra(super().forward(x))
        return logits


def test_differences_of_the_set_up_are_named(tmp_path: Path, base: Path) -> None:
    """E27: model, parameters, optimizer, schedule, layers added, removed and reshaped, decay and clipping."""
    model = Wider()
    model.encoder.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    other = train(tmp_path / "other", model, optimizer, scheduler=schedule, steps=12)
    pair = compare(base, other).pairs[0]
    found = {one.what: one for one in pair.setup}
    assert (found["model"].reference, found["model"].other) == ("Net", "Wider")
    assert (found["optimizers"].reference, found["optimizers"].other) == ("AdamW", "SGD")
    assert (found["scheduler"].reference, found["scheduler"].other) == ("none", "ConstantLR")
    assert found["layers added"].layers == ("extra.weight", "extra.bias")
    assert found["layers removed"].layers == ("middle.bias",)
    assert set(found["shape of layers"].layers) == {"branch.0.weight", "branch.0.bias", "branch.2.weight"}
    assert "branch.0.weight 16×64" in found["shape of layers"].reference
    assert set(found["trained of layers"].layers) == {"encoder.weight", "encoder.bias"}
    assert found["weight decay"].since == 0 and found["learning rate"].other.startswith("0.0033")
    text = " ".join(text_of(compare(base, other)).split())
    assert "layers added extra.weight, extra.bias" in text and "Judged as they were at step 11" in text


# Noise ------------------------------------------------------------------------------------------------------------


def test_two_seeds_of_a_healthy_training_are_no_regression(trained: Trained, base: Path) -> None:
    """E27: other weights and other batches: chance alone, whichever is the reference."""
    runs = [base, *(trained(f"seed {seed}", seed=seed, skip=100 * seed) for seed in (1, 2))]
    for reference in runs:
        comparison = compare(reference, *(run for run in runs if run != reference))
        assert not comparison.regressed, [pair.verdict for pair in comparison.pairs]
        assert {pair.verdict.state for pair in comparison.pairs} == {"no difference"}
        for pair in comparison.pairs:
            first = pair.partings.difference
            assert first is not None and first.step == 0 and "batches" in [one.what for one in pair.setup]
            assert not any(one.series == "loss" for one in pair.partings.series)


def test_a_loss_that_is_worse_than_chance_is_a_regression(tmp_path: Path, base: Path) -> None:
    """The planted twin: the same run, its loss twice as high in the second half."""
    worse = rewritten(base, tmp_path / "worse", partial(_times, "loss", lambda step: 1.0 + step / 20))
    comparison = compare(base, worse)
    assert comparison.regressed and comparison.pairs[0].verdict.state == "worse"
    assert [reason.split(":")[0] for reason in comparison.pairs[0].verdict.regressions] == ["the last loss is worse"]
    assert compare(worse, base).pairs[0].verdict.state == "better" and not compare(worse, base).regressed


def test_levels_are_judged_with_their_error() -> None:
    random = np.random.default_rng(0)
    falling = 0.5 + 2 * np.exp(-np.arange(400) / 60)
    levels = [last_level(falling + random.normal(0, 0.05, 400)) for _ in range(40)]
    known = [level for level in levels if level is not None]
    assert len(known) == 40 and all(abs(level.mean - 0.5) < 0.05 for level in known)
    assert {judge_levels(one, other, 2.5) for one in known for other in known} == {"same"}
    assert {judge_levels(one, replace(one, mean=one.mean + 0.3), 2.5) for one in known} == {"worse"}
    assert judge_levels(known[0], Level(float("nan"), float("nan"), 20), 2.5) == "worse"
    assert judge_levels(Level(float("inf"), float("nan"), 20), known[0], 2.5) == "better"
    assert judge_levels(Level(1.0, float("nan"), 1), Level(1.1, float("nan"), 1), 2.0) == "same"
    assert last_level(np.zeros(0)) is None


# Whether the fix worked -------------------------------------------------------------------------------------------


def test_a_fix_that_worked(sick_and_well: tuple[Path, Path]) -> None:
    """E27, C10, C11: what went, the loss, and the two verdicts of the requirements among the evidence."""
    comparison = compare(*sick_and_well)
    pair = comparison.pairs[0]
    assert pair.verdict.state == "worked" and not comparison.regressed
    assert pair.verdict.sentence.startswith(
        "The fix worked: “jump of the learning rate” is gone, and the last val_loss is better: "
    )
    assert [one.cause for one in pair.changes.went] == ["lr-jump"] and not pair.changes.came
    before, after = (holter.open_run(path).history for path in sick_and_well)
    expected = validate_fix_effectiveness(before.scalar("loss")[1], after.scalar("loss")[1], 50)
    assert repr(pair.evidence.losses) == repr(expected)
    assert pair.evidence.losses is not None and pair.evidence.losses.effective
    bad = set(before.scalar("gradient_nonfinite")[0][before.scalar("gradient_nonfinite")[1] > 0].tolist())
    steps, norms = before.scalar("gradient_norm")
    known = [np.nan if step in bad else norm for step, norm in zip(steps.tolist(), norms.tolist(), strict=True)]
    norms_expected = compare_gradient_distributions(known[-50:], after.scalar("gradient_norm")[1][-50:])
    assert repr(pair.evidence.gradients) == repr(norms_expected)
    text = " ".join(text_of(comparison).split())
    assert (
        "gone jump of the learning rate, critical" in text
        and "effective." in text
        and "Gradient norms of the last steps" in text
    )


def test_the_fault_itself_is_a_regression(sick_and_well: tuple[Path, Path]) -> None:
    comparison = compare(*reversed(sick_and_well))
    verdict = comparison.pairs[0].verdict
    assert (
        comparison.regressed
        and verdict.state == "worse"
        and "“jump of the learning rate” is new" in verdict.regressions
    )
    first = comparison.pairs[0].partings.difference
    assert first is not None and (first.step, first.series) == (70, "learning rate")


def test_a_fix_that_did_nothing_did_not_work(sick_and_well: tuple[Path, Path], tmp_path: Path) -> None:
    """The planted twin: the sick run again."""
    shutil.copytree(sick_and_well[0], tmp_path / "again")
    comparison = compare(sick_and_well[0], tmp_path / "again")
    assert comparison.pairs[0].verdict.state == "did not work" and not comparison.regressed
    assert "“jump of the learning rate” is still found" in comparison.pairs[0].verdict.sentence
    assert comparison.pairs[0].partings.difference is None


def finding(cause: str, layer: str | None = None, severity: str = "warning", since: int = 5) -> Finding:
    return Finding(cause, "layer", since, since, severity, layer)


def test_findings_are_matched_by_cause_and_place() -> None:
    before = [finding("dead-relu", "a"), finding("dead-relu", "b"), finding("lr-jump")]
    after = [finding("dead-relu", "b", since=9), finding("dead-relu", "c"), finding("layer-frozen", "a")]
    changes = changes_of(before, after)
    assert [one.cause for one in changes.went] == ["lr-jump"]
    assert [one.cause for one in changes.came] == ["layer-frozen"]
    assert [(was.layer, now.layer) for was, now in changes.stayed] == [("b", "b"), ("a", "c")]


def test_a_fix_may_work_in_part_and_a_worse_finding_is_a_regression() -> None:
    from holter.comparison.measures import Measures
    from holter.comparison.verdict import Judged, regressions_of, verdict_of

    nothing = Measures(*(None,) * 13)
    same = Judged("last loss", Level(1.0, 0.1, 20), Level(1.0, 0.1, 20), "same", 99)

    def judged(before: list[Finding], after: list[Finding], **more: Any) -> tuple[str, tuple[str, ...]]:
        changes = changes_of(before, after)
        loss = more.get("loss", same)
        found = regressions_of(changes, loss, more.get("states", ("finished",) * 2), more.get("costs", (nothing,) * 2))
        return verdict_of(changes, loss, found, False).state, found

    sick = finding("dead-relu", "a")
    assert judged([sick], []) == ("worked", ())
    assert judged([sick, finding("lr-jump")], [sick]) == ("worked in part", ())
    assert judged([sick], [finding("lr-jump")]) == ("worked in part", ("“jump of the learning rate” is new",))
    assert judged([sick], [], loss=replace(same, outcome="worse"))[0] == "did not work"
    assert judged([sick], [replace(sick, severity="critical")])[1] == ("“dead ReLU” in a became critical",)
    assert judged([], [replace(sick, severity="info")]) == ("no difference", ())
    assert judged([], [], states=("finished", "failed")) == ("worse", ("the training failed",))
    assert judged([sick], [], states=("finished", "crashed")) == ("did not work", ("the training crashed",))
    assert judged([sick], [], states=("failed", "failed")) == ("worked", ())
    slow = Finding("throughput-drop", "performance", 5, 5)
    assert judged([], [slow]) == ("no difference", ())
    costs = replace(nothing, step_time=1.0), replace(nothing, step_time=1.6)
    assert judged([], [slow], costs=costs) == ("worse", ("“drop of throughput” is new",))
    degraded = Finding("monitor-degraded", "monitor", 5, 5)
    assert judged([], [degraded]) == ("no difference", ())


# By samples and tokens --------------------------------------------------------------------------------------------


def test_runs_of_other_batch_sizes_meet_where_they_have_seen_as_many_samples(trained: Trained, base: Path) -> None:
    other = trained("large batches", size=128, steps=STEPS // 2)
    comparison = compare(base, other, by="samples")
    places = [side.curves["loss"].places for side in comparison.sides]
    assert (places[0] == 64 * np.arange(1, STEPS + 1)).all() and (places[1] == 128 * np.arange(1, 31)).all()
    partings = comparison.pairs[0].partings
    assert partings.steps == STEPS // 2
    assert partings.difference is not None and partings.difference.other_step == 0
    assert compare(base, other).pairs[0].partings.difference.step == 0  # type: ignore[union-attr]


def test_tokens_are_counted_and_where_there_are_none_the_error_says_so(tmp_path: Path, base: Path) -> None:
    def tokens(path: Path, size: int, steps: int) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(48, 4))
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        with holter.watch(model, optimizer, run=path, budget=None) as monitor:
            for _ in range(steps):
                x, y = torch.randint(0, 50, (size, 6)), torch.randint(0, 4, (size,))
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.log(loss=loss, inputs=x, targets=y)
        return path

    runs = tokens(tmp_path / "small", 8, 20), tokens(tmp_path / "large", 16, 10)
    sides = compare(*runs, by="tokens").sides
    assert (sides[0].curves["loss"].places == 48 * np.arange(1, 21)).all()
    assert (sides[1].curves["loss"].places == 96 * np.arange(1, 11)).all()
    with pytest.raises(ValueError, match=r"base cannot be aligned by tokens: .* 0 of its 60 steps"):
        compare(base, runs[0], by="tokens")
    with pytest.raises(ValueError, match="step, samples, tokens"):
        compare(*runs, by="epochs")  # type: ignore[arg-type]


def test_places_are_paired_with_the_last_one_before_them() -> None:
    fine, coarse = np.array([10.0, 20, 30, 40, 50]), np.array([25.0, 50, 75])
    assert [part.tolist() for part in align(fine, coarse, 25.0)] == [[1, 4], [0, 1]]
    assert [part.tolist() for part in align(coarse, fine, 25.0)] == [[0, 1], [1, 4]]
    assert [part.tolist() for part in align(fine, coarse)] == [[4], [1]]
    assert [len(part) for part in align(fine[:0], coarse, 25.0)] == [0, 0]


# Damaged and unlike runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.001, 0.4, 0.999])
def test_a_run_that_was_cut_short_shows_what_is_there(tmp_path: Path, base: Path, share: float) -> None:
    """E27: half-written journals; each way round, and beside a whole run."""
    shutil.copytree(base, tmp_path / "cut")
    journal = tmp_path / "cut" / "rank-0.journal"
    data = journal.read_bytes()
    journal.write_bytes(data[: int(share * len(data))])
    for runs in ((tmp_path / "cut", base), (base, tmp_path / "cut", base)):
        comparison = compare(*runs)
        text = " ".join(text_of(comparison).split())
        json.dumps(comparison_view(comparison), allow_nan=False)
        assert "cut: " in text and ("it has no steps" in text) == (share < 0.01)
        assert not any(pair.partings.difference for pair in comparison.pairs)
        known = [pair.judged for pair in comparison.pairs if pair.judged is not None]
        assert all(one.reference == one.other for one in known), "each is judged where both have come to"
        assert len(known) >= (share > 0.01) and not comparison.regressed
    assert comparison.pairs[1].verdict.state == "same", "the damaged run hides the other"


@pytest.mark.parametrize(
    "info",
    [
        "",
        "{",
        "[]",
        '{"layers": 5, "versions": [], "model": 3}',
        '{"layers": [1, {"name": 7}, null], "optimizers": "x"}',
    ],
)
def test_a_damaged_description_is_no_difference(tmp_path: Path, base: Path, info: str) -> None:
    shutil.copytree(base, tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text(info)
    for runs in ((base, tmp_path / "run"), (tmp_path / "run", base)):
        comparison = compare(*runs)
        assert text_of(comparison) and comparison.pairs[0].partings.difference is None
        assert not [one for one in comparison.pairs[0].setup if one.layers]


def test_what_was_never_recorded_is_said(tmp_path: Path, base: Path) -> None:
    bare = rewritten(base, tmp_path / "bare", lambda record: Record(record.step, record.time))
    silent = rewritten(
        base,
        tmp_path / "silent",
        lambda one: replace(one, scalars={name: value for name, value in one.scalars.items() if name != "loss"}),
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.json").write_text("{}")
    comparison = compare(base, bare, silent, tmp_path / "empty")
    text = " ".join(text_of(comparison).split())
    assert "bare: no loss was logged" in text and "bare: no gradients of layers were measured" in text
    assert "silent: no loss was logged" in text and "empty: it has no steps" in text
    assert [pair.judged for pair in comparison.pairs] == [None] * 3
    assert comparison.pairs[1].partings.difference is None and comparison.pairs[1].partings.compared > 50
    assert "nothing in common" in text and json.dumps(comparison_json(comparison), allow_nan=False)


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, base: Path) -> None:
    with pytest.raises(ValueError, match=r"no run at .*missing"):
        compare(base, tmp_path / "missing")
    with pytest.raises(ValueError, match="two runs or more, got 1"):
        compare(base)


# The command line -------------------------------------------------------------------------------------------------


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["compare", *map(str, arguments)], env={"COLUMNS": "100"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_the_command_fails_on_a_regression_alone(
    trained: Trained, base: Path, sick_and_well: tuple[Path, Path]
) -> None:
    """E27: an exit code of its own for what got worse; none for noise, for a fix, or where it is not asked for."""
    sick, well = sick_and_well
    assert command(well, sick, "--fail-on", "regression")[0] == 3
    assert command(well, "--fail-on", "regression")[0] == 2, "one run is not understood"
    assert command(well, sick.parent / "missing", "--fail-on", "regression")[0] == 1
    assert command(well, sick)[0] == 0
    assert command(sick, well, "--fail-on", "regression")[0] == 0
    code, text = command(base, trained("seed 1", seed=1, skip=100), "--fail-on", "regression")
    assert code == 0 and "No difference that counts" in text


def test_the_command_gives_json_and_one_line_for_what_is_wrong(base: Path, tmp_path: Path) -> None:
    code, text = command(base, base, "--json", "--by", "samples")
    found = json.loads(text)
    assert code == 0 and found["regressed"] is False and found["pairs"][0]["verdict"]["state"] == "same"
    assert "curves" not in found["sides"][0] and "ratios" not in found["pairs"][0]
    code, text = command(base, tmp_path / "missing")
    assert code == 1 and text.startswith("Error: no run at ") and text.count("\n") == 1
    code, text = command(base, base, "--by", "tokens")
    assert code == 1 and "cannot be aligned by tokens" in text


HOSTILE = ["\x1b[31mred\x1b]8;;http://x\x07", "[bold]a\nb\r\tc\x00", "🦩" * 3000]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_reach_the_terminal_harmless(tmp_path: Path, base: Path, name: str) -> None:
    """P22: as the names of a run, a layer, a metric, a model and an optimizer."""

    def edit(record: Record) -> Record:
        rows = record.rows.get("gradient") if record.step == 9 else None
        if rows is None:
            return record
        layers = (name, *rows.layers[1:])
        scalars = {**record.scalars, name: 1.0, f"val_{name}_loss": 3.0}
        return replace(record, scalars=scalars, rows={**record.rows, "gradient": replace(rows, layers=layers)})

    def twice(record: Record) -> Record:
        values = {key: 2 * value for key, value in record.scalars.items() if key.startswith(("val_", name))}
        return replace(record, scalars={**record.scalars, **values})

    safe = name.replace("/", "").replace("\x00", "")[:40]
    first = rewritten(base, tmp_path / f"one {safe}", edit)
    second = rewritten(first, tmp_path / f"two {safe}", twice)
    info = json.loads((second / "run.json").read_text())
    info |= {"model": name, "optimizers": [name], "versions": {"torch": name}}
    info["layers"][0]["name"] = name
    (second / "run.json").write_text(json.dumps(info))
    comparison = compare(first, second)
    assert {"model", "optimizers", "layers added"} <= {one.what for one in comparison.pairs[0].setup}
    text = text_of(comparison)
    assert all(character.isprintable() for line in text.split("\n") for character in line)
    painted = text_of(comparison, colours=True)
    assert "\x1b]" not in painted and "\x07" not in painted and "\x00" not in painted
    assert max(map(len, text.splitlines())) <= 100 and ("\\x1b" in text) == ("\x1b" in name)


def test_no_name_escapes_into_the_terminal(sick_and_well: tuple[Path, Path]) -> None:
    """P22: all the hostile names, wherever a comparison shows one."""
    known = compare(*sick_and_well)
    pair, side = known.pairs[0], known.sides[0]
    first = pair.partings.difference
    names = hostile_names()
    assert first is not None and len(names) >= 500
    for name in names:
        parting, sick = replace(first, series=name, layer=name), finding("dead-relu", name)
        named = replace(
            pair,
            name=name,
            partings=replace(pair.partings, difference=parting, layer_difference=parting, departure=parting),
            setup=(Difference(name, name, name, 3, (name,)), Difference(name, "–", name)),
            changes=Changes((sick,), (replace(sick, advice=name),), ((sick, replace(sick, layer=f"{name}.")),)),
            verdict=replace(pair.verdict, sentence=name, regressions=(name,)),
        )
        sides = replace(side, name=f"{name}-", notes=(name,), state=name, findings=(sick,)), replace(side, name=name)
        text = text_of(replace(known, sides=sides, pairs=(named,)))
        assert all(character.isprintable() for character in text.replace("\n", "")), repr(name)
        assert len(text) < 40_000, "a name of 64 KiB fills no screens"


# The table and the page -------------------------------------------------------------------------------------------


def test_the_table_holds_the_numbers_of_the_runs(trained: Trained, base: Path) -> None:
    other = trained("faster", factor=10.0)
    rows = {row["name"]: row for row in comparison_view(compare(base, other))["table"]}
    for place, path in enumerate((base, other)):
        history = holter.open_run(path).history
        steps, losses = history.scalar("loss")
        assert rows["best loss"]["numbers"][place] == losses.min()
        assert rows["best loss"]["texts"][place].endswith(f"at {steps[losses.argmin()]}")
        assert rows["last loss"]["numbers"][place] == pytest.approx(losses[-20:].mean())
        assert rows["largest gradient norm"]["numbers"][place] == history.scalar("gradient_norm")[1].max()
        assert rows["time of a step"]["numbers"][place] == np.median(history.scalar("step_time")[1][2:])
        assert rows["samples a second"]["numbers"][place] == np.median(history.scalar("samples_per_second")[1][2:])
    [level] = [name for name in rows if name.startswith("steps to a loss of")]
    assert all(number is not None for number in rows[level]["numbers"])


def test_the_page_gets_curves_and_a_map(trained: Trained, base: Path) -> None:
    """E27: aligned curves, and log10 of the ratio of gradient norms, held against the histories."""
    other = trained("faster", factor=10.0)
    view = comparison_view(compare(base, other))
    assert json.loads(json.dumps(view, allow_nan=False)) == view
    assert [curve["name"] for curve in view["curves"]] == ["loss", "gradient_norm", "learning_rate", "step_time"]
    ours, theirs = (holter.open_run(path).history for path in (base, other))
    assert view["curves"][0]["runs"][1]["values"] == theirs.scalar("loss")[1].tolist()
    found = view["pairs"][0]["map"]
    values = np.frombuffer(base64.b64decode(found["values"]["bdata"]), "<f4")
    rows, columns = map(int, found["values"]["shape"].split(", "))
    expected = np.log10(theirs.series("gradient", "norm")[2] / ours.series("gradient", "norm")[2]).T
    np.testing.assert_allclose(values.reshape(rows, columns), expected, atol=1e-6)
    assert found["layers"] == list(ours.layers("gradient")) and found["steps"] == list(range(STEPS))
    assert abs(values.reshape(rows, columns)[:, : CHANGED + 1]).max() == 0


def test_long_curves_are_thinned_and_keep_their_extremes() -> None:
    values = np.sin(np.arange(100_000) / 500.0)
    values[[123, 45_678, 99_000]] = 40.0, -30.0, np.nan
    kept = thin(values, 600)
    assert len(kept) <= 600 and {0, 123, 45_678, 99_000, 99_999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all() and thin(values[:600], 600).tolist() == list(range(600))


def test_many_runs_are_each_compared_with_the_first(trained: Trained, base: Path) -> None:
    runs = [
        base,
        trained("again"),
        trained("faster", factor=10.0),
        *(trained(f"seed {n}", seed=n, skip=100 * n) for n in (1, 2)),
        trained("seldom", weights=20, updates=10, activations=20, histograms=30),
    ]
    comparison = compare(*map(holter.open_run, runs))
    assert [pair.name for pair in comparison.pairs] == [run.name for run in runs[1:]]
    assert [pair.verdict.state == "same" for pair in comparison.pairs] == [True, False, False, False, True]
    text = text_of(comparison, width=80)
    assert all(run.name in text for run in runs) and max(map(len, text.splitlines())) <= 80


def test_a_common_level_is_one_that_all_reach() -> None:
    first, second = np.linspace(2.0, 0.5, 100), np.linspace(2.0, 1.0, 100)
    level = common_level([first, second])
    assert level is not None and 1.0 < level < 1.2
    reached = steps_to(first, level), steps_to(second, level)
    assert None not in reached and reached[0] < reached[1] <= 100  # type: ignore[operator]
    stuck = np.full(100, 2.0)
    level = common_level([first, stuck])
    assert level is not None and steps_to(stuck, level) is None and steps_to(first, level) is not None
    assert common_level([stuck]) is None and common_level([first[:0]]) is None
    assert common_level([first - 10.0]) is not None, "a loss below zero"


def test_departures_are_found_on_either_scale() -> None:
    random = np.random.default_rng(1)
    noise = np.exp(random.normal(0, 0.1, (200, 3)))
    other = noise.copy()
    other[120:, 1] *= 3
    other[150, 2] = np.nan
    found = departing(noise, other)
    assert [flags.argmax() if flags.any() else None for flags in found.T] == [None, 120, 150]
    signed, shifted = noise - 1, noise - 1
    shifted = shifted + np.where(np.arange(200) >= 77, 3.0, 0.0)[:, None]
    assert departing(signed, shifted).argmax(axis=0).tolist() == [77] * 3
    assert not departing(noise, np.exp(random.normal(0, 0.1, (200, 3))), 0.25).any(), "two draws of the same"
    assert differing(np.array([np.nan, 1.0]), np.array([np.nan, 2.0])).tolist() == [False, True]


def test_a_loss_that_swings_wildly_is_worse_where_even_its_best_stretch_is() -> None:
    """The error of an explosion is so large that any loss would be within it."""
    random = np.random.default_rng(0)
    calm = last_level(0.3 + 0.01 * random.normal(size=300))
    wild = last_level(np.concatenate([np.full(150, 0.3), 10 ** random.uniform(1, 8, size=150)]))
    assert calm is not None and wild is not None
    assert judge_levels(calm, wild, 2.5) == "worse" and judge_levels(wild, calm, 2.5) == "better"
    noisy = last_level(0.3 + 0.02 * random.normal(size=300))
    assert noisy is not None and judge_levels(calm, noisy, 2.5) == "same"


def test_a_spike_long_before_the_end_is_no_part_of_the_error_of_the_end() -> None:
    random = np.random.default_rng(0)
    losses = 2.3 + 0.03 * random.standard_normal(300)
    calm = last_level(losses)
    losses[200:205] = 197.0, 95.0, 33.0, 16.0, 2.6
    spiked = last_level(losses)
    assert calm is not None and spiked is not None and spiked.error < 3 * calm.error
