"""Runs side by side. Each comparison is worked out in a process that ends with it: it reads runs from end to end."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Hashable, Sequence

import anyio
from anyio import to_thread

from holter.dashboard.bodies import Body, body
from holter.dashboard.process import Died, Process
from holter.dashboard.shelf import Listed

_KEPT = 8
_TROUBLE = b'{"trouble"'


class Comparisons:
    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Body] = OrderedDict()
        self._one_at_a_time = anyio.Lock()

    async def of(self, runs: Sequence[Listed]) -> Body:
        """The JSON of a comparison, worked out once for the same state of the same runs.

        ValueError says why there is none.
        """
        key = tuple((run.id, run.extent, run.glance.state) for run in runs)
        if key in self._kept:
            return self._kept[key]
        async with self._one_at_a_time:
            if key not in self._kept:
                self._kept[key] = await _worked_out([str(run.path) for run in runs])
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            return self._kept[key]


async def _worked_out(paths: Sequence[str]) -> Body:
    process = Process()
    try:
        line = await process.ask({"compare": paths})
    except Died as error:
        raise ValueError(f"these runs could not be compared ({error})") from error
    finally:
        await process.stop()
    if line.startswith(_TROUBLE):
        raise ValueError(json.loads(line)["trouble"])
    return await to_thread.run_sync(body, line.strip(), "application/json")
