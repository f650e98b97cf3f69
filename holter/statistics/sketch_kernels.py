"""The kernels of sketches. A tensor is read as lines of WIDTH elements, whose columns are added up with random signs:
a program a stretch of lines and a block of columns, then the stretches of a tensor in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from holter.statistics.sketch import WIDTH

_FOLD = tl.constexpr(WIDTH)


@triton.jit
def fold_stretches(
    addresses, kinds, sizes, tensor_of_stretch, line_of_stretch, partials,
    KINDS: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a stretch and block of its columns."""
    stretch = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tensor = tl.load(tensor_of_stretch + stretch)
    line = tl.load(line_of_stretch + stretch)
    size = tl.load(sizes + tensor)
    address = tl.load(addresses + tensor)
    kind = tl.load(kinds + tensor)
    total = tl.zeros([BLOCK], tl.float64)
    if (KINDS & 1) != 0 and kind == 0:
        total = _folded(address.to(tl.pointer_type(tl.float32)), size, line, columns, tl.float32, LINES, BLOCK)
    if (KINDS & 2) != 0 and kind == 1:
        total = _folded(address.to(tl.pointer_type(tl.float16)), size, line, columns, tl.float32, LINES, BLOCK)
    if (KINDS & 4) != 0 and kind == 2:
        total = _folded(address.to(tl.pointer_type(tl.bfloat16)), size, line, columns, tl.float32, LINES, BLOCK)
    if (KINDS & 8) != 0 and kind == 3:
        total = _folded(address.to(tl.pointer_type(tl.float64)), size, line, columns, tl.float64, LINES, BLOCK)
    tl.store(partials + stretch * _FOLD + columns, total)


@triton.jit
def _folded(values, size, line, columns, WORKING: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float64)
    for step in range(tl.minimum(LINES, tl.cdiv(size, _FOLD) - line)):
        places = (line + step) * _FOLD + columns
        x = tl.load(values + places, mask=places < size, other=0.0).to(WORKING)
        total += tl.where(_is_negative(places) & (size > _FOLD), -x, x).to(tl.float64)
    return total


@triton.jit
def _is_negative(places):
    """A random bit for every place: neighbours, rows and columns have nothing in common."""
    bits = (places ^ (places >> 31) * 0x27D4EB2F).to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return ((bits ^ (bits >> 16)) & 1) != 0


@triton.jit
def add_stretches(partials, first_of_tensor, place_of_tensor, sketches, BLOCK: tl.constexpr):
    """A program a tensor and block of its columns: its stretches, one after the other."""
    tensor = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(place_of_tensor + tensor)
    width = tl.load(place_of_tensor + tensor + 1) - place
    first = tl.load(first_of_tensor + tensor)
    last = tl.load(first_of_tensor + tensor + 1)
    total = tl.zeros([BLOCK], tl.float64)
    for stretch in range(first, last):
        total += tl.load(partials + stretch * _FOLD + columns)
    tl.store(sketches + place + columns, total, mask=columns < width)
