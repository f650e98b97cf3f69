"""Anatomy: how the layers of a model belong together. Modules and their parameters, what comes first, what is alike."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable

import numpy as np

from holter.diagnosis.chart import Chart, until_news
from holter.series import Flags, Integers

ROOT = "model"  # the module without a name, among those whose activations are looked at
NOT_HIDDEN = ("embedding", "norm", "output")  # parts that no signal only passes through
# Kinds of modules that multiply a signal with their weights; in others only what is called a weight does that.
PASSES = ("Linear", "Conv", "RNN", "LSTM", "GRU", "Bilinear")
_A_WEIGHT = re.compile(r"(^|_)(w|weights?|kernel|proj|matrix)\d*(_|$)", re.IGNORECASE)
_USED_UNCALLED = "NonDynamicallyQuantizableLinear"
_TRANSPOSED = ("Conv1D", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")  # laid out from inputs to outputs


def owner(parameter: str) -> str:
    """The module whose parameter it is; a parametrised weight belongs to the module that uses it.

    >>> owner("head.parametrizations.weight.original0"), owner("blocks.0.up.weight")
    ('head', 'blocks.0.up')
    """
    module, is_parametrised, _ = parameter.partition(".parametrizations.")
    return module if is_parametrised else parameter.rpartition(".")[0]


def kind_of(name: str) -> str:
    """A name without its numbers: what stands in several places of a model has the same in all of them.

    >>> kind_of("blocks.3.up.weight") == kind_of("blocks.11.up.weight"), kind_of("student.0") == kind_of("teacher.0")
    (True, False)
    """
    return re.sub(r"\d+", "#", name)


def is_within(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def first_in_depth(chart: Chart, names: Iterable[str]) -> str:
    return chart.in_depth(names)[0]


def last_in_depth(chart: Chart, names: Iterable[str]) -> str:
    return chart.in_depth(names)[-1]


def holder(chart: Chart, names: Collection[str], parameter: str) -> str:
    """The outermost module with this parameter all of whose parameters are among the names; else the parameter."""
    chosen, every = set(names), chart.parameters
    found = parameter
    module = owner(parameter)
    while module:
        inside = [name for name in every if is_within(name, module)]
        if not inside or not chosen.issuperset(inside):
            break
        found, module = module, module.rpartition(".")[0]
    return found


def is_upstream(chart: Chart, names: Collection[str], others: Collection[str]) -> bool:
    """Whether all of these come before all of the others, as far as the order is known."""
    if not chart.depth or not names or not others:
        return False
    end = len(chart.depth)
    return max(chart.depth.get(name, end) for name in names) < min(chart.depth.get(name, end) for name in others)


def did_run(chart: Chart, parameter: str) -> bool:
    """Whether the module that it is used by was seen in a forward. One that holds others may well not use a parameter
    of its own; and torch's attention uses the weights of its output layer without calling that."""
    module = owner(parameter)
    if chart.module(parameter) == _USED_UNCALLED:
        return module.rpartition(".")[0] in chart.depth
    return module in chart.depth and not holds_others(chart, module)


@until_news
def holds_others(chart: Chart, module: str) -> bool:
    """Whether parameters of other modules lie within it."""
    return any(is_within(name, module) and owner(name) != module for name in chart.parameters)


def ends_a_line(name: str, others: Collection[str]) -> bool:
    """Return whether the parameter lies in a numbered module that follows all those of its line with one of the others.

    >>> learning = ("blocks.0.up.weight", "blocks.1.up.weight", "head.weight")
    >>> ends_a_line("blocks.2.up.weight", learning), ends_a_line("blocks.1.gate.weight", learning)
    (True, False)
    """
    for found in re.finditer(r"(?<![^.])\d+(?=\.)", name):
        line = re.compile(re.escape(name[: found.start()]) + r"(\d+)\.")
        numbers = [int(match[1]) for other in others if (match := line.match(other))]
        if numbers and max(numbers) < int(found[0]):
            return True
    return False


def elements(chart: Chart, names: Iterable[str]) -> int:
    return sum(math.prod(chart.shape(name)) for name in names)


