"""The chart: whatever rules look at, and whenever, they see every value on its step; and how often they are asked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from holter.diagnosis.causes import divergence, optimizers
from holter.diagnosis.chart import Chart, Moment, until_news
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.events import Events
from holter.diagnosis.suspicion import Case, Rule, Suspicion
from holter.record import LayerRows, Record
from holter.statistics.rows import COLUMNS, Rows

RANDOM = np.random.default_rng(5)


def rows(layers: tuple[str, ...], **extras: float) -> LayerRows:
    values = RANDOM.uniform(1.0, 2.0, size=(len(layers), len(COLUMNS)))
    return LayerRows(layers, Rows(values), {name: np.full(len(layers), value) for name, value in extras.items()})


def moments(count: int) -> Iterator[Moment]:
    """A model that gets a layer on the way, loses one, and has a number of them only now and then."""
    for step in range(count):
        layers = ("a", "b") if step < 50 else ("c", "b", "a") if step < 90 else ("c",)
        extras = {"cosine": 0.1 * step} if step % 3 == 0 else {}
        yield Moment(step, scalars={"loss": 2.0 * step}, rows={"gradient": rows(layers, **extras)})


def test_a_rule_sees_the_same_whenever_it_looked_before() -> None:
    """What waits is derived many steps at once, or a step at a time: the numbers are the same."""
    restless, calm = Chart({}), Chart({})
    kept = list(moments(130))
    for moment in kept:
        restless.add(moment)
        assert restless.table("gradient", "norm").steps[-1] == moment.step
        assert restless.scalar("loss").values[-1, 0] == moment.scalars["loss"]
        restless.table("gradient", "cosine")
        calm.add(moment)
    for statistic in ("norm", "zero_share", "abs_max", "cosine"):
        one, other = restless.table("gradient", statistic), calm.table("gradient", statistic)
        assert one.names == other.names == ("a", "b", "c")
        np.testing.assert_array_equal(one.values, other.values)
        np.testing.assert_array_equal(one.steps, other.steps)
    norms = calm.table("gradient", "norm")
    for moment, line in zip(kept, norms.values, strict=True):
        found = dict(zip(norms.names, line.tolist(), strict=True))
        told = moment.rows["gradient"]
        expected = dict(zip(told.layers, told.rows.derive("norm").tolist(), strict=True))
        assert {name: value for name, value in found.items() if not np.isnan(value)} == expected
    assert calm.table("gradient", "cosine").steps.tolist() == list(range(0, 130, 3))


def test_nothing_that_waits_is_kept_for_long() -> None:
    chart = Chart({})
    for moment in moments(500):
        chart.add(moment)
    assert len(chart._sheets["gradient"]._waiting) < 64


def test_an_answer_is_kept_until_there_is_news_of_what_it_was_taken_from() -> None:
    asked = []

    @until_news
    def last_loss(chart: Chart) -> float:
        asked.append(chart.step)
        return float(chart.scalar("loss").values[-1, 0])

    one, other = Chart({}), Chart({})
    for chart, loss in ((one, 1.0), (other, 5.0)):
        chart.add(Moment(0, scalars={"loss": loss}))
    assert [last_loss(one), last_loss(one), last_loss(other)] == [1.0, 1.0, 5.0] and asked == [0, 0]
    one.add(Moment(1, scalars={"loss": 2.0}))
    assert last_loss(one) == 2.0 and asked == [0, 0, 1]
    one.add(Moment(2, scalars={"gradient_norm": 2.0}))  # a scalar that is new is news for all
    one.add(Moment(3, scalars={"gradient_norm": 2.0}))
    assert last_loss(one) == 2.0 and asked == [0, 0, 1, 3]
    one.add(Moment(4, scalars={"gradient_norm": 2.0}))
    assert last_loss(one) == 2.0 and asked == [0, 0, 1, 3]


def test_an_answer_knows_what_the_questions_behind_it_read() -> None:
    @until_news
    def norm(chart: Chart) -> float:
        return chart.latest("gradient_norm")

    @until_news
    def twice(chart: Chart) -> float:
        return 2 * norm(chart)

    chart = Chart({})
    for step in range(4):
        chart.add(Moment(step, scalars={"gradient_norm": float(step)}))
        assert norm(chart) == step and twice(chart) == 2 * step


def test_an_opening_is_news_until_it_is_complete() -> None:
    chart, reads = Chart({}), []
    for step in range(80):
        chart.add(Moment(step, scalars={"loss": float(step)}, rows={"gradient": rows(("a",))}))
        (_, losses), read = chart.reads_of(lambda: chart.opening("loss"))
        (_, norms), also = chart.reads_of(lambda: chart.first("gradient", "norm", 8))
        reads.append(("loss" in read, "gradient" in also))
        assert len(losses) == min(step + 1, 64) and len(norms) == min(step + 1, 8)
    assert [sum(part) for part in zip(*reads, strict=True)] == [63, 7]


def test_a_quick_look_shows_the_last_row_and_which_layers_there_are() -> None:
    chart = Chart({})
    for moment in moments(120):
        chart.add(moment)
        for statistic in ("norm", "cosine"):
            names, found = chart.now("gradient", statistic)
            series = chart.table("gradient", statistic)
            known = dict(zip(series.names, series.values[-1].tolist(), strict=True))
            is_new = series.steps[-1] == moment.step
            assert found.tolist() == [known[name] for name in names] if is_new else np.isnan(found).all()
            assert set(names) == set(moment.rows["gradient"].layers) <= set(chart.layers("gradient"))
    assert set(chart.layers("gradient")) == {"a", "b", "c"}


# Which rules are asked ----------------------------------------------------------------------------------------------


def calls_of(rule: Rule, losses: np.ndarray) -> list[int]:
    """The steps at which this rule is called, of a training with these losses and an update at every tenth step."""
    steps: list[int] = []

    def counted(case: Case) -> list[Suspicion]:
        steps.append(case.chart.step)
        return list(rule(case))

    doctor = Doctor({}, rules=(counted,))
    for step, loss in enumerate(losses.tolist()):
        told = {"update": rows(("a",), ratio=1e-3)} if step % 10 == 0 else {}
        doctor.take(Record(step, float(step), {"loss": loss}, told))
    doctor.finish()
    return steps


def looks_at_updates(case: Case) -> Iterator[Suspicion]:
    if case.chart.table("update", "ratio").values[-1, 0] > 1 and case.chart.latest("loss") > 0:
        yield Suspicion("lr-too-high", "lr", 0, 0.9)


def looks_at_events(case: Case) -> Iterator[Suspicion]:
    if case.lately("loss", 5):
        yield Suspicion("unknown", "loss", 0, 0.9)


def test_a_silent_rule_is_not_asked_again_without_news_of_what_it_looked_at() -> None:
    losses = RANDOM.normal(2.0, 0.01, size=300)
    updates, every = calls_of(looks_at_updates, losses), asked_at(losses)
    assert len(updates) <= 31 < len(every)
    assert len(calls_of(looks_at_events, losses)) <= 2, "nothing ever happened"


def test_a_rule_that_speaks_is_asked_every_time() -> None:
    def speaks(case: Case) -> Iterator[Suspicion]:
        yield Suspicion("lr-too-high", "lr", 0, 0.9, evidence={"of": len(case.chart.table("update", "ratio"))})

    losses = RANDOM.normal(2.0, 0.01, size=100)
    assert calls_of(speaks, losses) == asked_at(losses)


@pytest.mark.parametrize("value", [np.nan, np.inf, 50.0])
def test_what_happens_is_known_at_its_own_step(value: float) -> None:
    """However calm it was before, and whatever waits."""
    losses = RANDOM.normal(2.0, 0.01, size=300)
    for step in range(200, 206):  # wherever it falls among the steps that are judged together
        ill = losses.copy()
        ill[step:] = value
        assert step in calls_of(looks_at_events, ill)


def asked_at(losses: np.ndarray, is_late: bool = False) -> list[int]:
    """The steps at which a doctor asks its rules in a training with these losses."""
    steps: list[int] = []

    def rule(case: Case) -> Iterator[Suspicion]:
        steps.append(case.step)
        yield from ()

    doctor = Doctor({}, rules=(rule,))
    doctor.is_late = is_late
    for step, loss in enumerate(losses.tolist()):
        doctor.take(Record(step, float(step), {"loss": loss}))
    doctor.finish()
    return steps


def test_rules_are_asked_at_every_step_after_something_new() -> None:
    losses = RANDOM.normal(2.0, 0.01, size=600)
    losses[400:405] = 50.0
    steps = asked_at(losses)
    assert set(range(400, 415)) <= set(steps)
    assert len([step for step in steps if 200 <= step < 400]) == pytest.approx(200 / 8, abs=2), "and else at a pace"


def test_a_training_that_is_never_calm_does_not_ask_at_every_step() -> None:
    losses = RANDOM.normal(2.0, 0.01, size=2000)
    losses[::6] = 50.0  # some series of a large model is always outside
    steps = asked_at(losses)
    late = [step for step in steps if step >= 1000]
    assert len(late) <= 0.4 * 1000
    assert len(late) >= 0.25 * 1000, "but much more often than a calm one"


# What must not grow, and must not fail -------------------------------------------------------------------------------


def test_layers_that_are_others_at_every_step_take_no_more_room() -> None:
    """P4: a mixture of experts, or layers that are dropped at random."""
    events, names = Events(), [f"experts.{place}.weight" for place in range(40)]
    for step in range(300):
        chosen = tuple(name for name in names if RANDOM.random() < 0.7)
        events.add(Moment(step, scalars={"loss": 1.0}, rows={"gradient": rows(chosen)}))
    assert len(events._places_of) <= 2 and len(events._names) == 41


def test_rows_of_no_layer_are_no_failure() -> None:
    events, chart = Events(), Chart({})
    for moment in (Moment(0, rows={"gradient": rows(())}), Moment(1, rows={"gradient": rows(("a",))})):
        events.add(moment)
        chart.add(moment)
    assert chart.table("gradient", "norm").names == ("a",)


def test_a_loss_that_falls_from_zero_switches_no_rule_off() -> None:
    """Where numpy gave infinity, a number of python's own would raise."""
    doctor = Doctor({"layers": [{"name": name, "shape": [8, 8]} for name in ("a.weight", "b.weight")]})
    for step in range(200):
        told = {}
        if step % 10 == 0:
            told = {"update": rows(("a.weight", "b.weight"), cosine=0.99 if step >= 100 else 0.05, ratio=1e-3)}
        loss = 0.0 if step < 100 else -0.05 * (step - 99)
        doctor.take(Record(step, float(step), {"loss": loss, "gradient_norm": 1.0, "learning_rate": 0.0}, told))
    doctor.finish()
    assert not [finding for finding in doctor.findings if finding.cause == "monitor-degraded"]


