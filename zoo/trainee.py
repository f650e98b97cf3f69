"""Trainee: what a training of the zoo is given. It attaches Holter in the watched run and nothing in the bare one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zoo.reference import Reference, Track

if TYPE_CHECKING:
    from holter.monitor import Monitor
    from holter.sinks.memory import Memory

# Where each framework's do-nothing callback lives.
_PLAIN = {"transformers": ("transformers", "TrainerCallback"), "lightning": ("lightning.pytorch", "Callback")}


class Trainee:
    """`fault` is the name of the fault to plant, or None; `directory` is empty, for what a package wants to write."""

    def __init__(self, directory: Path, reference: Reference, fault: str | None, is_watched: bool) -> None:
        self.directory, self.fault = directory, fault
        self._reference, self._is_watched = reference, is_watched
        self.watches: list[Watch] = []

    def watch(self, model: nn.Module, optimizer: Any, **options: Any) -> Any:
        """Return `holter.watch(...)`, or a stand-in that does nothing."""
        track = self._reference.follow(model, optimizer)
        if not self._is_watched:
            self.watches.append(Watch(track))
            return Bare()
        import holter

        monitor = holter.watch(model, optimizer, **self._options(track, "watch()"), **options)
        self.watches[-1].monitor_of = lambda: monitor
        return monitor

    def watch_accelerator(self, accelerator: Any, model: nn.Module, optimizer: Any, **options: Any) -> Any:
        """Return the monitor of Holter's integration of Accelerate, or a stand-in."""
        track = self._reference.follow(model, None)
        if not self._is_watched:
            self.watches.append(Watch(track))
            return Bare()
        watch = import_module("holter.integrations.accelerate").watch
        monitor = watch(accelerator, model, optimizer, **self._options(track, "accelerate.watch()"), **options)
        self.watches[-1].monitor_of = lambda: monitor
        return monitor

    def callback(self, framework: str, **options: Any) -> Any:
        """Return Holter's callback for "transformers" or "lightning", or the framework's own, which does nothing."""
        track = self._reference.follow(None, None)
        if not self._is_watched:
            self.watches.append(Watch(track))
            module, name = _PLAIN[framework]
            return getattr(import_module(module), name)()
        integration = import_module(f"holter.integrations.{framework}")
        callback = integration.HolterCallback(**self._options(track, f"{framework} callback"), **options)
        self.watches[-1].monitor_of = lambda: callback.monitor
        return callback

    def _options(self, track: Track, by: str) -> dict[str, Any]:
        from holter.sinks.memory import Memory

        told = Memory()
        watch = Watch(track, self.directory / f"run-{len(self.watches)}", told, by)
        self.watches.append(watch)
        return {"run": str(watch.run), "sinks": [told]}


class Watch:
    """One attachment: its track of the reference and, in the watched run, its run, what that told, how it was made and
    its monitor."""

    def __init__(self, track: Track, run: Path | None = None, told: Memory | None = None, by: str = "") -> None:
        self.track, self.run, self.told, self.by = track, run, told, by
        self.monitor_of: Callable[[], Monitor | None] = lambda: None


class Bare:
    """Stands in for a Monitor and does nothing."""

    should_stop = False
    findings = ()

    def log(self, **values: Any) -> None: ...

    def close(self) -> None: ...

    def batches(self, loader: Iterable[Any], **options: Any) -> Iterable[Any]:
        return loader

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...

    def __enter__(self) -> Bare:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def modules_of(returned: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Raise TypeError where a training returned anything but what it trained."""
    found = [returned] if isinstance(returned, nn.Module) else list(returned)
    if not found or not all(isinstance(one, torch.nn.Module) for one in found):
        raise TypeError(f"run() must return the trained module or modules, not {returned!r}")
    return found
