"""The gradients of a model as they stand after `backward()`: norms, distribution, diagnosis, clipping.

Plain functions for use without a Monitor. They return data; printing is the caller's business. Measuring is
done on the device that holds the gradients: only sums and counts come to the host, never the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from holter.modules import named_parameters
from holter.statistics.measure import measure_rows
from holter.statistics.rows import Rows, merge
from holter.verdicts import (
    ClipAdvice,
    FixEffect,
    GradientComparison,
    LossCheck,
    Span,
    advise_max_norm,
    categorize_problem_layers,
    check_loss,
    compare_gradient_distributions,
    find_exploding,
    find_unstable,
    find_vanishing,
    validate_fix_effectiveness,
)

__all__ = [
    "compute_gradient_norm",
    "compute_gradient_norms",
    "log_gradient_distribution",
    "diagnose_gradient_issues",
    "GradientIssues",
    "check_gradient_flow_pattern",
    "FlowPattern",
    "clip_gradients_with_monitoring",
    "advise_max_norm",
    "ClipAdvice",
    "find_vanishing",
    "find_exploding",
    "find_unstable",
    "Span",
    "check_loss",
    "LossCheck",
    "categorize_problem_layers",
    "compare_gradient_distributions",
    "GradientComparison",
    "validate_fix_effectiveness",
    "FixEffect",
    "Tracker",
]


class Tracker(Protocol):
    """Whatever takes scalars, such as `holter.MetricsTracker`. `log_histogram` is used where it exists."""

    def log_scalar(self, name: str, value: float, *, step: int) -> object: ...


@dataclass(frozen=True)
class GradientIssues:
    """Layers by the size of their gradient, each a mapping from name to norm."""

    vanishing: dict[str, float]
    exploding: dict[str, float]
    healthy: dict[str, float]


Pattern = Literal["healthy", "vanishing", "exploding", "nonfinite", "unknown"]


@dataclass(frozen=True)
class FlowPattern:
    """Mean gradient norm of the first and the last third of the weights, their ratio, and what it means.

    The pattern is "nonfinite" where a norm is, and "unknown" where there are no gradients to compare.
    """

    first_third: float
    last_third: float
    ratio: float
    pattern: Pattern


def compute_gradient_norm(model: nn.Module) -> float:
    """The L2 norm of all gradients together, sqrt(sum g^2); 0.0 where there is none.

    What `clip_grad_norm_` returns, but right also where float16 or float32 squares overflow or vanish, and where
    torch's float32 sum over millions of values drifts (on the CPU, by 1e-3 for GPT-2). A tied parameter counts
    once. NaN gradients give NaN, infinite ones infinity.

    >>> model = torch.nn.Linear(3, 1)
    >>> model(torch.tensor([[0.0, 3.0, 4.0]])).sum().backward()
    >>> round(compute_gradient_norm(model), 4)  # sqrt(0 + 9 + 16, and 1 for the bias)
    5.099
    """
    gradients = _gradients(model)
    return float(_total(_measure(gradients)).derive("full_norm")[0]) if gradients else 0.0


def compute_gradient_norms(model: nn.Module) -> dict[str, float]:
    """The L2 norm of each gradient, by torch's parameter name; parameters without a gradient are left out.

    >>> model = torch.nn.Linear(2, 1)
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> compute_gradient_norms(model)
    {'weight': 5.0, 'bias': 1.0}
    """
    gradients = _gradients(model)
    return _norms_by_name(gradients, _measure(gradients))


def log_gradient_distribution(model: nn.Module, tracker: Tracker, step: int, log_histogram: bool = False) -> None:
    """Logs the norm of every gradient as `gradients/{parameter name}/norm`; passes over frozen parameters.

    With `log_histogram` the distribution of all gradient values goes to `tracker.log_histogram` as
    `gradients/histogram`; a tracker without that method gets the norms only.

    >>> from holter.tracker import MetricsTracker
    >>> model, tracker = torch.nn.Linear(2, 1), MetricsTracker()
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> log_gradient_distribution(model, tracker, step=0)
    >>> tracker.scalar("gradients/weight/norm")
    (array([0]), array([5.]))
    """
    write_histogram = getattr(tracker, "log_histogram", None) if log_histogram else None
    gradients = _gradients(model, frozen=False)
    parts = _measure(gradients, histograms=write_histogram is not None)
    for name, norm in _norms_by_name(gradients, parts).items():
        tracker.log_scalar(f"gradients/{name}/norm", norm, step=step)
    if write_histogram is not None and parts:
        write_histogram("gradients/histogram", _total(parts), step=step)


def diagnose_gradient_issues(
    model: nn.Module, threshold_vanish: float = 1e-7, threshold_explode: float = 10.0
) -> GradientIssues:
    """Sorts layers by gradient norm: vanishing below one threshold, exploding above the other or not finite.

    >>> model = torch.nn.Linear(2, 1)
    >>> model(torch.tensor([[30.0, 40.0]])).sum().backward()
    >>> diagnose_gradient_issues(model)
    GradientIssues(vanishing={}, exploding={'weight': 50.0}, healthy={'bias': 1.0})
    """
    issues = GradientIssues({}, {}, {})
    for name, norm in compute_gradient_norms(model).items():
        if norm < threshold_vanish:
            issues.vanishing[name] = norm
        elif norm <= threshold_explode:
            issues.healthy[name] = norm
        else:  # NaN, too, is not healthy
            issues.exploding[name] = norm
    return issues


def check_gradient_flow_pattern(
    model: nn.Module, *, vanishing_below: float = 0.01, exploding_above: float = 100.0
) -> FlowPattern:
    """The mean gradient norm of the first third of the weights over that of the last third.

    Weights are the parameters of two dimensions or more, in the order in which the model names them: biases
    and gains tell little of depth.

    >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    >>> for layer, size in zip(model, (1e-6, 1e-3, 1.0)):
    ...     layer.weight.grad = torch.full((4, 4), size)
    >>> check_gradient_flow_pattern(model).pattern
    'vanishing'
    """
    weights = {name: grad for name, grad in _gradients(model).items() if grad.ndim >= 2}
    norms = np.array(list(_norms_by_name(weights, _measure(weights)).values()))
    if len(norms) < 2:
        return FlowPattern(float("nan"), float("nan"), float("nan"), "unknown")
    third = max(1, len(norms) // 3)
    with np.errstate(all="ignore"):
        first, last = norms[:third].mean(), norms[-third:].mean()
        ratio = first / last
    pattern: Pattern = "healthy"
    if not np.isfinite(norms).all():
        pattern = "nonfinite"
    elif np.isnan(ratio):
        pattern = "unknown"  # zero over zero
    elif ratio < vanishing_below:
        pattern = "vanishing"
    elif ratio > exploding_above:
        pattern = "exploding"
    return FlowPattern(float(first), float(last), float(ratio), pattern)


def clip_gradients_with_monitoring(model: nn.Module, max_norm: float = 1.0) -> tuple[float, bool]:
    """Clips bit for bit as `torch.nn.utils.clip_grad_norm_` does; returns (norm before, whether it clipped).

    The norm is the one that torch scaled by. One that is not finite counts as clipped: torch has then scaled
    the gradients by zero or NaN. Sparse gradients, which torch refuses, are scaled by the same rule. Keep the
    norms and ask `advise_max_norm` whether the limit is right.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> clip_gradients_with_monitoring(model, max_norm=1.0)
    (5.0, True)
    """
    norm = float(clip_on_device(model, max_norm))
    return norm, not norm <= max_norm


def clip_on_device(model: nn.Module, max_norm: float | None) -> Tensor:
    """Clips, or only measures where the limit is None; the norm before stays on its device.

    Nothing waits for it, except where gradients are sparse.
    """
    gradients = list(_gradients(model).values())
    if any(gradient.layout is not torch.strided for gradient in gradients):
        norm = compute_gradient_norm(model)
        coefficient = 1.0 if max_norm is None else max_norm / (norm + 1e-6)  # torch's own
        for gradient in gradients:
            gradient.mul_(1.0 if coefficient > 1.0 else coefficient)
        return torch.tensor(norm)
    if not gradients:
        return torch.zeros(())
    if max_norm is not None:
        return nn.utils.clip_grad_norm_(list(model.parameters()), max_norm)
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    device = norms[0].device
    return torch.stack([norm.to(device) for norm in norms]).square().sum().sqrt()


def _gradients(model: nn.Module, *, frozen: bool = True) -> dict[str, Tensor]:
    """Gradients by parameter name. A frozen parameter may still hold one, and the optimizer would use it."""
    return {
        name: parameter.grad
        for name, parameter in named_parameters(model)
        if parameter.grad is not None and (frozen or parameter.requires_grad)
    }


Part = tuple[list[str], Rows]  # names and rows of the gradients on one device


def _measure(gradients: Mapping[str, Tensor], *, histograms: bool = False) -> list[Part]:
    by_device: dict[torch.device, list[str]] = {}
    for name, gradient in gradients.items():
        if hasattr(gradient, "to_local"):  # a DTensor
            raise ValueError(f"{name} is sharded over processes: gather its gradient with full_tensor() first")
        by_device.setdefault(gradient.device, []).append(name)
    return [
        (names, measure_rows([gradients[name] for name in names], histograms=histograms))
        for names in by_device.values()
    ]


def _total(parts: list[Part]) -> Rows:
    """One row of all gradients together."""
    return merge([rows.total() for _, rows in parts])


def _norms_by_name(gradients: Mapping[str, Tensor], parts: list[Part]) -> dict[str, float]:
    """In the order of the model, whatever device each gradient is on."""
    norms: dict[str, float] = {}
    for names, rows in parts:
        norms.update(zip(names, rows.derive("full_norm").tolist(), strict=True))
    return {name: norms[name] for name in gradients}
