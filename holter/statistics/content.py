"""What tensors of a batch hold: a hash of their bits, and the entropy of labels. On their device, without waiting.

**The hash** is multilinear: the bits, taken as 32-bit words in the order of the elements, times pseudo-random odd
64-bit numbers, summed modulo 2^64; rows of words first, then the sums of the rows in the same way. Whole numbers add
up to the same bits in any order, so it is the same on every device and in every run. Its upper 53 bits are kept, which
float64 holds exactly. Two batches that differ at all share a hash by chance only, once in 2^33 or more; it is no
protection against someone who looks for two that do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from holter.statistics.device_rows import widest

_ROW = 1 << 14  # words; on the CPU a row times its multipliers stays in a core's cache, and on one thread
_ROWS_ON_DEVICE = 256  # at once, elsewhere than on the CPU: 32 MiB of products
_KEPT = 53  # bits
_CLASSES = 1 << 16  # that are told apart: labels are counted modulo this
_MOST_LABELS = 1 << 18  # that are counted; of more, every so many


def contents(tensors: Sequence[Tensor], are_labels: Sequence[bool]) -> Tensor:
    """The hash and the label entropy of each tensor, [n, 2] in float64; all of them on one device."""
    device = tensors[0].device
    with torch.inference_mode(False), torch.no_grad():
        if widest(device) is not torch.float64:  # there is nothing that could hold a hash
            return nothing_known(len(tensors), device)
        unknown = torch.full((), torch.nan, dtype=torch.float64, device=device)
        plain = [_local(tensor) for tensor in tensors]
        entropies = [
            label_entropy(tensor) if is_label and _is_whole(tensor) else unknown
            for tensor, is_label in zip(plain, are_labels, strict=True)
        ]
        return torch.stack([content_hashes(plain), torch.stack(entropies)], dim=1)


def nothing_known(count: int, device: torch.device) -> Tensor:
    """In place of `contents`, where they were not looked at."""
    return torch.full((count, 2), torch.nan, dtype=torch.float32, device=device)


def _local(tensor: Tensor) -> Tensor:
    plain: Tensor = tensor.detach()
    return plain.to_local() if hasattr(plain, "to_local") else plain  # of a DTensor this process's shard


def _is_whole(tensor: Tensor) -> bool:
    """Whether it holds whole numbers, a class each."""
    return tensor.layout is torch.strided and not tensor.is_floating_point() and not tensor.is_complex()


# The hash -------------------------------------------------------------------------------------------------------


def content_hashes(tensors: Sequence[Tensor]) -> Tensor:
    """Whole numbers below 2^53, float64 [n]: of dtype, shape and every bit of each tensor, wherever it lies in memory.

    A sparse tensor counts as it is stored: its indices and values, coalesced or not.
    """
    totals = torch.stack([_total(tensor) for tensor in tensors])
    return ((totals >> (64 - _KEPT)) & ((1 << _KEPT) - 1)).double()


def _total(tensor: Tensor) -> Tensor:
    make = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}".encode()
    total = torch.full((), _signed(_GOLDEN * (2 * crc32(make) + 1)), dtype=torch.int64, device=tensor.device)
    for place, part in enumerate(_strided(tensor)):
        if part.numel():
            total += _signed(_GOLDEN * (2 * place + 1)) * _sum(_row_sums(part))
    return total


def _strided(tensor: Tensor) -> tuple[Tensor, ...]:
    """What a tensor is made of, as strided real numbers or bits."""
    if tensor.layout is torch.sparse_coo:
        return *_strided(tensor._indices()), *_strided(tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), *_strided(tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), *_strided(tensor.values())
    plain = tensor.resolve_neg()
    return (torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain,)


def _row_sums(tensor: Tensor) -> Tensor:
    """The sum of each row of words times its multipliers, int64 [rows]; the last row may be shorter."""
    multipliers = _multipliers(tensor.device)
    sums = []
    for words in _words(tensor):
        whole = words.numel() // _ROW * _ROW
        if whole:
            sums.append((words[:whole].view(-1, _ROW) * multipliers).sum(1))
        if whole < words.numel():
            rest = words[whole:]
            sums.append((rest * multipliers[: rest.numel()]).sum(0, keepdim=True))
    return torch.cat(sums) if len(sums) > 1 else sums[0]


def _sum(sums: Tensor) -> Tensor:
    """The sums of rows are words of further rows, until one is left."""
    multipliers = _multipliers(sums.device)
    while sums.numel() > 1:
        sums = torch.stack([(row * multipliers[: row.numel()]).sum() for row in sums.split(_ROW)])
    return sums.view(())


def _words(tensor: Tensor) -> Iterator[Tensor]:
    """Its bits as int32, whole rows at a time, in the order of its elements; the end is filled up with zero bits."""
    each = _ROW * 4 // tensor.element_size()  # elements of a row
    step = each * (1 if tensor.device.type == "cpu" else _ROWS_ON_DEVICE)
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        for start in range(0, flat.numel(), step):
            yield _as_words(flat[start : start + step])
        return
    inner = tensor.numel() // tensor.size(0)
    step = max(step, -(-inner // each) * each)  # what is copied twice stays little
    for start in range(0, tensor.numel(), step):
        stop = min(start + step, tensor.numel())
        first, last = start // inner, -(-stop // inner)
        yield _as_words(tensor[first:last].reshape(-1)[start - first * inner : stop - first * inner])


def _as_words(flat: Tensor) -> Tensor:
    flat = flat.contiguous()  # a column of a matrix is in a line already, and yet strided
    size = flat.element_size()
    if size < 4:
        if missing := -flat.numel() * size % 4:
            flat = torch.nn.functional.pad(flat.view(torch.uint8), (0, missing))
        elif flat.storage_offset() * size % 4 or flat.data_ptr() % 4:
            flat = flat.clone()  # it begins in the middle of a word
    return flat.view(torch.int32)


_GOLDEN = 0x9E3779B97F4A7C15


@cache
def _multipliers(device: torch.device) -> Tensor:
    """Pseudo-random odd numbers, the same everywhere: SplitMix64 (Steele, Lea and Flood 2014)."""
    z = torch.arange(1, _ROW + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31) | 1


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shifted right without the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """Modulo 2^64, as int64 holds it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


