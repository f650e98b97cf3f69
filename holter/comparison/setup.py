"""How two trainings were set up differently: what run.json says of them, and the settings that were recorded. Pure.

What was measured and how often is no difference of the training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holter.comparison.series import differing
from holter.comparison.tracks import Track, meet
from holter.series import Floats, Integers
from holter.words import number

_FACTS = ("model", "parameters", "optimizers", "scheduler", "total_steps")
_OF_A_LAYER = ("shape", "dtype", "trained", "module")
# Settings that are recorded at every step; those of further groups of parameters have a number behind them.
SETTINGS = ("learning_rate", "weight_decay", "clip_max_norm", "loss_scale", "batch/size")
Line = tuple[Integers, Floats]  # steps and values
_NAMED = 6  # layers of each kind of difference that are told


@dataclass(frozen=True)
class Difference:
    """One thing that was set up differently; `since` is the first step at which it was, where it was recorded."""

    what: str
    reference: str
    other: str
    since: int | None = None
    layers: tuple[str, ...] = ()  # all of them, of a difference of layers


def setup_differences(
    infos: tuple[Mapping[str, Any], Mapping[str, Any]], tracks: tuple[Track, Track]
) -> tuple[Difference, ...]:
    """The reference first; what is not known of one of them is no difference."""
    return (*_facts(*infos), *_versions(*infos), *_layers(*infos), *_settings(*tracks), *_batches(*tracks))


def is_setting(scalar: str) -> bool:
    return scalar.startswith(SETTINGS)


def _facts(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Difference]:
    for name in _FACTS:
        if name in ours and name in theirs and ours[name] != theirs[name]:
            yield Difference(name.replace("_", " "), _told(ours[name]), _told(theirs[name]))


def _told(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(_told, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _versions(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Difference]:
    left, right = (found if isinstance(found := info.get("versions"), dict) else {} for info in (ours, theirs))
    for name in left:
        if name in right and left[name] != right[name]:
            yield Difference(f"version of {name}", _told(left[name]), _told(right[name]))


def _layers(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Difference]:
    left, right = _by_name(ours), _by_name(theirs)
    if not (left and right):
        return
    removed, added = ([name for name in one if name not in other] for one, other in ((left, right), (right, left)))
    if removed:
        yield Difference("layers removed", _names(removed), "–", layers=tuple(removed))
    if added:
        yield Difference("layers added", "–", _names(added), layers=tuple(added))
    for part in _OF_A_LAYER:
        pairs = {name: (left[name].get(part), right[name].get(part)) for name in left if name in right}
        changed = {name: pair for name, pair in pairs.items() if None not in pair and pair[0] != pair[1]}
        if changed:
            was, now = ({name: _part(pair[side]) for name, pair in changed.items()} for side in (0, 1))
            yield Difference(f"{part} of layers", _values(was), _values(now), layers=tuple(changed))


def _by_name(info: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    layers = info.get("layers")
    known = [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
    return {name: layer for layer in known if isinstance(name := layer.get("name"), str)}


def _part(value: object) -> str:
    return "×".join(map(str, value)) if isinstance(value, list) else str(value)


def _names(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest:,} more" if rest > 0 else "")


def _values(by_name: Mapping[str, str]) -> str:
    """Alike in all of them, or each by its name."""
    if len(set(by_name.values())) == 1 and len(by_name) > 1:
        return f"{next(iter(by_name.values()))} in {len(by_name):,} layers"
    return _names([f"{name} {value}" for name, value in by_name.items()])


def _settings(ours: Track, theirs: Track) -> Iterator[Difference]:
    names = filter(is_setting, dict.fromkeys((*ours.scalars, *theirs.scalars)))
    for name in sorted(names, key=lambda name: (SETTINGS.index(_kind(name)), len(name), name)):
        left, right = ours.scalar(name), theirs.scalar(name)
        if len(left[0]) and len(right[0]):
            yield from _setting(name, left, right, meet(ours, theirs, left[0], right[0]))
        elif len(ours) and len(theirs) and name != "batch/size":  # how large batches are is known where they are logged
            told = [number(float(np.median(values))) if len(values) else "not recorded" for _, values in (left, right)]
            yield Difference(name.replace("_", " "), told[0], told[1])


def _kind(scalar: str) -> str:
    return next(kind for kind in SETTINGS if scalar.startswith(kind))


def _setting(name: str, ours: Line, theirs: Line, met: tuple[Integers, Integers]) -> Iterator[Difference]:
    """Nothing where it was the same at all steps that both have."""
    left, right = met
    places = np.flatnonzero(differing(ours[1][left], theirs[1][right]))
    if len(places):
        was, now = left[places[0]], right[places[0]]
        values = _course(ours[1], int(was)), _course(theirs[1], int(now))
        yield Difference(name.replace("_", " "), values[0], values[1], since=int(ours[0][was]))


def _course(values: Floats, place: int) -> str:
    """The value there, and how far it went if that was not all."""
    there, whole = number(float(values[place])), values[np.isfinite(values)]
    if len(whole) and whole.min() < whole.max():
        return f"{there} (over the run {number(float(whole.min()))} to {number(float(whole.max()))})"
    return there


def _batches(ours: Track, theirs: Track) -> Iterator[Difference]:
    """Whether they were trained on the same batches in the same order, by the hashes of what was logged."""
    (our_steps, our_hashes), (their_steps, their_hashes) = _hashes(ours), _hashes(theirs)
    left, right = meet(ours, theirs, our_steps, their_steps)
    places = np.flatnonzero(differing(our_hashes[left], their_hashes[right]))
    if len(places):
        many = f"different at {len(places):,} of {len(left):,} steps"
        yield Difference("batches", "–", many, since=int(our_steps[left[places[0]]]))


def _hashes(track: Track) -> Line:
    """Of the first tensor of the inputs that has one."""
    if "hash" not in track.reading.statistics("batch"):
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    steps, layers, values = track.series("batch", "hash")
    known = [place for place in range(len(layers)) if np.isfinite(values[:, place]).any()]
    if not known:
        return steps[:0], values[:0, 0]
    first = min(known, key=lambda place: not layers[place].startswith("inputs"))
    usable = np.isfinite(values[:, first])
    return steps[usable], values[usable, first]
