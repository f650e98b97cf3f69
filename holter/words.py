"""Names and numbers as people read them in a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def printable(text: str) -> str:
    r"""The text with everything invisible written out: control, bidirectional and broken characters.

    >>> printable("a\x1b[31m\u202eb")
    'a\\x1b[31m\\u202eb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def digits(value: float, count: int) -> str:
    """So many digits that count, and written out below a million: Python would write 99.6 in two digits as 1e+02.

    >>> digits(99.6, 2), digits(0.0123, 2), digits(1.23e9, 2)
    ('100', '0.012', '1.2e+09')
    """
    text = f"{value:.{count}g}"
    return f"{float(text):,.0f}" if "e+" in text and abs(value) < 1e6 else text


def number(value: float | None) -> str:
    """Three digits that count.

    >>> [number(v) for v in (1234.5, 0.01234, 1.234e-9, float("nan"), None)]
    ['1,234', '0.0123', '1.23e-09', 'nan', '–']
    """
    if value is None:
        return "–"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else digits(value, 3)


def times(ratio: float) -> str:
    """A ratio: 0.0076×, 47×."""
    if math.isnan(ratio):
        return "–"
    return f"{ratio:,.0f}×" if 10 <= ratio < 1e6 else f"{ratio:.2g}×"


def share(value: float) -> str:
    """A share in percent; what is a little above nothing does not read as nothing."""
    if math.isnan(value):
        return "–"
    if value in (0, 1):
        return f"{100 * value:.0f} %"
    return f"{100 * value:.2g} %" if 0.001 <= value < 0.995 else "<0.1 %" if value < 0.5 else ">99 %"


def stage_name(stage: str) -> str:
    """What a stage of a step covers: after the forward come the loss, the backward and all else up to the step.

    >>> stage_name("backward"), stage_name("forward")
    ('loss and backward', 'forward')
    """
    return "loss and backward" if stage == "backward" else stage


def share_range(values: Iterable[float]) -> str:
    """Shares from the lowest to the highest.

    >>> share_range([0.81, 1.0]), share_range([0.5])
    ('81 to 100 %', '50 %')
    """
    known = list(values)
    low, high = share(min(known)), share(max(known))
    return high if low == high else f"{low.removesuffix(' %')} to {high}"


def amount(count: float | None, units: Sequence[str] = ("", " K", " M", " B", " T"), step: int = 1000) -> str:
    """A large count in a fitting unit: 1.23 M."""
    if count is None:
        return "–"
    power = 0
    while abs(count) >= step and power < len(units) - 1:
        count, power = count / step, power + 1
    return f"{digits(count, 3)}{units[power]}" if power else f"{count:.0f}{units[0]}"


def size(count: int | None) -> str:
    return amount(count, (" B", " KiB", " MiB", " GiB", " TiB"), 1024)


def duration(seconds: float) -> str:
    """In the largest unit of which there are two; what is short, in milliseconds.

    >>> [duration(seconds) for seconds in (0, 0.0025, 0.18, 42, 7200)]
    ['0 s', '2.5 ms', '0.18 s', '42 s', '2 h']
    """
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    if 0 < seconds < 0.1:
        return f"{digits(1000 * seconds, 2)} ms"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{max(seconds, 0.0):.2g} s"