# Labels ---------------------------------------------------------------------------------------------------------


def label_entropy(labels: Tensor) -> Tensor:
    """Of the classes among whole numbers, in nats: 0 where all are the same, ln K for K classes in equal shares.

    Negative labels (-100, which losses ignore) are left out; NaN where no other is there. Labels count modulo 65,536:
    of a larger vocabulary those that far apart are taken for one. Of more than 2^18 labels every so many are counted.
    """
    stride = -(-labels.numel() // _MOST_LABELS) | 1  # odd: images have rows of even lengths
    if labels.device.type == "cpu":
        return torch.tensor(_entropy_on_host(labels, stride), dtype=torch.float64, device="cpu")
    return _entropy_on_device(labels, stride)


def _entropy_on_host(labels: Tensor, stride: int) -> float:
    """By numpy, which stays on its thread: waking torch's others takes longer than this does."""
    found = labels.numpy().reshape(-1)[::stride]
    counts = np.bincount(found[found >= 0].astype(np.int64) & (_CLASSES - 1))
    shares = counts[counts > 0] / max(counts.sum(), 1)
    return max(-float((shares * np.log(shares)).sum()), 0.0) if shares.size else math.nan


def _entropy_on_device(labels: Tensor, stride: int) -> Tensor:
    """With counts c of n labels it is ln n - (sum of c ln c) / n, and c ln c is ln c for each label of a class.

    To count as bincount and unique do would be to wait: they ask how many classes there are.
    """
    flat = labels.reshape(-1)[::stride].long()
    is_counted, place = (flat >= 0).long(), flat & (_CLASSES - 1)
    counts = torch.zeros(_CLASSES, dtype=torch.int64, device=flat.device).scatter_add_(0, place, is_counted)
    number = is_counted.sum().double()
    logs = counts.gather(0, place).clamp_(min=1).double().log_()
    return (number.log() - (logs * is_counted).sum() / number).clamp(min=0)