def test_a_doctor_that_is_late_asks_rarely_whatever_happens() -> None:
    losses = RANDOM.normal(2.0, 0.01, size=300)
    losses[100:110] = 50.0
    assert np.diff(asked_at(losses, is_late=True)[:-1]).tolist() == [25] * 10


# Advice and rates ---------------------------------------------------------------------------------------------------


def worded(losses: np.ndarray, ratio: float, later: float | None = None) -> Iterator[Record]:
    """A training of words, whose labels have an entropy of 2 nats, with these losses; its steps change the weights by
    one share of their size in the first two looks, and by another later."""
    for step, loss in enumerate(losses.tolist()):
        told = {"batch": rows(("targets",), label_entropy=2.0, size=64.0)}
        if step % 5 == 0:
            share = ratio if step < 10 or later is None else later
            told["update"] = rows(("a.weight",), ratio=share)
        yield Record(step, float(step), {"loss": loss, "learning_rate": 0.01}, told)


WORDED = {"layers": [{"name": "a.weight", "shape": [8, 8]}]}


def too_high(losses: np.ndarray, ratio: float, later: float | None = None, first: int = 0) -> list[Suspicion]:
    """What the rule says of a training of words; `first` is the first step that it knows."""
    chart = Chart(WORDED)
    for record in worded(losses, ratio, later):
        chart.add(Moment(record.step + first, scalars=dict(record.scalars), rows=dict(record.rows)))
    return list(divergence.too_high(Case(chart, Events())))


