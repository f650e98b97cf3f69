"""Hooks: when a training step begins, is taken or skipped, and which tensors it concerns. No arithmetic.

Gradients are read where the optimizer takes them, by torch's global step hooks, so that an optimizer that replaces
the watched one is seen at its first step. The model carries a hook before and one after its forward; everything is
gone after `detach`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from holter.clipping import Clip, Stand
from holter.compiled_calls import Called, CompiledCalls
from holter.hooks import ModuleHook
from holter.imitations import Imitation, WatchedStep
from holter.listener import Listener
from holter.loss_scaler import WatchedScaler
from holter.modules import modules_in, named_parameters, parameters_in, parts_of
from holter.optimizers import imitation_of, is_same, trainers_in
from holter.problems import Problems
from holter.replays import Replays, is_captured
from holter.selection import Selected, Selection
from holter.step_calls import has_closure, step_frame

Hook = Callable[[Optimizer, Sequence[Any], dict[str, Any]], None]
_logger = logging.getLogger("holter")
# Optimizers that a live monitor was told to watch. Another monitor of the same model leaves them alone.
_claimed: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
# Captures whose model was garbage-collected. That may happen while torch walks its hooks, so theirs are taken away
# later: with the next attach or detach.
_abandoned: list[Capture] = []
# Captures that are told of every optimizer's steps, by one pair of torch's global hooks. torch walks its hooks while
# they run: a pair that came or went with each capture would make a step raise that another thread takes meanwhile.
_listening: list[Capture] = []
_step_hooks: list[RemovableHandle | Stand] = []
_changing = threading.RLock()  # the garbage collector may run while it is held, and close another monitor
_untraced: Callable[[Hook], Hook] = torch._compile._disable_dynamo  # unlike torch.compiler.disable it loads nothing now


def warn_of_other_monitors(optimizers: Iterable[Optimizer]) -> None:
    """Where a live monitor was told to watch one of these optimizers already."""
    if any(_claimed.get(optimizer) for optimizer in optimizers):
        _logger.warning("this optimizer is watched already, by a monitor that goes on too: close() that one to end it")


class Layers:
    """The parameters of a model under its author's names, found anew whenever its structure has changed."""

    def __init__(self, model: nn.Module, selection: Selection | None = None, problems: Problems | None = None) -> None:
        self._model = weakref.ref(model)
        self._selection, self._problems = selection, problems
        self._structure: list[object] = []
        self._names: dict[int, str] = {}
        self._places: dict[int, int] = {}
        self._others: set[int] = set()  # ids of parameters that were asked for, and are not the model's
        self._selected: Selected | None = None  # None where all are
        self.left_out: frozenset[int] = frozenset()  # ids of parameters that are not selected
        self.changes = 0  # how often other names were found
        self._is_current = False  # whether the model was walked through since it may have changed

    def is_on_cuda(self) -> bool:
        """Whether the model's first parameter is, without a walk."""
        model = self._model()
        first = next(parameters_in(model), None) if model is not None else None
        return first is not None and first.is_cuda

    def current(self) -> tuple[list[str], list[nn.Parameter]]:
        """Names and parameters that are to be measured, in torch's order, each parameter once; empty when the model
        is gone."""
        names, parameters = self.everything()
        if not self.left_out:
            return names, parameters
        kept = [id(parameter) not in self.left_out for parameter in parameters]
        return list(compress(names, kept)), list(compress(parameters, kept))

    def everything(self) -> tuple[list[str], list[nn.Parameter]]:
        """Names and parameters, also of those that are not to be measured."""
        model = self._model()
        if model is None:
            return [], []
        self._is_current = True
        structure, parameters = _walk(model)
        if structure != self._structure:
            self._look_again(model)
            self._structure = structure
        return [self._names[id(parameter)] for parameter in parameters], parameters

    def among(self, parameters: Iterable[Tensor]) -> tuple[list[str], list[Tensor]]:
        """Names and parameters of those of these that are to be measured, in torch's order. It takes one walk through
        the model at most until `may_have_changed`, unless one of them is new."""
        asked = {id(parameter): parameter for parameter in parameters}
        others = asked.keys() - self._names.keys()
        if not self._is_current or others - self._others:
            self.everything()
            self._others |= asked.keys() - self._names.keys()
        found = sorted((asked.keys() & self._names.keys()) - self.left_out, key=self._places.__getitem__)
        return [self._names[one] for one in found], [asked[one] for one in found]

    def may_have_changed(self) -> None:
        """A training step begins: parameters known until now may have other names, as after `del model[0]`."""
        self._is_current = False

    def knows(self, parameters: Iterable[Tensor]) -> bool:
        """Whether one of these is a parameter of the model, as it was when last looked at."""
        return not self._names.keys().isdisjoint(map(id, parameters))

    def known(self, parameters: set[int]) -> set[int]:
        """Those of these ids that are of parameters of the model, as it was when last looked at."""
        return parameters & self._names.keys()

    def has_module(self, module: nn.Module) -> bool:
        """Whether what this module puts out is to be measured."""
        return self._selected is None or id(module) in self._selected.modules

    def _look_again(self, model: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in named_parameters(model)}
        self.changes += list(names.values()) != list(self._names.values())
        self._names, self._others = names, set()
        self._places = {parameter: place for place, parameter in enumerate(names)}
        if self._selection is not None:
            self._selected = self._selection.of(model, self._failed)
            self.left_out = frozenset(names) - self._selected.parameters

    def _failed(self, name: str, error: Exception) -> None:
        if self._problems is not None:
            self._problems.add("ask the function given as layers= about a layer, which is not measured", error)


