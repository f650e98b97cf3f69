"""What a user asked for, checked before training starts: every refusal names the way out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from holter.alerts import Alert, Alerts
from holter.diagnosis.finding import SEVERITIES
from holter.modules import parameters_in
from holter.optimizers import optimizers_in
from holter.run import create_directory
from holter.selection import Asked, Selection
from holter.sinks import Sink, naming

HISTOGRAMS = ("gradient", "weight", "momentum", "second_moment", "activation", "batch")  # roles that have them
_HISTOGRAM_PACE = 100  # of a role that was given none
_DIAGNOSIS = 0.18  # the part of the budget that is the live diagnosis's
_MUCH = 0.05  # the budget that it goes by where there is none


@dataclass(frozen=True)
class Settings:
    """Cadences in steps (None: never) and the share of time that monitoring may take (None: no limit)."""

    every: int = 1
    weights: int | None = 100
    updates: int | None = 10
    optimizer_state: int | None = 10
    activations: int | None = 100
    histograms: int | Mapping[str, int | None] | None = 100  # of all roles, or of each
    budget: float | None = 0.01
    total_steps: int | None = None
    layers: Asked | None = None  # None: all
    stages: bool = True
    machine: bool = True
    diagnose: bool = True
    stop_on: str | None = None  # a severity
    patience: int | None = None  # steps; None: that of the thresholds

    def __post_init__(self) -> None:
        self._check_histograms()
        self._check_diagnosis()
        for name in ("stages", "machine", "diagnose"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: give True or False")
        for name in ("every", "weights", "updates", "activations", "optimizer_state", "total_steps", "patience"):
            value = getattr(self, name)
            if value is None and name != "every":
                continue
            _check_pace(name, value, "" if name == "every" else ", or None")
        is_share = isinstance(self.budget, int | float) and not isinstance(self.budget, bool) and 0 <= self.budget <= 1
        if self.budget is not None and not is_share:
            raise ValueError(
                f"budget={self.budget!r} is the share of the training time that monitoring may take: "
                "give a number from 0 (scalars only) to 1, such as 0.01, or None for no limit"
            )

    def histogram_pace(self, kind: str) -> int | None:
        """Of a kind that begins with its role: "gradient", or "batch inputs"."""
        if not isinstance(self.histograms, Mapping):
            return self.histograms
        return self.histograms.get(kind.partition(" ")[0], _HISTOGRAM_PACE)

    @property
    def measuring_share(self) -> float | None:
        """Of the training time, that all else may take."""
        return self.budget if self.budget is None or not self.diagnose else (1 - _DIAGNOSIS) * self.budget

    @property
    def diagnosis_share(self) -> float:
        """Of the training time, that the live diagnosis may take. It has a limit in any case: without one it would keep
        the interpreter from the training and from the writer."""
        share = _MUCH if self.budget is None else self.budget
        # Who wants to be stopped wants it in time.
        return share if self.stop_on is not None else _DIAGNOSIS * share

    def _check_diagnosis(self) -> None:
        if self.stop_on is not None and self.stop_on not in SEVERITIES[1:]:
            severities = " or ".join(map(repr, SEVERITIES[1:]))
            raise ValueError(f"stop_on={self.stop_on!r}: give {severities}, or None to stop at nothing")
        if self.stop_on is not None and self.budget == 0:
            raise ValueError(f"stop_on={self.stop_on!r} needs the live diagnosis: budget=0 leaves no time for it")
        for name in ("stop_on", "patience"):
            value = getattr(self, name)
            if value is not None and self.diagnose is False:
                raise ValueError(f"{name}={value!r} needs the live diagnosis: leave out diagnose=False, or {name}")

    def _check_histograms(self) -> None:
        if not isinstance(self.histograms, Mapping):
            paces: dict[Any, Any] = {"histograms": self.histograms}
        else:
            paces = {f"histograms[{role!r}]": pace for role, pace in self.histograms.items()}
            for role in self.histograms:
                if role not in HISTOGRAMS:
                    roles = ", ".join(map(repr, HISTOGRAMS))
                    raise ValueError(f"histograms: there is no role {role!r} that has them; give a pace to {roles}")
        for name, pace in paces.items():
            if pace is not None:
                _check_pace(name, pace, ", or None")


def _check_pace(name: str, value: Any, otherwise: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: give a whole number of steps, at least 1{otherwise}")


def check_training(model: nn.Module, optimizer: Any, scaler: Any | None) -> list[Any]:
    """The optimizers as a list, torch's own or imitations of them, if this model can be watched with them."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"watch() needs the torch.nn.Module that is trained, got {type(model).__name__}")
    if next(parameters_in(model), None) is None:
        raise ValueError(
            f"{type(model).__name__} has no parameters: there is nothing to watch. "
            "Build its layers (run lazy ones once) before calling watch()"
        )
    optimizers = optimizers_in(optimizer, model)
    if scaler is not None and not all(callable(getattr(scaler, name, None)) for name in ("scale", "step", "update")):
        raise ValueError(f"scaler={scaler!r} has no scale(), step() and update(): pass the torch.amp.GradScaler")
    return optimizers


