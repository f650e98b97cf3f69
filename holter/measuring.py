"""Measuring what is due: rows of named tensors, a part a device, with their cost noted."""

from __future__ import annotations

import torch
from torch import Tensor

from holter.cadence import Cadence
from holter.problems import Complaint, Problems
from holter.statistics.device_rows import DeviceRows
from holter.statistics.measure import Measurer, are_alike, unmeasurable


class Measuring:
    """One for all roles of a training: they share what the backends keep for lists of the same make."""

    def __init__(self, cadence: Cadence, problems: Problems) -> None:
        self.cadence, self._problems = cadence, problems
        self.measurer = Measurer(lambda error: problems.add("measure in one launch, plain torch takes over", error))

    def measure(
        self, kind: str, names: list[str], tensors: list[Tensor], every: int
    ) -> list[tuple[list[str], DeviceRows]]:
        """Rows of these tensors, a part a device; of a kind that is measured every so many steps."""
        histograms = self.cadence.wants_histogram(kind, every)
        parts = []
        for device_names, device_tensors in self.by_device(names, tensors):
            with self.cadence.account(kind, histograms, device_tensors):
                parts.append((device_names, self.measurer.measure(device_tensors, histograms=histograms)))
        return parts

    def by_device(self, names: list[str], tensors: list[Tensor]) -> list[tuple[list[str], list[Tensor]]]:
        """Those that can be measured, a part a device; of the others it is told why not."""
        if are_alike(tensors):  # as in most trainings: one look is enough for all of them
            return [(names, tensors)]
        groups: dict[torch.device, tuple[list[str], list[Tensor]]] = {}
        for name, tensor in zip(names, tensors, strict=True):
            refused = unmeasurable(tensor)
            if refused is not None:
                self._problems.add(f"measure {name}", Complaint(refused))
                continue
            if is_part(tensor):
                self._problems.add("merge shards", Complaint("only this process's part of sharded tensors is measured"))
            group = groups.setdefault(tensor.device, ([], []))
            group[0].append(name)
            group[1].append(tensor)
        return list(groups.values())


def is_part(tensor: Tensor) -> bool:
    """Whether other processes hold more of it."""
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    if mesh is None or placements is None:
        return hasattr(tensor, "to_local")
    return bool(mesh.size() > 1 and not all(placement.is_replicate() for placement in placements))