def test_a_loss_that_falls_past_that_of_a_guess_is_no_rate_too_high() -> None:
    """A model of language first learns how frequent its words are."""
    assert too_high(np.full(60, 6.0), 0.15), "one that stays there is"
    assert not too_high(np.linspace(9.0, 4.6, 60), 0.15)


def test_a_loss_that_is_far_above_a_guess_and_falls_is_on_its_way_there() -> None:
    """As under SGD at the rate of 20 that word models are trained with: step by step it comes down to a guess."""
    losses = np.concatenate([np.linspace(10.0, 7.0, 30), np.full(30, 7.0)])
    assert not too_high(losses, 0.15)
    assert too_high(np.concatenate([np.linspace(10.0, 7.0, 8), np.full(52, 7.0)]), 0.15), "one that has stopped there"


def test_only_steps_that_go_on_being_long_hold_a_loss_where_it_is() -> None:
    """A head that begins near zero takes one long step; a model that can learn nothing stays at a guess at any rate."""
    assert not too_high(np.full(60, 4.5), 0.25, later=0.01)
    assert too_high(np.full(60, 4.5), 0.25, later=0.06)
    assert too_high(np.full(60, 4.5), 0.9, later=0.01), "nothing is left of what the weights were"


def test_what_a_run_begins_with_is_not_judged_by_later_steps() -> None:
    """A doctor that begins with the present sees steps that a training has grown into."""
    assert not too_high(np.full(60, 6.0), 0.15, first=400)


