"""What the records tell of the batches: which of them are inputs, which targets, and what a mere guess would lose."""

from __future__ import annotations

import numpy as np

from holter.diagnosis.chart import Chart, until_news
from holter.series import Floats, Series, known_median, logs, overall_median

USUAL = 48  # batches before an odd one that tell what is usual
_ACCIDENT = 1e-3  # of such batches expected in the run so far: with more, one is chance
_TIES = 2  # batches with the same lowest or highest value: numbers that are measured never agree to the last digit
OFF = 10.0  # times the size of 1 that layers are initialised for
_LABELS = ("targets", "target", "labels", "label")  # of a dictionary that holds inputs and labels together


def is_target(layer: str) -> bool:
    """By the name of a tensor of the batch.

    >>> [is_target(name) for name in ("targets", "inputs/labels", "inputs/pixels")]
    [True, True, False]
    """
    parts = layer.split("/")
    return parts[0] == "targets" or parts[-1] in _LABELS


def targets_of(series: Series) -> list[int]:
    return [place for place, name in enumerate(series.names) if is_target(name)]


@until_news
def numeric_inputs(chart: Chart) -> list[int]:
    """Return the places of the inputs whose size means something.

    Token ids, masks and lengths are whole numbers. Raw pixels are, too, but nothing is looked up in a table by them,
    and they do not come beside inputs with fractions.
    """
    lows, highs = chart.table("batch", "min"), chart.table("batch", "max")
    chosen = [place for place, name in enumerate(lows.names) if not is_target(name)]
    ends = np.concatenate([lows.opening[:, chosen], highs.opening[:, chosen]])
    with np.errstate(invalid="ignore"):
        whole = ((ends == np.round(ends)) | np.isnan(ends)).all(axis=0)
    are_ids = len(chart.scalar("tokens_per_second")) > 0
    has_tables = are_ids or any(chart.part(name) == "embedding" for name in chart.parameters)
    if not has_tables and whole.all():
        return chosen
    return [place for place, is_whole in zip(chosen, whole.tolist(), strict=True) if not is_whole]


def first_inputs(chart: Chart, statistic: str, places: list[int]) -> Floats:
    """Return the median over the first batches, nothing where none was recorded."""
    first = chart.table("batch", statistic).opening[:3]
    return np.median(first[:, places], axis=0) if len(first) else np.empty(0)


@until_news
def inputs_are_large(chart: Chart) -> bool:
    """Whether the first inputs were far larger than what layers are initialised for."""
    places = numeric_inputs(chart)
    mean, std = (first_inputs(chart, name, places) for name in ("mean", "std"))
    return bool((np.hypot(mean, std) > OFF).any())


@until_news
def label_entropies(chart: Chart) -> tuple[Series, int]:
    """Of the first tensor of labels that are classes, and its place; -1 where there is none."""
    series = chart.table("batch", "label_entropy")
    for place in targets_of(series):
        if np.isfinite(series.values[-16:, place]).any():
            return series, place
    return series, -1


@until_news
def classes_in(chart: Chart) -> set[str]:
    """Targets that are classes: of a few examples all may well be of one, and the number of a class is no size."""
    series = chart.table("batch", "label_entropy")
    return {series.names[place] for place in targets_of(series) if np.isfinite(series.opening[:, place]).any()}


@until_news
def guess_loss(chart: Chart) -> float:
    """Cross-entropy of who knows nothing but how frequent the classes are, in nats; NaN where labels are not logged.

    A small batch shows less than the entropy of its source, on average by (classes - 1) / (2 labels) (Miller 1955).
    """
    series, place = label_entropies(chart)
    if place < 0:
        return float("nan")
    known = series.values[-64:, place]
    found = overall_median(known[np.isfinite(known)])
    labels = chart.table("batch", "count").values[-64:, place]
    return found + (float(np.exp(found)) - 1) / (2 * max(known_median(labels), 1.0))


@until_news
def classes(chart: Chart) -> int:
    """How many outputs the last layer has; 0 where that is not known, or the labels are no classes of it."""
    _, place = label_entropies(chart)
    head = last_matrix(chart) if place >= 0 else None
    if head is None:
        return 0
    found, highest = chart.shape(head)[0], chart.table("batch", "max")
    if not np.nanmax(highest.opening[:, place], initial=-np.inf) < found:
        return 0
    return int(found)


@until_news
def last_matrix(chart: Chart) -> str | None:
    matrices = [name for name in chart.parameters if chart.is_matrix(name)]
    heads = [name for name in matrices if chart.part(name) == "output"] or matrices
    return heads[-1] if heads else None


@until_news
def target_power(chart: Chart, since: int | None = None, until: int | None = None) -> float:
    """The mean square of targets that are numbers: what a model that puts out zeros loses by it; in the opening, or in
    the batches from one step on, or before one. NaN if not known."""
    means, deviations = chart.table("batch", "mean"), chart.table("batch", "std")
    entropy = chart.table("batch", "label_entropy")
    for place in targets_of(means):
        if not np.isfinite(entropy.opening[:, place]).any():
            mean, std = (_part(one, since, until)[:, place] for one in (means, deviations))
            squares = mean**2 + std**2
            return known_median(squares[np.isfinite(squares)])
    return float("nan")


