"""Numbers as people read them: no exponent where the number itself is as short."""

from __future__ import annotations

import re

import numpy as np
import pytest

from holter.words import amount, digits, duration, number, share, size, times


def test_what_is_below_a_million_is_written_out() -> None:
    """Python writes 99.6 in two digits as 1e+02: at every power of ten there is a value that is rounded up to it."""
    values = [*np.geomspace(1e-3, 9.99e5, 2000), *(10.0**power * (1 - 1e-4) for power in range(6))]
    for value in map(float, values):
        told = [number(value), number(-value), digits(value, 2), amount(value), size(int(value)), duration(value)]
        told += [duration(value / 1000), times(value), size(int(1024 * value))]
        assert not [text for text in told if "e+" in text], (value, told)
        assert float(digits(value, 2).replace(",", "")) == pytest.approx(value, rel=0.051)
        assert float(number(value).replace(",", "")) == pytest.approx(value, rel=0.0051)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (duration(0.0996), "100 ms"),
        (number(999.7), "1,000"),
        (digits(165.3, 2), "170"),
        (digits(1.7e9, 2), "1.7e+09"),
        (size(1010 * 2**20), "1,010 MiB"),
        (amount(999_900), "1,000 K"),
        (times(653.2), "653×"),
        (share(0.5), "50 %"),
        (number(float("inf")), "inf"),
    ],
)
def test_numbers_that_were_told_in_exponents(told: str, expected: str) -> None:
    assert told == expected


def test_small_numbers_keep_their_exponents() -> None:
    assert re.fullmatch(r"1\.2e-07", digits(1.2e-7, 2)) and number(1.234e-9) == "1.23e-09"
