"""Convergence: forecasts whose intervals hold what they promise, and plateaus."""

from __future__ import annotations

import numpy as np
import pytest

from holter.diagnosis.convergence import Outlook, forecast, is_flat, outlook
from holter.diagnosis.thresholds import Thresholds


def curve(kind: int, seed: int, steps: int = 2000) -> np.ndarray:
    """Losses as trainings have them: powers of time, exponentials, two phases; with noise that is like the loss."""
    random = np.random.default_rng(seed)
    t = np.arange(1, steps + 1)
    level, scale = random.uniform(0.1, 2.0), random.uniform(0.5, 4.0)
    shapes = (
        level + scale * t ** -random.uniform(0.2, 0.8),
        level + scale * np.exp(-t / random.uniform(100, 600)) + 0.3 * t**-0.5,
        level + scale * (t + random.uniform(5, 100)) ** -random.uniform(0.3, 1.0) * 5,
        level + scale / (1 + t / random.uniform(50, 500)),
    )
    return shapes[kind] * np.exp(random.uniform(0.01, 0.08) * random.normal(size=steps))


def test_nine_of_ten_losses_lie_in_their_interval() -> None:
    """E21: its coverage, over curves of four kinds that are cut at a half and at three quarters."""
    inside, widths = [], []
    for seed in range(60):
        losses = curve(seed % 4, seed)
        for cut in (1000, 1500):
            found = forecast(np.arange(cut), losses[:cut], 1990)
            assert found is not None and found.low <= found.loss <= found.high
            truth = float(np.median(losses[1975:]))
            inside.append(found.low <= truth <= found.high)
            widths.append((found.high - found.low) / truth)
    assert np.mean(inside) >= 0.85
    assert np.median(widths) < 0.25, "an interval that holds everything says nothing"


def test_narrower_intervals_would_not_hold_them() -> None:
    """The planted fault: a fifth of the width, about the same forecast."""
    inside = []
    for seed in range(60):
        losses = curve(seed % 4, seed)
        found = forecast(np.arange(1000), losses[:1000], 1990)
        assert found is not None
        truth = float(np.median(losses[1975:]))
        inside.append(0.2 * (found.low - found.loss) <= truth - found.loss <= 0.2 * (found.high - found.loss))
    assert np.mean(inside) < 0.85


def test_too_little_gives_no_forecast() -> None:
    assert forecast(np.arange(20), np.ones(20), 100) is None
    assert forecast(np.arange(100), np.ones(100), 50) is None
    assert forecast(np.arange(100), np.full(100, np.nan), 500) is None


@pytest.mark.parametrize("seed", range(8))
def test_a_plateau_is_told_from_a_slow_fall(seed: int) -> None:
    """E18."""
    noise = 0.02 * np.random.default_rng(seed).normal(size=400)
    assert is_flat(1.0 + noise)
    assert is_flat(np.where(np.arange(400) < 100, 3.0 - np.arange(400) / 50, 1.0) + noise)
    assert not is_flat(2.0 - np.arange(400) / 400 + noise)
    assert not is_flat(np.ones(20))


def test_thresholds_are_one_object() -> None:
    """E34: seen and changed in one place; what makes no sense is refused."""
    assert Thresholds(update_ratio_high=0.2).update_ratio_high == 0.2
    with pytest.raises(ValueError, match="loss_spike=-1"):
        Thresholds(loss_spike=-1)


@pytest.mark.parametrize("pace", [4, 20, 60, 120, 250])
@pytest.mark.parametrize("steps", [40, 150, 400, 700])
def test_no_loss_of_zero_is_promised(pace: float, steps: int) -> None:
    """A cross-entropy that falls quickly is above 0 for ever; a line or a free curve through it is not."""
    t = np.arange(steps)
    for seed in range(4):
        noise = np.exp(0.3 * np.random.default_rng(seed).normal(size=steps))
        found = outlook(t, 2.3 * np.exp(-t / pace) * noise, None).forecast
        assert found is not None and 0 < found.low <= found.loss <= found.high, found


def test_of_a_quick_fall_that_slows_down_the_level_is_found() -> None:
    """Not only above 0, but near what comes in as many steps again: half of them within a factor of 2.5. Curves that
    begin to fall at once are three times too high here, and those that level off anywhere go to 0."""
    missed = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        t = np.arange(800)
        truth = random.uniform(0.02, 0.1) + 2.3 * np.exp(-t / random.uniform(60, 200))
        found = forecast(t[:400], (truth * np.exp(0.3 * random.normal(size=800)))[:400], 799)
        assert found is not None
        missed.append(abs(np.log(found.loss / truth[-1])))
    assert np.median(missed) < np.log(2.5), np.round(missed, 2)


def test_a_loss_that_may_be_negative_is_followed_below_zero() -> None:
    """A log-likelihood has no floor."""
    t = np.arange(400)
    found = forecast(t, -2.0 + 6.0 * (t + 1.0) ** -0.3, 2000)
    assert found is not None and found.low <= found.loss <= found.high < 0
    assert found.loss == pytest.approx(-2.0 + 6.0 * 2001**-0.3, abs=0.1)


def test_an_outlook_is_for_the_end_of_the_plan_or_for_as_many_steps_again() -> None:
    steps = np.arange(200)
    losses = 1.0 + 3.0 * (steps + 1.0) ** -0.5
    planned, unplanned = outlook(steps, losses, 1000), outlook(steps, losses, None)
    assert planned.forecast is not None and planned.forecast.step == 999 and not planned.is_flat
    assert planned.forecast.low <= 1.0 + 3.0 * 1000**-0.5 <= planned.forecast.high
    assert unplanned.forecast is not None and unplanned.forecast.step == 398
    assert outlook(steps, losses, 200).forecast is None, "the plan is over"
    assert outlook(steps, np.full(200, 2.0), None).is_flat


def test_of_a_loss_that_is_not_finite_nothing_is_expected() -> None:
    losses = np.concatenate([3 / np.arange(1, 200), np.full(50, np.nan)])
    assert outlook(np.arange(len(losses)), losses, None) == Outlook(False, None)