def fan_in(chart: Chart, parameter: str) -> int:
    """How many numbers make up one of a layer's outputs."""
    shape = chart.shape(parameter)
    if len(shape) < 2:
        return 1
    if chart.module(parameter) in _TRANSPOSED:
        return max(1, shape[0] * math.prod(shape[2:]))
    return max(1, math.prod(shape[1:]))


def units(chart: Chart, parameter: str) -> int:
    """How many numbers a matrix puts out, for each of which it has a line of weights."""
    return chart.shape(parameter)[1 if chart.module(parameter) in _TRANSPOSED else 0]


def channels_read(chart: Chart, parameter: str) -> int:
    """How many numbers a matrix takes in, or channels, however large a kernel is."""
    return chart.shape(parameter)[0 if chart.module(parameter) in _TRANSPOSED else 1]


def reads_without(chart: Chart, names: Iterable[str], others: Iterable[str]) -> bool:
    """Whether these layers, by the numbers that they read and put out, need nothing that the others make.

    A student beside its teacher is so: its first layer reads what the teacher's first one reads, and every later one
    what another of its own puts out. Where the others put out as many numbers as the first reads, they may as well be
    what it reads, unless they are of the same shapes, one by one: a copy.
    """
    mine, theirs = ([name for name in chart.in_depth(some) if chart.is_matrix(name)] for some in (names, others))
    if not mine or not theirs:
        return False
    first, read = mine[0], _read_and_put_out(chart, mine[0])[0]
    is_alike = _is_table(chart, first) == _is_table(chart, theirs[0])
    if not is_alike or read != _read_and_put_out(chart, theirs[0])[0]:
        return False
    may_follow = not _is_table(chart, first) and any(read == _read_and_put_out(chart, name)[1] for name in theirs)
    if may_follow and sorted(map(chart.shape, mine)) != sorted(map(chart.shape, theirs)):
        return False
    known, channels = {read}, set[int]()
    for name in mine:
        needed, made = _read_and_put_out(chart, name)
        if needed not in known and not any(needed % one == 0 for one in channels):
            return False
        known.add(made)
        channels |= {made} if len(chart.shape(name)) > 2 else set()  # an image is read in one go, pixel by pixel
    return True


def _is_table(chart: Chart, parameter: str) -> bool:
    return chart.part(parameter) == "embedding" and len(chart.shape(parameter)) == 2


def _read_and_put_out(chart: Chart, parameter: str) -> tuple[int, int]:
    """How many numbers, or words, a matrix reads and how many numbers it puts out."""
    if _is_table(chart, parameter):
        return chart.shape(parameter)[0], chart.shape(parameter)[1]
    return channels_read(chart, parameter), units(chart, parameter)


def is_multiplied(chart: Chart, parameter: str) -> bool:
    """Whether a signal is multiplied with it, as far as is known: a matrix may hold logarithms or first states too.

    Of modules of the user's own it is told by the name of the parameter.
    """
    kind = chart.module(parameter)
    is_map = not kind or any(word in kind for word in PASSES)
    own = parameter.rpartition(".")[2]
    return is_map or (_A_WEIGHT.search(own) is not None and not own.endswith("bias"))


@until_news
def hidden_matrices(chart: Chart, names: tuple[str, ...]) -> list[int]:
    """Places of the weights that the signal passes through between the input and the output, in this order."""
    end = len(chart.depth)
    chosen = [
        place
        for place, name in enumerate(names)
        if chart.is_matrix(name)
        and chart.part(name) not in NOT_HIDDEN
        and fan_in(chart, name) > 1
        and is_multiplied(chart, name)
    ]
    return sorted(chosen, key=lambda place: chart.depth.get(names[place], end))


@until_news
def output_matrix(chart: Chart) -> str | None:
    """The weight that makes the model's output, where it is known; it may be the embedding's."""
    found = [name for name in chart.parameters if chart.part(name) == "output" and chart.is_matrix(name)]
    if found:
        return found[-1]
    return next((name for name in chart.parameters if chart.told(name, "tied_to") and chart.is_matrix(name)), None)


def began(steps: Integers, holds: Flags) -> int | None:
    """The step since which something has held without a break; None where it does not hold at the last one."""
    if not len(holds) or not holds[-1]:
        return None
    before = np.flatnonzero(~holds)
    return int(steps[before[-1] + 1 if len(before) else 0])