def test_a_loss_that_has_come_down_takes_back_what_was_said() -> None:
    doctor = Doctor(WORDED, [divergence.too_high])
    severities: dict[int, list[str]] = {}
    for record in worded(np.concatenate([np.full(80, 6.0), np.linspace(6.0, 1.0, 120)]), 0.15):
        doctor.take(record)
        severities |= {record.step: [one.severity for one in doctor.findings]}
    doctor.finish()
    assert severities[79] == ["critical"]
    assert [one.severity for one in doctor.findings] == ["info"] and "from 6" in doctor.findings[0].advice


@pytest.mark.parametrize(("now", "is_named"), [(60.0, True), (2.2, False)])
def test_weights_that_outgrow_their_first_size_between_two_looks_took_long_steps(now: float, is_named: bool) -> None:
    """Adam at a hundred times the rate: by the second look the steps are short beside what the weights have become."""
    chart, losses = Chart(WORDED), np.concatenate([np.linspace(8.0, 4.5, 12), np.full(60, 4.5)])
    for step, loss in enumerate(losses.tolist()):
        told = {"batch": rows(("targets",), label_entropy=2.0, size=64.0)}
        if step % 10 == 0:
            told["update"] = rows(("a.weight",), ratio=0.02, weight_norm=2.0 if step == 0 else now)
        chart.add(Moment(step, scalars={"loss": loss, "learning_rate": 0.1}, rows=told))
    assert bool(list(divergence.too_high(Case(chart, Events())))) == is_named


def test_no_rate_is_cut_by_more_than_ten_thousand_and_what_explodes_is_clipped() -> None:
    (found,) = too_high(np.full(60, 6.0), 3000.0)
    assert "clip the gradients" in found.advice and "from 0.01 to about 1e-06" in found.advice
    (found,) = too_high(np.full(60, 6.0), 0.5)
    assert "clip" not in found.advice and "from 0.01 to about 0.0002" in found.advice


@pytest.mark.parametrize(("ratio", "is_said"), [(1e-5, True), (1e-2, False)])
def test_a_clip_that_leaves_updates_of_a_fair_size_is_not_too_tight(ratio: float, is_said: bool) -> None:
    """Where gradients explode, one that leaves a millionth of them is what a training lives by."""
    chart = Chart({"layers": [{"name": "a.weight", "shape": [8, 8]}]})
    for step in range(60):
        told = {"update": rows(("a.weight",), ratio=ratio)} if step % 5 == 0 else {}
        chart.add(Moment(step, scalars={"loss": 1.0, "clip_norm": 1e6, "clip_max_norm": 1.0}, rows=told))
    assert bool(list(optimizers.tight_clip(Case(chart, Events())))) == is_said
