"""Models whose activations are looked at, and what plain torch says of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from holter.activations import ActivationCapture, Activations
from holter.attention import first_floating
from holter.problems import Problems
from holter.statistics.activation import SIGNALS
from holter.statistics.measure import Measurer


def watch(model: nn.Module, **options: Any) -> ActivationCapture:
    return ActivationCapture(model, Problems(lambda problem: None), Measurer().measure, **options)


def problems_of(capture: ActivationCapture) -> list[str]:
    return [problem.what for problem in capture._problems]


def armed(model: nn.Module, *inputs: Any, **options: Any) -> Activations:
    """What one armed training forward and backward shows."""
    capture = watch(model, **options)
    capture.arm()
    output = first_floating(model(*inputs))
    assert output is not None
    output.sum().backward()
    found = capture.collect()
    assert found is not None and problems_of(capture) == []
    return found


def signal(found: Activations, layer: str, name: str) -> float:
    for part in found.parts:
        if layer in part.layers:
            return float(part.signals[part.layers.index(layer), SIGNALS.index(name)])
    raise KeyError(layer)


@contextlib.contextmanager
def outputs_of(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The test's own capture: the first output of every module, float64."""
    kept: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        if isinstance(y, Tensor) and y.is_floating_point():
            kept.setdefault(name or "model", y.detach().clone().double())

    handles = [module.register_forward_hook(partial(keep, name)) for name, module in model.named_modules()]
    yield kept
    for handle in handles:
        handle.remove()


def reference(y: Tensor, unit_dim: int) -> dict[str, float]:
    """The signals by eigenvalues and loops, of a small activation."""
    flat = y.movedim(unit_dim, -1).reshape(-1, y.shape[unit_dim])
    values = torch.linalg.eigvalsh(torch.cov(flat.T)).clamp(min=0)
    return {
        "dead": sum(bool((unit == 0).all()) for unit in flat.T) / flat.shape[1],
        "near_overflow": 0.0,
        "rank": float(values.sum() ** 2 / values.square().sum()) if values.sum() > 0 else 0.0,
        "spread": float((flat - flat.mean(0)).square().sum() / flat.square().sum()),
    }


# Models -------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * 3 * 3, 4)),
    )


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 7, num_layers=2, batch_first=True)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (9, 6)),
    "cnn": (cnn, (5, 3, 15, 15)),
    "lstm": (Classifier, (4, 6, 5)),
    "encoder": (encoder, (3, 5, 16)),
}


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    return build(), torch.randn(*shape)
