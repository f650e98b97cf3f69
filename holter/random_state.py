"""The random numbers of Python and numpy, kept as they are where other packages are loaded or asked: some draw one."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the states of the global generators back at the end. A user's seed holds, whatever is loaded (P2)."""
    python = random.getstate()
    numpy = sys.modules.get("numpy.random")  # not loaded: nobody has seeded it
    arrays = numpy.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(arrays)