@until_news
def two_classes_share(chart: Chart) -> float:
    """Return the share of ones among targets that are 0 or 1 alone, as fractions; NaN where they are not.

    Of such numbers, and of no others between 0 and 1, the mean square is the mean.
    """
    means, deviations = chart.table("batch", "mean"), chart.table("batch", "std")
    low, high = chart.table("batch", "min"), chart.table("batch", "max")
    for place in targets_of(means):
        lowest, highest = low.opening[:, place].min(initial=np.inf), high.opening[:, place].max(initial=-np.inf)
        mean, std = means.opening[:, place].mean(), deviations.opening[:, place]
        square = float((means.opening[:, place] ** 2 + std**2).mean())
        if lowest == 0 and highest == 1 and abs(square - mean) < 1e-3:
            return float(mean)
    return float("nan")


def _part(series: Series, since: int | None, until: int | None) -> Floats:
    if since is not None:
        return series.since(since)[-24:]
    return series.opening if until is None else series.before(until, 24)


def labels_changed(chart: Chart, since: int) -> bool:
    """Other classes than before: another stage of a curriculum."""
    series, place = label_entropies(chart)
    if place < 0:
        return False
    before, after = series.before(since, 24)[:, place], series.since(since)[:24, place]
    before, after = before[np.isfinite(before)], after[np.isfinite(after)]
    return len(before) > 3 and len(after) > 3 and bool(abs(overall_median(after) - overall_median(before)) > 0.15)


def first_losses(chart: Chart, most: int = 3) -> Floats:
    """The finite ones among the first few of the run."""
    values = chart.opening("loss")[1][:most]
    found: Floats = values[np.isfinite(values)]
    return found


# One batch among others -------------------------------------------------------------------------------------------


class Columns:
    """The statistics of one tensor in an odd batch, and in the batches before it."""

    def __init__(self, chart: Chart, layer: str, step: int) -> None:
        self._seen = chart.table("batch", "mean").seen
        self._now: dict[str, np.float64] = {}  # as numpy's own, squares of large ones are infinite
        before: dict[str, Floats] = {}
        for name in ("count", "mean", "std", "abs_max", "min", "max"):
            series = chart.table("batch", name)
            place = series.names.index(layer)
            self._now[name] = np.float64(series.since(step)[0, place])
            before[name] = series.before(step, USUAL)[:, place]
        known = np.isfinite(before["mean"]) & (before["count"] > 0)
        self._before = {name: values[known] for name, values in before.items()}

    @property
    def is_sparse(self) -> bool:
        """Whether one value is nearly everywhere, such as the 0 of flags, counts, padding and black pixels.

        It is then the lowest or the highest of many batches, to the last digit, and of this one.
        """
        low, high = self._before["min"], self._before["max"]
        ends = np.stack([low, high])[:, high > low]
        mine = np.array([self._now["min"], self._now["max"]])
        return bool((ends[:, None] == mine[None, :, None]).sum(axis=2).max(initial=0) >= _TIES)

    def is_chance(self) -> bool:
        """Return whether a batch with so few, or so many, of the rare values is to be expected in a run of this length.

        Only for a batch within the range of the others: draws say nothing of values that never were.
        """
        if not self.is_sparse:
            return False
        low, high = self._before["min"].min(), self._before["max"].max()
        if not low <= self._now["min"] <= self._now["max"] <= high:
            return False
        by_mean = _chance_of_mean((self._now["mean"] - low) / (high - low), (self._before["mean"] - low) / (high - low))
        by_size = _chance_of_size(self._now["std"] ** 2, self._before["std"] ** 2)
        return max(by_mean, by_size) * self._seen > _ACCIDENT

    def rest(self) -> float:
        """Return the spread of all but the value that lies farthest from 0, in units of the usual spread.

        Of a sparse tensor a few values may be far out together: the mean, which they move less, has to follow.
        """
        count, mean, std = self._now["count"], self._now["mean"], self._now["std"]
        usual = self._before["std"][self._before["std"] > 0]
        if not count > 2 or not len(usual):
            return 1.0
        top = self._now["max"] if self._now["max"] == self._now["abs_max"] else self._now["min"]
        rest = (count * mean - top) / (count - 1)
        square = (count * (std**2 + mean**2) - top**2) / (count - 1) - rest**2
        found = float(np.sqrt(max(square, np.float64(0.0))) / overall_median(usual))
        if self.is_sparse:
            mean_times = float(abs(mean) / overall_median(np.abs(self._before["mean"])))
            found = min(found, mean_times, key=lambda times: abs(float(logs(np.array(times)))))
        return found if np.isfinite(found) else 1.0


def _chance_of_mean(share: float, usual: Floats) -> float:
    """Return at most how likely a mean so far out is, for numbers between 0 and 1 (Chernoff's bound).

    `usual` are means of batches. How far they lie apart tells how many independent draws there are in a batch: pixels
    of one object come together.
    """
    mean, apart = float(usual.mean()), float(usual.var(ddof=1))
    if not 0 < mean < 1 or not apart > 0:
        return 0.0
    draws = mean * (1 - mean) / apart
    parts = ((share, mean), (1 - share, 1 - mean))
    return float(np.exp(-draws * sum(now * np.log(now / was) for now, was in parts if now > 0)))


def _chance_of_size(size: float, usual: Floats) -> float:
    """Return at most how likely a sum of rare events so far out is (Chernoff's bound for Poisson's distribution).

    `usual` are such sums. Their mean over their spread, squared, is at most the expected number of events.
    """
    mean, apart = float(usual.mean()), float(usual.var(ddof=1))
    if not mean > 0 or not apart > 0:
        return 0.0
    times = size / mean
    return float(np.exp(-(mean**2 / apart) * (times * np.log(times) - times + 1 if times > 0 else 1.0)))
