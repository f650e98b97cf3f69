"""What is being trained, for run.json: layers, shapes, versions. No environment, no command line, no values."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

import holter
from holter.capture import Layers, parameters_of
from holter.imitations import name_of
from holter.layer_roles import roles_of, tied_parameters
from holter.modules import named_modules, unwrapped
from holter.settings import Settings


def describe_training(
    model: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any | None, settings: Settings, layers: Layers
) -> dict[str, Any]:
    # A lazy parameter has no shape before the first forward: it is one of those that come later.
    names = [(name, one) for name, one in zip(*layers.everything(), strict=True) if not is_lazy(one)]
    parts, tied = roles_of(model), tied_parameters(model)
    kinds = {name: type(module).__name__ for name, module in named_modules(model)}
    replaced = _replaced(names, optimizers)
    others: dict[str, list[str]] = {}
    for other, name in tied.items():
        others.setdefault(name, []).append(other)
    return {
        "created": time.time(),
        "model": type(unwrapped(model)).__name__,
        "optimizers": [name_of(optimizer) for optimizer in optimizers],
        "scheduler": type(scheduler).__name__ if scheduler is not None else None,
        "total_steps": settings.total_steps,
        "budget": settings.budget,
        "parameters": sum(parameter.numel() for _, parameter in names),
        "layers": [
            {
                **_describe_layer(name, parameter),
                "part": parts.get(name, "other"),
                "module": kinds.get(name.rpartition(".")[0], ""),
                "selected": id(parameter) not in layers.left_out,
                **({"tied_to": others[name]} if name in others else {}),
                **({"replaced": True} if name in replaced else {}),
            }
            for name, parameter in names
        ],
        "versions": {
            "holter": holter.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def _replaced(names: Iterable[tuple[str, nn.Parameter]], optimizers: Sequence[Optimizer]) -> set[str]:
    """Return those that no optimizer holds while one holds a tensor in their shape that is not the model's: they took
    the place of those after the optimizer was made."""
    known = list(names)
    own = {id(parameter) for _, parameter in known}
    held = {id(parameter): parameter for optimizer in optimizers for parameter in parameters_of(optimizer)}
    foreign = Counter(tuple(other.shape) for one, other in held.items() if one not in own and not is_lazy(other))
    found = set()
    for name, parameter in known:
        if id(parameter) not in held and foreign[tuple(parameter.shape)] > 0:
            foreign[tuple(parameter.shape)] -= 1
            found.add(name)
    return found


def _describe_layer(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(parameter.shape),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "trained": parameter.requires_grad,
    }


def rank_of_process() -> int:
    """This process's number in a distributed training; 0 where there is only one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0