def _walk(model: nn.Module) -> tuple[list[object], list[nn.Parameter]]:
    """What identifies the structure of a model, and its parameters. Several times quicker than asking for names."""
    structure: list[object] = []
    parameters: dict[int, nn.Parameter] = {}
    for module in modules_in(model):
        structure.append(id(module))
        for parameter in module._parameters.values():
            if parameter is not None:
                parameters.setdefault(id(parameter), parameter)
        structure.extend(module._parameters.keys())  # a scripted module cannot be iterated over otherwise
        structure.extend(module._modules.keys())
    structure.extend(parameters)
    return structure, list(parameters.values())


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def held_by(optimizer: Optimizer) -> set[int]:
    """The ids of the parameters that an optimizer holds."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


class Capture:
    """Attached to one model and its optimizers. Holds neither: both can be garbage-collected."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        scaler: Any | None,
        listener: Listener,
        problems: Problems,
        sees_ends: bool = True,
    ) -> None:
        """`sees_ends`: whether the listener wants to be told of the ends of forwards."""
        _remove_abandoned()
        self._model = weakref.ref(model)
        self._listener, self._problems = listener, problems
        self._steps: list[tuple[int, int]] = []  # being taken: the optimizer's id, and the frame that called its hook
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._claims: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._stand_ins: list[WatchedStep] = []
        for optimizer in optimizers:
            self._claim(optimizer)
        self._compiled_calls = CompiledCalls(model, self._compiled_forward, listener.forward_ended, problems)
        self._saw_forward = False  # since the last step
        self._replays = Replays(listener)
        self._handles: list[RemovableHandle] = []
        self._on_parts: list[RemovableHandle] = []
        self._see_forwards(model, sees_ends)
        self._scaler = WatchedScaler.attach(scaler, self.skipped) if scaler is not None else None
        _listen(self)

    def _see_forwards(self, model: nn.Module, sees_ends: bool) -> None:
        if self._compiled_calls.stand_before:
            return
        with contextlib.suppress(RuntimeError):  # a scripted module takes no hooks: its forwards are not observed
            began, ended = (ModuleHook(self, "see a forward", Capture._forward, is_end) for is_end in (False, True))
            self._handles.append(model.register_forward_pre_hook(began, with_kwargs=True))
            if sees_ends:
                self._handles.append(model.register_forward_hook(ended))

    def _claim(self, optimizer: Any) -> None:
        self._optimizers[optimizer] = True
        self._claims.add(optimizer)
        _claimed[optimizer] = _claimed.get(optimizer, 0) + 1
        if isinstance(optimizer, Imitation):
            adopt = weakref.WeakMethod(self._adopt)
            self._stand_ins.append(WatchedStep(optimizer, _before_any_step, _after_any_step, adopt))

    def _adopt(self, optimizer: Any) -> None:
        """Watch another optimizer of a watched class, if it trains the model: it may take the place of the first."""
        with self._problems.contained("see another optimizer"):
            model = self._model()
            imitation = imitation_of(optimizer, model) if model is not None else None
            if imitation is not None:
                self._claim(imitation)
                # Only now: without any, the stand-in for `step` would go too, and nobody would see the next optimizer.
                for gone in [one for one in self._stand_ins if one.imitation.optimizer() is None]:
                    self._stand_ins.remove(gone)
                    gone.detach()

    def detach(self) -> None:
        """Leaves no trace; a second call does nothing."""
        self._remove_hooks()
        _remove_abandoned()
        for optimizer in self._claims:
            _claimed[optimizer] = _claimed.get(optimizer, 1) - 1
        self._claims.clear()
        if self._scaler is not None:
            self._scaler.detach()
            self._scaler = None

    def gradients_are_scaled(self) -> bool:
        """Whether a loss scaler is at work that has not been told to unscale the gradients of this step yet."""
        return self._scaler is not None and not self._scaler.has_unscaled(self._claims)

    def await_forward(self, is_wanted: bool) -> None:
        """Report the next training forward of a part of the model: loops that train several parts in turn may never
        call the whole of it. The hooks are there only until then, and all else runs the model untouched."""
        model = self._model()
        if not is_wanted or self._compiled_calls.are_found:  # a hook would make it compile again
            self._await_no_forward()
        elif model is not None and not self._on_parts:
            hook = ModuleHook(self, "see a forward of a part", Capture._part_forward)
            for part in parts_of(model):
                with contextlib.suppress(RuntimeError):  # a scripted module takes no hooks
                    self._on_parts.append(part.register_forward_pre_hook(hook))

    def _await_no_forward(self) -> None:
        for handle in self._on_parts:
            handle.remove()
        self._on_parts.clear()

    def abandon(self) -> None:
        """Like detach, when the model is gone; called by the garbage collector, at any moment."""
        _abandoned.append(self)

    def _remove_hooks(self) -> None:
        _listen_no_more(self)
        self._replays.detach()
        self._compiled_calls.remove()
        self._remove_forward_hooks()
        for stand_in in self._stand_ins:
            stand_in.detach()
        self._stand_ins.clear()
        self._await_no_forward()

    def _search_compiled(self) -> None:
        self._compiled_calls.search()
        if self._compiled_calls.stand_before:
            self._remove_forward_hooks()

    def _remove_forward_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # The hooks. Whatever fails in them stays in them.

    def _forward(self, is_end: bool, model: nn.Module, *what: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._await_no_forward()
            self._saw_forward = True
            self._listener.forward_ended() if is_end else self._listener.training_forward(Called(*what))

    def _compiled_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._await_no_forward()
        self._saw_forward = True
        self._listener.training_forward(Called(args, kwargs, is_compiled=True))

    def _part_forward(self, part: nn.Module, *what: Any) -> None:
        # Within a step it is that of a closure, within a backward one of activation checkpointing.
        if part.training and torch.is_grad_enabled() and not self._steps and torch._C._current_graph_task_id() == -1:
            self._await_no_forward()
            self._listener.part_forward()

    def skipped(self, optimizer: Optimizer) -> None:
        with self._problems.contained("see a skipped step"):
            model = self._model()
            for one in trainers_in(optimizer, model) if model is not None else ():  # it may have been wrapped
                known = next((own for own in self._claims if is_same(own, one)), one)
                if self._concerns(known):
                    self._listener.skipped_step(known)

    def _before_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        with self._problems.contained("see a step coming"):
            if not self._concerns(optimizer):
                return
            if is_captured():
                self._replays.capture(optimizer)
            else:
                frame = step_frame(sys._getframe(2))
                self._forget_steps_that_raised(frame)
                self._steps.append((id(optimizer), id(frame)))
                if len(self._steps) == 1:  # a step within a step (a wrapper, super().step()) is part of it
                    self._listener.before_step(optimizer, has_closure(args, kwargs))

    def _after_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        with self._problems.contained("see a step"):
            if self._scaler is not None:
                self._scaler.stepped = True
            if self._concerns(optimizer) and not is_captured():
                while self._steps and self._steps.pop()[0] != id(optimizer):
                    pass
                if not self._steps:
                    if not self._saw_forward:
                        self._search_compiled()
                    self._saw_forward = False
                    self._listener.after_step(optimizer, "closure" if has_closure(args, kwargs) else None)

    def _forget_steps_that_raised(self, frame: FrameType | None) -> None:
        """A step that is not on the stack of calls any more has ended by an exception, without a post-hook."""
        if not self._steps:
            return
        running = set()
        while frame is not None and (frame := frame.f_back) is not None:
            running.add(id(frame))
        kept = [step for step in self._steps if step[1] in running]
        if not kept:
            self._listener.step_raised()
        self._steps = kept

    def _concerns(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer trains the watched model: it was named, or it holds parameters of it unclaimed."""
        model = self._model()
        if model is None:
            return False
        known = self._optimizers.get(optimizer)
        if known is None:
            own = map(id, parameters_in(model))
            known = not _claimed.get(optimizer) and not held_by(optimizer).isdisjoint(own)
            self._optimizers[optimizer] = known
        return known


def _listen(capture: Capture) -> None:
    with _changing:
        _listening.append(capture)
        if not _step_hooks:
            _step_hooks.append(register_optimizer_step_pre_hook(_before_any_step))
            _step_hooks.append(register_optimizer_step_post_hook(_after_any_step))
            _step_hooks.append(Stand(_before_any_clip))


def _listen_no_more(capture: Capture) -> None:
    with _changing:
        with contextlib.suppress(ValueError):  # removed already; a new list would bring back one removed meanwhile
            _listening.remove(capture)
        while _step_hooks and not _listening:
            _step_hooks.pop().remove()


# Dynamo runs these as they are. Where a step is compiled it would otherwise trace all that Holter does at a step: that
# takes longer than to compile the step itself.
@_untraced
def _before_any_step(optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for capture in tuple(_listening):
        capture._before_step(optimizer, args, kwargs)


@_untraced
def _after_any_step(optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for capture in tuple(_listening):
        capture._after_step(optimizer, args, kwargs)


def _before_any_clip(parameters: Sequence[Tensor], clip: Clip | None) -> None:
    for capture in tuple(_listening):
        capture._listener.torch_clips(parameters, clip)  # which contains what fails in it


def _remove_abandoned() -> None:
    while _abandoned:
        _abandoned.pop()._remove_hooks()
