"""Holter: a monitor for neural-network training. Records every step, and says what is wrong, where and why."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holter.random_state import random_state_kept

if TYPE_CHECKING:
    from holter.alerts import Alert as Alert
    from holter.comparison.comparing import compare as compare
    from holter.diagnosis.finding import Finding as Finding
    from holter.gradients import check_gradient_flow_pattern as check_gradient_flow_pattern
    from holter.gradients import clip_gradients_with_monitoring as clip_gradients_with_monitoring
    from holter.gradients import compute_gradient_norm as compute_gradient_norm
    from holter.gradients import compute_gradient_norms as compute_gradient_norms
    from holter.gradients import diagnose_gradient_issues as diagnose_gradient_issues
    from holter.gradients import log_gradient_distribution as log_gradient_distribution
    from holter.history import History as History
    from holter.monitor import Monitor as Monitor
    from holter.plots import plot_gradient_flow as plot_gradient_flow
    from holter.remedies import advise_warmup_steps as advise_warmup_steps
    from holter.remedies import bert_init_weights as bert_init_weights
    from holter.remedies import get_linear_schedule_with_warmup as get_linear_schedule_with_warmup
    from holter.remedies import init_weights as init_weights
    from holter.remedies import replace_activations as replace_activations
    from holter.run import Run as Run
    from holter.run import diagnose as diagnose
    from holter.run import list_runs as list_runs
    from holter.run import open_run as open_run
    from holter.stopping import TrainingStopped as TrainingStopped
    from holter.tracker import MetricsTracker as MetricsTracker
    from holter.training import EarlyStopping as EarlyStopping
    from holter.training import fine_tune as fine_tune
    from holter.verdicts import advise_max_norm as advise_max_norm
    from holter.verdicts import categorize_problem_layers as categorize_problem_layers
    from holter.verdicts import compare_gradient_distributions as compare_gradient_distributions
    from holter.verdicts import validate_fix_effectiveness as validate_fix_effectiveness
    from holter.watching import watch as watch

__version__ = "0.1.0"

# Public name -> its module. Loaded on first use, so that reading a stored run never imports torch.
_HOMES = {
    "watch": "watching",
    "Monitor": "monitor",
    "open_run": "run",
    "diagnose": "run",
    "compare": "comparison.comparing",
    "list_runs": "run",
    "Run": "run",
    "History": "history",
    "Finding": "diagnosis.finding",
    "TrainingStopped": "stopping",
    "Alert": "alerts",
    "compute_gradient_norm": "gradients",
    "compute_gradient_norms": "gradients",
    "log_gradient_distribution": "gradients",
    "diagnose_gradient_issues": "gradients",
    "check_gradient_flow_pattern": "gradients",
    "clip_gradients_with_monitoring": "gradients",
    "categorize_problem_layers": "verdicts",
    "compare_gradient_distributions": "verdicts",
    "validate_fix_effectiveness": "verdicts",
    "advise_max_norm": "verdicts",
    "plot_gradient_flow": "plots",
    "init_weights": "remedies",
    "bert_init_weights": "remedies",
    "get_linear_schedule_with_warmup": "remedies",
    "advise_warmup_steps": "remedies",
    "replace_activations": "remedies",
    "MetricsTracker": "tracker",
    "fine_tune": "training",
    "EarlyStopping": "training",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holter' has no attribute {name!r}")
    with random_state_kept():
        value = getattr(import_module(f"holter.{_HOMES[name]}"), name)
    globals()[name] = value  # asked once, known from then on
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
