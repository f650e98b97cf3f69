"""Data made on the spot: Python's own sources as text, scikit-learn's digits as images."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset

BYTES = 256  # the vocabulary of a byte-level model

_MODULES = ("argparse", "ast", "dataclasses", "datetime", "decimal", "inspect", "pathlib", "statistics", "textwrap")


def text() -> str:
    """Some hundred thousand characters of Python."""
    home = Path(sysconfig.get_paths()["stdlib"])
    files = (home / f"{name}.py" for name in _MODULES)
    return "".join(file.read_text("utf-8") for file in files if file.exists())


def token_windows(count: int, length: int, vocabulary: int = BYTES) -> Tensor:
    """Bytes of text, [count, length], from places spread evenly; folded into a smaller vocabulary where asked."""
    data = torch.tensor(list(text().encode("utf-8")), dtype=torch.long) % vocabulary
    starts = torch.linspace(0, len(data) - length - 1, count).long()
    return data[starts[:, None] + torch.arange(length)]


def lines(least: int = 20, most: int = 80) -> list[str]:
    """Lines of code of a length in between, each once."""
    found = (line.strip() for line in text().splitlines())
    return list(dict.fromkeys(line for line in found if least <= len(line) <= most))


def digits(size: int = 8, channels: int = 1) -> tuple[Tensor, Tensor]:
    """1,797 images [n, channels, size, size] of zero mean and unit variance, shuffled, and their classes."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None]
    images = (images - images.mean()) / images.std()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    if size != 8:
        images = torch.nn.functional.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return images[order].expand(-1, channels, -1, -1).contiguous(), torch.tensor(found.target)[order]


class Dictionaries(Dataset[dict[str, Tensor]]):
    """A dataset of dictionaries, as transformers likes them, from columns of one length."""

    def __init__(self, **columns: Tensor) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {name: column[place] for name, column in self._columns.items()}
