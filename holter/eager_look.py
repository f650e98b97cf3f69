"""A look at what the layers of a compiled model put out: the model is run once more, uncompiled, on a few samples.

Hooks do not run in compiled code. So in a step that is due, right before the training's own forward, a twin of the
model (its parameters, copies of everything else) is run on the first samples of the same batch: without gradients, with
random numbers, modes and autocast as they are there. The training does not notice:

- Buffers and Python attributes that the forward changes are the twin's, and so are the arguments. A write to any tensor
  that the look did not make itself, a weight or a global one, is refused before it happens.
- Random numbers of torch (CPU and CUDA), NumPy and Python are put back; generators that the model holds are copied.
- The autocast cache is off meanwhile: the training's forward would use weights that were cast without gradients.
- Compilers are told to stand aside: other sizes would make them compile for changing ones.
- A user's hooks do not run, since they may collect what they see; if they change outputs, the look does not show it.
- Variables, classes, objects and caches that its functions name outside of the model are put back. A forward that
  names there what cannot be put back, such as an iterator or a thread, is stopped before it uses it.

What cannot be undone is left: a forward that prints, writes a file or calls another machine does so once more. Other
threads that run compiled code meanwhile run it uncompiled.

Off where several processes train, since a forward may contain collectives; in CUDA graphs; on other devices than CPU
and CUDA. The first failure is told once, in a note, and the look is not tried again.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from holter.modules import modules_in, parameters_in, unwrapped
from holter.problems import Complaint
from holter.sampling import Samples, first_samples
from holter.surroundings import Surroundings
from holter.twin import Twin

_UNSAID = ("running_mean", "running_var")  # a batch norm writes to them, and its schema does not say so
# The stance of compilers is one for all threads: a second look that put it back to that of the first would leave it so.
_changing, _under_way, _stance = threading.Lock(), list[int](), contextlib.ExitStack()
Attach = Callable[[Twin], None]  # puts hooks on the twin


def refusal(model: nn.Module) -> str | None:
    """Say why this model cannot be looked at so; None where it can be tried."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_distributed and torch.distributed.get_world_size() > 1:
        return "the model is compiled, and several processes train it"
    if any(parameter.device.type not in ("cpu", "cuda") for parameter in parameters_in(model)):
        return "the model is compiled, on a device on which it cannot be run uncompiled unnoticed"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "the model is compiled, and a hook on all modules would see it run uncompiled"
    return None


def is_possible_now() -> bool:
    """Whether a forward that runs now is an ordinary one: not within a backward or a transform of torch.func."""
    return torch._C._current_graph_task_id() == -1 and torch._C._functorch.peek_interpreter_stack() is None


def look(model: nn.Module, args: Any, kwargs: Any, attach: Attach) -> Samples:
    """Run the model uncompiled on samples of what it was given; `attach` puts hooks on the twin that is run.

    Return how many samples of how many; raise whatever the forward raises.
    """
    samples = first_samples(args, kwargs, is_batch_first(model))
    try:
        return _run(model, samples, attach)
    except Complaint:
        raise
    except Exception:
        if samples.taken == samples.of:
            raise
    return _run(model, first_samples(args, kwargs, False), attach)


def is_batch_first(model: nn.Module) -> bool:
    """Whether no module is known to take its samples along the second dimension."""
    return all(getattr(module, "batch_first", True) is not False for module in modules_in(model))


def _run(model: nn.Module, samples: Samples, attach: Attach) -> Samples:
    modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()
    with _restored(model), torch.no_grad(), modes:
        twin = Twin(unwrapped(model))
        args, kwargs = twin.copy(samples.args), twin.copy(samples.kwargs)
        attach(twin)
        try:
            with _Guard(twin.tensors):
                Surroundings(twin.held()).run(lambda: twin.module(*args, **kwargs))
        finally:
            twin.release()
    return samples


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put back what a forward uses up, and keep it from what it would leave behind."""
    devices = dict.fromkeys(parameter.device for parameter in parameters_in(model) if parameter.is_cuda)
    on_devices = [(device, torch.cuda.get_rng_state(device)) for device in devices]
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - the training's own
    caches, benchmarks = torch.is_autocast_cache_enabled(), torch.backends.cudnn.benchmark
    try:
        torch.set_autocast_cache_enabled(False)
        if benchmarks:
            torch.backends.cudnn.benchmark = False  # it waits for the device
        with _uncompiled():
            yield
    finally:
        if benchmarks:
            torch.backends.cudnn.benchmark = True
        torch.set_autocast_cache_enabled(caches)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        for device, state in on_devices:
            torch.cuda.set_rng_state(state, device)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Tell compilers to stand aside until the last look that is under way in any thread is over."""
    with _changing:
        if not _under_way:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
        _under_way.append(1)
    try:
        yield
    finally:
        with _changing:
            _under_way.pop()
            if not _under_way:
                _stance.close()


class _Guard(TorchDispatchMode):
    """Refuses writes to tensors that were there before, save these."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = {_storage(tensor) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written, makes_new = _traits(func)
        for place, name in written:
            given = args[place] if place < len(args) else kwargs.get(name)
            if any(_storage(tensor) not in self._own for tensor in _tensors(given)):
                raise Complaint("its forward changes a tensor that the training has too")
        made = func(*args, **kwargs)
        if makes_new:
            self._own.update(map(_storage, _tensors(made)))
            self._own.discard(None)
        return made


@lru_cache(maxsize=4096)
def _traits(func: Any) -> tuple[tuple[tuple[int, str], ...], bool]:
    """Places and names of what an operator writes to; whether what it returns is new."""
    schema = func._schema
    written = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in _UNSAID
    )
    # `_unsafe_view` is a view that does not say so; `lift_fresh` gives back a tensor that was made a moment ago.
    is_view = schema.name == "aten::_unsafe_view" or any(one.alias_info is not None for one in schema.returns)
    return written, not is_view or schema.name == "aten::lift_fresh"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, list | tuple) else []


def _storage(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse one has none
        return None
