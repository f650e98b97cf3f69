"""Steps and gradient norms as torch itself shows them: global hooks of torch, float64, nothing of Holter.

A training step is all that is stepped between two training forwards; an optimizer that steps again begins a new one.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

Squares = dict[int, float]  # by the parameter's id


class Track:
    """Training steps of one watched model: what `norms` and `clipped` are by step."""

    def __init__(self, model: nn.Module | None, optimizers: Iterable[Any] | None) -> None:
        self._model, self._optimizers = model, None if optimizers is None else list(optimizers)
        self._stepped: set[int] = set()  # the optimizers of the step at hand
        self._squares: list[tuple[Squares, Squares]] = []  # of each step: before any clip, and as the optimizer has it
        self._is_forward_new = True

    @property
    def steps(self) -> int:
        return len(self._squares)

    @property
    def norms(self) -> list[float]:
        """By step, before any clip."""
        return [sum(before.values()) ** 0.5 for before, _ in self._squares]

    @property
    def clipped(self) -> list[float]:
        """By step, as the optimizer had them."""
        return [sum(after.values()) ** 0.5 for _, after in self._squares]

    def saw_forward(self) -> None:
        self._is_forward_new = True

    def concerns(self, optimizer: Any) -> bool:
        """A wrapper that steps another optimizer shares its groups."""
        groups = getattr(optimizer, "param_groups", None)
        return self._optimizers is None or any(
            one is optimizer or (groups is not None and getattr(one, "param_groups", None) is groups)
            for one in self._optimizers
        )

    def begin(self, optimizer: Any) -> None:
        if self._is_forward_new or id(optimizer) in self._stepped:
            self._squares.append(({}, {}))
            self._stepped.clear()
        self._is_forward_new = False
        self._stepped.add(id(optimizer))

    def end(self) -> None:
        """A forward inside of the step (a closure) was part of it."""
        self._is_forward_new = False

    def read(self, optimizer: Any, before_clip: Squares) -> None:
        mine = None if self._model is None else {id(one) for one in self._model.parameters()}
        found = {key: square for key, square in _squares(_held(optimizer, self._model)) if mine is None or key in mine}
        before, after = self._squares[-1]
        before.update({key: before_clip.get(key, square) for key, square in found.items()})
        after.update(found)


class Reference:
    """Listens to every optimizer of the process. `measures` is False in the watched run, where only time is taken."""

    def __init__(self, measures: bool) -> None:
        self._measures = measures
        self._tracks: list[Track] = []
        self._before_clip: Squares = {}
        self._first: float | None = None  # the end of the first step, by the clock
        self._last = 0.0
        self._own = 0.0  # seconds that were taken by this very class since the first step
        # Optimizers whose step runs. One that calls its parent's step, or that of one it wraps, has hooks twice.
        self._inside: list[Any] = []
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        if measures:
            self._hooks.append(register_module_forward_pre_hook(self._see_forward))
            for home in (torch.nn.utils, torch.nn.utils.clip_grad):
                setattr(home, "clip_grad_norm_", self._seen_clip(home.clip_grad_norm_))  # noqa: B010  # mypy: it is not declared

    @property
    def seconds(self) -> float:
        """From the end of the first step to the end of the last, without what was spent here."""
        return self._last - self._first - self._own if self._first is not None else 0.0

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def follow(self, model: nn.Module | None, optimizer: Any) -> Track:
        """Return a new track, of these optimizers, or of all in the process where None or none of torch's is given."""
        given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        foreign = [one for one in given if not isinstance(one, Optimizer)]
        track = Track(model, None if foreign else given)
        self._tracks.append(track)
        self._first = None  # steps before the first watch are no part of what is compared
        for one in foreign:
            if callable(getattr(one, "step", None)):
                self._listen_to(one)
        return track

    def _listen_to(self, foreign: Any) -> None:
        """An optimizer that is not torch's has no hooks: its `step` is wrapped."""
        inner = foreign.step

        @functools.wraps(inner)
        def step(*args: Any, **kwargs: Any) -> Any:
            self._before_step(foreign, args, kwargs)
            result = inner(*args, **kwargs)
            self._after_step(foreign, args, kwargs)
            return result

        foreign.step = step

    def _seen_clip(self, inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(inner)
        def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Tensor:
            held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            started = time.perf_counter()
            self._before_clip.update({key: x for key, x in _squares(held) if key not in self._before_clip})
            self._own += time.perf_counter() - started
            return inner(held, *args, **kwargs)

        return clip_grad_norm_

    def _see_forward(self, module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            for track in self._tracks:
                track.saw_forward()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        tracks = self._concerned(optimizer)
        self._inside.append(optimizer)
        if self._measures:
            started = time.perf_counter()
            for track in tracks:
                track.begin(optimizer)
                if not _has_closure(args, kwargs):
                    track.read(optimizer, self._before_clip)
            self._own += time.perf_counter() - started

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._inside.pop()
        tracks = self._concerned(optimizer)
        if self._measures:
            started = time.perf_counter()
            for track in tracks:
                if _has_closure(args, kwargs):  # which computes the gradients inside the step
                    track.read(optimizer, self._before_clip)
                track.end()
            if not self._inside:
                self._before_clip.clear()
            self._own += time.perf_counter() - started
        if self._inside:
            return
        self._last = time.perf_counter()
        if self._first is None:
            self._first, self._own = self._last, 0.0

    def _concerned(self, optimizer: Any) -> list[Track]:
        """Return the tracks that it concerns, but for those in whose step it is called."""
        concerned = [track for track in self._tracks if track.concerns(optimizer)]
        return [track for track in concerned if not any(map(track.concerns, self._inside))]


def _has_closure(args: Any, kwargs: Any) -> bool:
    """`args` begin with the optimizer where torch's own hooks pass them."""
    given = [one for one in args if not isinstance(one, Optimizer)]
    return kwargs.get("closure") is not None or (bool(given) and callable(given[0]))


def _held(optimizer: Any, model: nn.Module | None) -> Iterable[Tensor]:
    if isinstance(optimizer, Optimizer):
        return [one for group in optimizer.param_groups for one in group["params"]]
    return model.parameters() if model is not None else ()


@torch.no_grad()
def _squares(parameters: Iterable[Tensor]) -> list[tuple[int, float]]:
    found = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            values = gradient.coalesce().values() if gradient.is_sparse else gradient.detach()
            found.append((id(parameter), float(values.abs().double().square().sum())))
    return found
