"""What a callback passes on to `holter.watch`, checked before there is a model: a training that has been queued for
hours must not end with a misspelled option."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from holter.selection import Selection
from holter.settings import Settings, check_sinks, make_alerts
from holter.watching import watch

_SETTINGS = {setting.name for setting in fields(Settings)}


def check_options(options: Mapping[str, Any], stop: bool, trainers_own: Collection[str]) -> None:
    """`stop` is the callback's own; `trainers_own` are options that the trainer knows."""
    if not isinstance(stop, bool):
        raise ValueError(f"stop={stop!r}: give True or False")
    known = [name for name in inspect.signature(watch).parameters if name not in trainers_own]
    for name in options:
        if name in trainers_own:
            raise ValueError(f"{name}= is known from the trainer: leave it out")
        if name not in known:
            raise ValueError(f"holter.watch has no option {name!r}; it has {', '.join(known)}")
    settings = Settings(**{name: value for name, value in options.items() if name in _SETTINGS})
    if stop and (not settings.diagnose or settings.budget == 0):
        raise ValueError("stop=True needs the live diagnosis: leave out diagnose=False and budget=0, or stop")
    if settings.layers is not None:
        Selection(settings.layers)
    check_sinks(options.get("sinks", ()))
    make_alerts(options.get("alerts", ()), settings)
