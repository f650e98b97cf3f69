"""ActivationCapture: what the layers of a model put out in the training forwards of an armed step.

Hooks are on the modules only while it is armed, so every other step runs the model untouched. A hook is as dear as
it has calls of torch, so it does little: it copies the activation, or of a large one a part, since an in-place layer
may overwrite it right after, and one that is kept would stay in memory although the training had let it go (activation
checkpointing). A few copies together are measured in one pass, and then let go; `collect` derives the signals of all
layers together.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from holter.attention import Kind, attention_statistics, first_floating, kind_of, logit_statistics, logits_in
from holter.hooks import ModuleHook
from holter.modules import blocks_in, compiled_parts, is_leaf, walk
from holter.problems import Complaint, Problems
from holter.statistics.activation import Bounds, Kept, Signals, derive_signals, measure_signals, portion
from holter.statistics.device_rows import DeviceRows
from holter.statistics.measure import unmeasurable

Measure = Callable[[list[Tensor]], DeviceRows]
Select = Callable[[str, nn.Module], bool]

# Modules that only pass on what came in: their activations are those of the layer before, or its zeros by chance.
PASSIVE = (nn.Identity, nn.Flatten, nn.Unflatten, nn.modules.dropout._DropoutNd)
_CHANNELS_FIRST = (
    *(nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm),
    *(nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd),
    *(nn.modules.pooling._AdaptiveAvgPoolNd, nn.modules.pooling._AdaptiveMaxPoolNd),
)
_HELD, _HELD_ON_CPU = 64 << 20, 1 << 20  # bytes of copies that wait; on the CPU as many as stay in its cache
_UNITS_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.RNNBase, nn.MultiheadAttention)


@dataclass(frozen=True, eq=False)
class ActivationRows:
    """The activations of one device, in the order in which the modules first finished."""

    layers: tuple[str, ...]
    calls: tuple[int, ...]  # of each layer in the step; the first call is the one measured
    rows: DeviceRows
    kept: tuple[Kept, ...]  # of which the rest is worked out, whenever it is asked for

    @property
    def signals(self) -> Tensor:
        """float32 [n, len(SIGNALS)]"""
        return self._derived.values

    @property
    def alive(self) -> tuple[Tensor, ...]:
        """bool [units] each, for a Window"""
        return self._derived.alive

    @property
    def units(self) -> tuple[int, ...]:
        return tuple(alive.numel() for alive in self.alive)

    @cached_property
    def _derived(self) -> Signals:
        with torch.no_grad():
            return derive_signals(self.kept)


@dataclass(frozen=True, eq=False)
class Activations:
    """All that was seen in an armed step; tensors are still on their devices."""

    order: tuple[str, ...]  # all layers, in the order in which they first finished: their depth
    blocks: frozenset[str]  # those that are whole blocks
    dtypes: Mapping[str, str]  # of each layer's output, such as bfloat16
    parts: tuple[ActivationRows, ...]  # a part a device
    attention: Mapping[str, Tensor]  # float32 [len(ATTENTION)] by layer
    logits: Tensor | None  # float32 [len(LOGITS)] of the model's output


@dataclass(eq=False)
class _Seen:
    kept: Kept
    dtype: torch.dtype
    calls: int = 1


@dataclass(eq=False)
class _Step:
    """What has been seen since `arm`."""

    layers: dict[str, _Seen] = field(default_factory=dict)
    waiting: dict[str, Tensor] = field(default_factory=dict)  # copies that are not measured yet
    held: int = 0  # bytes of them
    measured: list[tuple[tuple[str, ...], DeviceRows]] = field(default_factory=list)  # each of one device
    unit_dims: dict[torch.Size, int] = field(default_factory=dict)  # shape -> as a layer that knows it last had it
    projected: dict[str, Tensor] = field(default_factory=dict)  # only while their attention module runs
    attention: dict[str, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None


class ActivationCapture:
    """Watches one model, which it does not hold. Whatever fails in its hooks stays in them.

    `measure` gives the row of a tensor: a Measurer of its own is best, since the shapes are others than the weights'.
    `selected(name, module)` chooses among leaf modules, blocks and attentions; without it all are watched that do
    more than pass on what they get.
    """

    def __init__(self, model: nn.Module, problems: Problems, measure: Measure, selected: Select | None = None) -> None:
        self._model, self._problems, self._measure = weakref.ref(model), problems, measure
        self._selected = selected or (lambda name, module: not isinstance(module, PASSIVE))
        self._handles: list[RemovableHandle] = []
        self._step = _Step()
        self._blocks: frozenset[str] = frozenset()
        self._in_training_forward = False
        self._needs_gradients = True
        self.uncounted = ""  # why what ran since `arm` was none of a training forward, in words
        self.seconds = 0.0  # that its hooks and `collect` have taken of the training thread so far
        self.unobserved: tuple[str, ...] = compiled_parts(model)

    @property
    def observed(self) -> bool:
        """False where nothing can be seen: the whole model is compiled or scripted, or gone."""
        return self._model() is not None and "" not in self.unobserved

    @property
    def is_armed(self) -> bool:
        return bool(self._handles)

    def arm(self, *, in_forward: bool = False, needs_gradients: bool = True) -> None:
        """Watches the training forwards from now until `collect`.

        Best called by the model's own forward pre-hook, which then says so with `in_forward`: it does not run where
        the model is compiled away, while hooks that are there when the compiler comes cost a second compilation.
        Without `needs_gradients` a forward in training mode counts that has none.
        """
        self.give_up()
        self._needs_gradients, self.uncounted = needs_gradients, ""
        self._in_training_forward = in_forward
        model = self._model()
        if model is not None:
            with self._problems.contained("watch activations"):
                self.unobserved = compiled_parts(model)
                if self.observed:
                    self._attach(model)

    def collect(self) -> Activations | None:
        """Hands over what was seen and takes the hooks away; None where nothing was seen."""
        step = self._step
        self.give_up()
        if not step.layers and step.logits is None:
            return None
        with self._problems.contained("collect activations"), self._timing(), _aside():
            with self._problems.contained("measure activations"):
                self._measure_waiting(step)
            order = tuple(step.layers)
            blocks = self._blocks & set(order)
            dtypes = {name: str(seen.dtype).removeprefix("torch.") for name, seen in step.layers.items()}
            return Activations(order, blocks, dtypes, _by_device(step), step.attention, step.logits)
        return None

    def give_up(self) -> None:
        """Takes the hooks away and forgets what was seen."""
        self._remove_hooks()
        self._in_training_forward = False
        self._step = _Step()

    # Attaching ------------------------------------------------------------------------------------------------

    def _attach(self, model: nn.Module) -> None:
        modules = dict(walk(model))
        blocks = {id(block) for module in modules.values() for block in blocks_in(module)}
        self._blocks = frozenset(name for name, module in modules.items() if id(module) in blocks)
        self._on(model.register_forward_pre_hook, "", ActivationCapture._begin_forward)
        for name, module in modules.items():
            if isinstance(module, nn.TransformerEncoderLayer):
                self._on(module.register_forward_pre_hook, name, ActivationCapture._yield_to_evaluation)
            is_layer = id(module) in blocks or is_leaf(module) or isinstance(module, nn.MultiheadAttention)
            if is_layer and self._selected(name, module):
                self._on(module.register_forward_hook, name or "model", ActivationCapture._see)
            kind = kind_of(module)
            if kind is not None and self._selected(name, module):
                self._attach_attention(name or "model", module, kind)
        self._on(model.register_forward_hook, "", ActivationCapture._end_forward)

    def _attach_attention(self, name: str, module: nn.Module, kind: Kind) -> None:
        for part in kind.projections:
            projection = getattr(module, part)
            self._on(projection.register_forward_hook, f"{name}.{part}", ActivationCapture._see_projection)
        self._on(partial(module.register_forward_hook, with_kwargs=True), name, ActivationCapture._see_attention)

    def _on(self, register: Callable[..., RemovableHandle], name: str, see: Callable[..., None]) -> None:
        self._handles.append(register(ModuleHook(self, "see an activation", ActivationCapture._timed, see, name)))

    def _timed(self, see: Callable[..., None], name: str, module: nn.Module, *what: Any) -> None:
        with self._timing():
            see(self, name, module, *what)

    @contextlib.contextmanager
    def _timing(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    # The hooks ------------------------------------------------------------------------------------------------

    def _begin_forward(self, name: str, model: nn.Module, args: Any) -> None:
        self._yield_to_evaluation(name, model, args)
        has_gradients = torch.is_grad_enabled() or not self._needs_gradients
        self._in_training_forward = model.training and has_gradients and not _recomputes()

    def _end_forward(self, name: str, model: nn.Module, args: Any, output: Any) -> None:
        counts, self._in_training_forward = self._counts(model), False
        logits = logits_in(output) if counts and self._step.logits is None else None
        if logits is not None:
            with _aside():
                self._step.logits = logit_statistics(_plain(logits))

    def _yield_to_evaluation(self, name: str, module: nn.Module, args: Any) -> None:
        """torch's encoder layers take another path in evaluation when they bear hooks, with other last bits.

        What was seen until then stands.
        """
        if not module.training:
            self._remove_hooks()

    def _see(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self._counts(module):
            return
        seen = self._step.layers.get(name)
        if seen is not None:
            seen.calls += 1  # a shared module, or another micro-batch: the first call stands for the step
            return
        y = first_floating(output)
        if y is None or not y.numel() or not y.ndim:
            return
        with _aside():
            y = _plain(y)
            unit_dim = self._unit_dim(module, y)
            copy = portion(y, unit_dim)
            self._step.layers[name] = _Seen(measure_signals(copy, unit_dim, _bounds_of(module)), y.dtype)
            self._step.waiting[name] = copy
            self._step.held += copy.nbytes
            if self._step.held > (_HELD_ON_CPU if copy.device.type == "cpu" else _HELD):
                self._measure_waiting(self._step)

    def _measure_waiting(self, step: _Step) -> None:
        waiting, step.waiting, step.held = step.waiting, {}, 0
        for device in dict.fromkeys(copy.device for copy in waiting.values()):
            names = tuple(name for name, copy in waiting.items() if copy.device == device)
            step.measured.append((names, self._measure([waiting[name] for name in names])))

    def _see_projection(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        is_first = name.rpartition(".")[0] not in self._step.attention
        if is_first and isinstance(output, Tensor) and self._counts(module):
            self._step.projected[name] = _plain(output)

    def _see_attention(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        kind = kind_of(module)
        if kind is None or not self._counts(module) or name in self._step.attention:
            return
        projected = [self._step.projected.pop(f"{name}.{part}", None) for part in kind.projections]
        found = [one for one in projected if one is not None]
        if len(found) < len(projected):  # it does without their forwards
            return
        with _aside():
            statistics = attention_statistics(kind, module, args, kwargs, found)
        if statistics is not None:
            self._step.attention[name] = statistics

    def _counts(self, module: nn.Module) -> bool:
        """Whether this call is part of a training forward.

        Where the model itself was called it decides for all that runs within: reentrant checkpointing runs its part
        without gradients first, and frozen layers are often in evaluation mode. A backward computes nothing new.
        """
        if _recomputes():
            self.uncounted = ": they ran within a backward, as under reentrant checkpointing"
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.uncounted = ": they ran within a transform of torch.func"
            return False
        return self._in_training_forward or (module.training and torch.is_grad_enabled())

    def _unit_dim(self, module: nn.Module, y: Tensor) -> int:
        """The dimension that tells units apart; an activation function takes it from the layer before, by shape."""
        dims = self._step.unit_dims
        if isinstance(module, _CHANNELS_FIRST):
            dims[y.shape] = min(1, y.ndim - 1)
        elif isinstance(module, _UNITS_LAST):
            dims[y.shape] = y.ndim - 1
        return dims.get(y.shape, 1 if y.ndim > 3 else y.ndim - 1)


# Measuring ------------------------------------------------------------------------------------------------------


def _bounds_of(module: nn.Module) -> Bounds | None:
    if isinstance(module, nn.ReLU6):
        return Bounds(None, 6.0)
    if isinstance(module, nn.Hardtanh):
        return Bounds(module.min_val, module.max_val)
    if isinstance(module, nn.Sigmoid | nn.Hardsigmoid):
        return Bounds(0.0, 1.0)
    if isinstance(module, nn.RNN | nn.RNNCell):  # what it puts out went through its own
        return Bounds(-1.0, 1.0) if module.nonlinearity == "tanh" else None
    return Bounds(-1.0, 1.0) if isinstance(module, nn.Tanh | nn.Softsign) else None


def _plain(y: Tensor) -> Tensor:
    """A detached tensor that ordinary arithmetic can take, or a complaint."""
    y = y.detach()
    if hasattr(y, "to_local"):  # a DTensor: this process's part
        y = y.to_local()
    refused = unmeasurable(y)
    if refused is None and type(y) not in (Tensor, nn.Parameter):
        refused = f"a {type(y).__name__} is not a plain tensor"
    if refused is None and y.layout is not torch.strided:
        refused = f"{y.layout} activations are not supported"
    if refused is None and y.is_cuda and torch.cuda.is_current_stream_capturing():
        refused = "it would become part of a CUDA graph; the graph's replays are not observed"
    if refused is not None:
        raise Complaint(refused)
    return y


def _recomputes() -> bool:
    """Whether a backward is running on this thread: checkpointing then runs forwards a second time."""
    return torch._C._current_graph_task_id() != -1


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Arithmetic that the training does not notice: no graph, no autocast, and no mode of the user's sees it.

    Selective checkpointing keeps the results of chosen operators by their order in such a mode: one of ours among
    them would make it hand out wrong ones in the backward.
    """
    modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()
    # What torch.autocast(enabled=False) comes to, for every device and at a tenth of its time.
    with torch.no_grad(), torch._C._DisableAutocast(), modes:
        yield


def _by_device(step: _Step) -> tuple[ActivationRows, ...]:
    groups: dict[torch.device, list[tuple[tuple[str, ...], DeviceRows]]] = {}
    for names, rows in step.measured:
        groups.setdefault(rows.values.device, []).append((names, rows))
    return tuple(_joined(step.layers, parts) for parts in groups.values())


def _joined(layers: Mapping[str, _Seen], parts: list[tuple[tuple[str, ...], DeviceRows]]) -> ActivationRows:
    names = tuple(name for some, _ in parts for name in some)
    histograms = [rows.histograms for _, rows in parts if rows.histograms is not None]
    return ActivationRows(
        layers=names,
        calls=tuple(layers[name].calls for name in names),
        rows=DeviceRows(
            torch.cat([rows.values for _, rows in parts]),
            torch.cat(histograms) if len(histograms) == len(parts) else None,
        ),
        kept=tuple(layers[name].kept for name in names),
    )
