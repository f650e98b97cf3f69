"""What is planted, and what following the advice comes to: a phrase each for every cause of the clinic.

`{fault}` stands for the hooks that plant it, `{sick}` and `{well}` for the recipes with and without it.
"""

from __future__ import annotations

from typing import NamedTuple


class Told(NamedTuple):
    """`fault` follows "At step 60 ", `remedy` follows "Now with the advice followed: "."""

    fault: str
    remedy: str


TOLD = {
    "lr-too-high": Told(
        "the learning rate is {sick.rate:.3g}, where {well.rate:.3g} works", "the rate at {well.rate:.3g}"
    ),
    "lr-jump": Told("the learning rate is multiplied by {fault.factor:.0f}", "the schedule without the jump"),
    "lr-too-low": Told(
        "the learning rate is {sick.rate:.3g}, where {well.rate:.3g} works", "the rate at {well.rate:.3g}"
    ),
    "scheduler-stepped-too-often": Told(
        "scheduler.step() is called {fault.times} times a step", "scheduler.step() once a step"
    ),
    "warmup-missing": Told(
        "the rate is {sick.rate:.3g} with no warm-up, which only a grown second moment bears",
        "a warm-up of {well.warmup} steps",
    ),
    "clipping-missing": Told(
        "one batch in {fault.every} begins to weigh {fault.weight:.0f} times the others, and nothing clips",
        "gradients clipped at {well.clip:.3g}",
    ),
    "clipping-too-tight": Told("gradients are clipped at {fault.norm:.2g}", "gradients clipped at {well.clip:.3g}"),
    "zero-grad-missing": Told("optimizer.zero_grad() is no longer called", "zero_grad() after every step"),
    "accumulation-not-averaged": Told(
        "{fault.times} micro-batches begin to make a step, and their losses are summed",
        "each loss divided by the {fault.times} micro-batches",
    ),
    "optimizer-holds-other-parameters": Told(
        "{fault.layer} is replaced by a copy, and the optimizer goes on with the old one",
        "the optimizer holds the layer that is trained",
    ),
    "weight-not-written": Told(
        "{fault.parameter} loses its layout, and what the optimizer writes goes into a copy", "the weight contiguous"
    ),
    "optimizer-state-lost": Told(
        "the training is resumed without the optimizer's state", "the optimizer's state loaded with the model's"
    ),
    "adam-eps-dominates": Told("Adam's eps is {sick.eps:.2g}", "eps at {well.eps:g}"),
    "adam-second-moment-lag": Told(
        "the gradient of {fault.parameter} grows {fault.factor:.0f}-fold, and Adam's second moment cannot follow",
        "the signal as loud as before",
    ),
    "weight-decay-too-high": Told("weight_decay is set to {fault.decay:.3g}", "weight_decay as before"),
    "vanishing-gradient": Told(
        "{sick.depth} layers have sigmoids between them, and no norm", "another activation in the place of sigmoids"
    ),
    "init-too-large": Told("the weights start {fault.factor:.1f} times too large", "weights that start at their size"),
    "init-too-small": Told("the weights start at {fault.factor:.2f} of their size", "weights that start at their size"),
    "init-symmetric": Told("all weights of a layer start alike", "weights that start at random"),
    "dead-relu": Told(
        "{fault.parameter} is shifted by {fault.shift:.0f}, and no unit behind it fires again", "the bias as it was"
    ),
    "saturated-activation": Told(
        "{fault.parameter} is multiplied by {fault.factor:.0f}, and its tanh sits at its bounds",
        "the weight scaled down to what it was",
    ),
    "graph-detached": Told("someone calls detach() on what {fault.module} puts out", "without the detach()"),
    "layer-frozen": Told("requires_grad_(False) hits {fault.module}", "requires_grad_(True) on it"),
    "representation-collapse": Told(
        "an extra loss begins to pull the features of different examples together",
        "the extra loss compares views of the same example again",
    ),
    "residual-growth": Told(
        "{fault.parameter} begins to grow by {fault.factor:.4g} a step", "the branch kept at its scale"
    ),
    "norm-batch-too-small": Told(
        "batches shrink to {fault.size} examples, and batch norm sees no more", "batches of {well.batch}"
    ),
    "batch-corrupt": Told("one batch holds something else than the others", "that batch mended when it is loaded"),
    "input-scale": Told("inputs come in the wrong scale", "inputs as the model expects them"),
    "labels-corrupt": Told("labels are shuffled, and no longer belong to their inputs", "labels beside their inputs"),
    "batch-repeated": Told("the sampler gets stuck, and the same batch comes for ever", "a sampler that advances"),
    "data-not-shuffled": Told("the data begins to come class by class", "the data shuffled"),
    "nan-in-data": Told("one example of one batch holds NaN", "the data without NaN"),
    "double-softmax": Told("the model ends in a softmax, and the loss applies its own", "the softmax removed"),
    "loss-sign": Told("the sign of the loss is turned round", "the loss itself minimised"),
    "loss-reduction": Told("the loss is a sum, where a mean was meant", 'reduction="mean"'),
    "fp16-overflow": Told(
        "what {fault.module} puts out is scaled up to the end of float16", "that layer at its former scale"
    ),
    "fp16-underflow": Told(
        "the loss counts by {fault.weight:.1g} in float16, and nothing scales it up", "a GradScaler"
    ),
    "bf16-update-lost": Told(
        "weights are kept in bfloat16, whose rounding is larger than a step", "weights kept in float32"
    ),
    "attention-logit-growth": Told(
        "the queries and keys of {fault.attention} begin to grow by {fault.factor:.4g} a step",
        "queries and keys kept at their scale",
    ),
    "output-logit-drift": Told(
        "all biases of {fault.head} begin to move together, ever faster", "the output's bias left where it is"
    ),
    "overfitting": Told("there are only {sick.examples} examples to learn from", "{well.examples:,} examples"),
    "data-loading-bound": Told("the loader begins to take {fault.seconds:.3f} s for a batch", "a loader that keeps up"),
    "memory-growth": Told("losses are kept with their graphs", "losses kept as numbers"),
    "throughput-drop": Told(
        "something else on the machine begins to take {fault.seconds:.3f} s of each step", "the machine for itself"
    ),
}