def check_layers(asked: Asked | None, model: nn.Module) -> Selection | None:
    """The selection that was asked for, if this model has it."""
    if asked is None:
        return None
    selection = Selection(asked)
    selection.check(model)
    return selection


def check_sinks(sinks: Sequence[Sink | str]) -> Sequence[Sink | str]:
    if isinstance(sinks, str) or not isinstance(sinks, Sequence):
        raise ValueError(f'sinks={sinks!r}: give a list of sinks or their names, such as ["tensorboard"]')
    for sink in sinks:
        if isinstance(sink, str):
            naming.check(sink)
        elif isinstance(sink, type):
            raise ValueError(f"{sink.__name__} is a class: give one of it, {sink.__name__}(...)")
        elif not isinstance(sink, Sink):
            raise ValueError(f"{type(sink).__name__} is not a sink: it needs write(record), alert(finding) and close()")
    given = [id(sink) for sink in sinks if not isinstance(sink, str)]
    if len(set(given)) < len(given):
        raise ValueError("one sink is given twice: it would get everything twice, from two threads")
    return sinks


def make_sinks(sinks: Sequence[Sink | str], directory: Path | None) -> list[Sink]:
    """Those that were named are made; files of theirs go to the directory of the run."""
    return [naming.make(one, directory or Path("runs")) if isinstance(one, str) else one for one in sinks]


def make_alerts(alerts: Sequence[str | Alert], settings: Settings) -> list[Sink]:
    """The sink that sends them, where they are asked for."""
    if not isinstance(alerts, str) and isinstance(alerts, Sequence) and not alerts:
        return []
    if not settings.diagnose or settings.budget == 0:
        raise ValueError("alerts need the live diagnosis: leave out alerts, or diagnose=False and budget=0")
    return [Alerts(alerts)]


def make_directory(run: str | os.PathLike[str] | bool | None, rank: int) -> Path | None:
    """The directory of the run, created; None where nothing is to be stored."""
    if run is False:
        return None
    if run is True:
        run = None
    if run is None and rank > 0:
        raise ValueError("several processes must agree on one run: pass watch(..., run='runs/<name>') on every rank")
    if run is not None and (not isinstance(run, str | os.PathLike) or not str(run)):
        raise ValueError(f"run={run!r}: give a directory, None for runs/<date-time-word>, or False for none")
    try:
        return create_directory(run)
    except OSError as error:
        raise cannot_write(run, error) from error


def cannot_write(place: object, error: OSError) -> ValueError:
    return ValueError(
        f"cannot write the run to {error.filename or place}: {error.strerror}. Pass run='a/directory/you/may/write', "
        "or run=False to keep it in memory"
    )
