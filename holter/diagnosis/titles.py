"""Causes as people read them."""

from __future__ import annotations

# Only those whose id, with spaces for its hyphens, would not do.
_TITLES = {
    "lr-too-high": "learning rate too high",
    "lr-jump": "jump of the learning rate",
    "lr-too-low": "learning rate too low",
    "scheduler-stepped-too-often": "schedule stepped too often",
    "warmup-missing": "no warm-up",
    "clipping-missing": "no clipping",
    "zero-grad-missing": "gradients not cleared",
    "accumulation-not-averaged": "accumulated gradients not averaged",
    "adam-eps-dominates": "Adam's eps dominates",
    "adam-second-moment-lag": "Adam's second moment lags behind",
    "init-too-large": "initialisation too large",
    "init-too-small": "initialisation too small",
    "init-symmetric": "symmetric initialisation",
    "dead-relu": "dead ReLU",
    "graph-detached": "cut off from the loss",
    "layer-frozen": "frozen layer",
    "norm-batch-too-small": "batch too small for its normalisation",
    "batch-corrupt": "corrupt batch",
    "input-scale": "inputs out of scale",
    "labels-corrupt": "corrupt labels",
    "batch-repeated": "the same batch again",
    "nan-in-data": "NaN in the data",
    "double-softmax": "softmax twice",
    "loss-sign": "loss with the wrong sign",
    "loss-reduction": "loss summed, not averaged",
    "fp16-overflow": "float16 overflow",
    "fp16-underflow": "float16 underflow",
    "bf16-update-lost": "updates lost in bfloat16",
    "data-loading-bound": "waiting for data",
    "memory-growth": "growing memory",
    "throughput-drop": "drop of throughput",
    "unknown": "trouble of unknown cause",
    "monitor-degraded": "Holter itself was hindered",
}


def title_of(cause: str) -> str:
    """
    >>> title_of("dead-relu"), title_of("vanishing-gradient")
    ('dead ReLU', 'vanishing gradient')
    """
    return _TITLES.get(cause, cause.replace("-", " "))


def heading_of(cause: str) -> str:
    """The same at the beginning of a sentence."""
    title = title_of(cause)
    return title[:1].upper() + title[1:]
