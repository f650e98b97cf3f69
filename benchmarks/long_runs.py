"""Made-up runs of a given size, as a training would have recorded them: python -m benchmarks.long_runs DIR LAYERS STEPS

For measuring how quickly pages of long runs open. Gradients at every step, updates and moments every 10, weights,
activations and histograms every 100.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from holter.journal import Journal
from holter.record import Ending, LayerRows, Record
from holter.run import journal_path, write_info
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, Rows

_ELEMENTS = 4096
Floats = npt.NDArray[np.float64]


def make(directory: Path, layers: int, steps: int) -> Path:
    """A run whose last layer but one begins to vanish in its last third."""
    directory.mkdir(parents=True, exist_ok=True)
    names = tuple(f"h.{place // 4}.{('attn', 'proj', 'fc', 'out')[place % 4]}.weight" for place in range(layers))
    listed = [{"name": name, "shape": [64, 64], "dtype": "float32"} for name in names]
    write_info(
        directory, {"created": time.time(), "model": "MadeUp", "parameters": layers * _ELEMENTS, "layers": listed}
    )
    journal = Journal(journal_path(directory, 0, 0))
    random = np.random.default_rng(0)
    sizes = 0.1 * 10 ** random.normal(0, 0.3, layers)
    samples = Histograms.of([size * random.normal(size=_ELEMENTS) for size in sizes])
    noise = 10 ** random.normal(0, 0.05, (1000, layers))
    for step in range(steps):
        now = sizes * noise[step % 1000]
        if step > 2 * steps // 3:
            now[-2] *= 1e-4
        journal.append(_record(step, steps, names, now, samples))
    journal.append(Ending(time.time(), "finished"))
    journal.close()
    return directory


def _record(step: int, steps: int, names: tuple[str, ...], sizes: Floats, samples: Histograms) -> Record:
    rows = {"gradient": LayerRows(names, Rows(_values(sizes), samples if step % 100 == 0 else None))}
    if step % 10 == 0:
        updates = {"ratio": sizes / 100, "unchanged": np.zeros(len(names)), "cosine": np.tanh(sizes)}
        rows["update"] = LayerRows(names, Rows(_values(sizes / 1000)), updates)
        rows["momentum"] = LayerRows(names, Rows(_values(sizes)))
    if step % 100 == 0:
        rows["weight"] = LayerRows(names, Rows(_values(10 * sizes), samples))
        rows["activation"] = LayerRows(names, Rows(_values(sizes)), {"dead": sizes / 10})
    norm = float(np.sqrt((sizes**2).sum()))
    loss = 4 * (1 + step) ** -0.1 + 0.01 * float(sizes[0])
    scalars = {"loss": loss, "gradient_norm": norm, "learning_rate": 1e-3 * (1 - step / steps), "step_time": 0.1}
    scalars |= {"monitor_cost": 0.005, "time/forward": 0.03, "time/backward": 0.06, "time/optimizer": 0.01}
    return Record(step=step, time=1.7e9 + 0.1 * step, scalars=scalars, rows=rows)


def _values(sizes: Floats) -> Floats:
    values = np.zeros((len(sizes), len(COLUMNS)))
    powers = {"count": 0 * sizes + _ELEMENTS, "sum": sizes, "sum_abs": 0.8 * _ELEMENTS * sizes}
    powers |= {"sum_squares": _ELEMENTS * sizes**2, "sum_fourths": 3 * _ELEMENTS * sizes**4}
    powers |= {"min": -4 * sizes, "max": 4 * sizes}
    for name, column in powers.items():
        values[:, COLUMNS.index(name)] = column
    return values


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_runs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("layers", type=int)
    parser.add_argument("steps", type=int)
    options = parser.parse_args()
    began = time.perf_counter()
    made = make(options.directory, options.layers, options.steps)
    size = sum(path.stat().st_size for path in made.iterdir())
    sys.stdout.write(f"{made.name}: {size / 1e6:,.0f} MB in {time.perf_counter() - began:.0f} s\n")


if __name__ == "__main__":
    main()
