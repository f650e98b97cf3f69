"""The kernels: one launch measures every tensor of a list, whatever their number, size and dtype.

Tensors are cut into chunks, a program each. A whole chunk of ordinary numbers is summed in one unguarded pass; what
is partial, holds NaN or Inf, or is so large or small that fourth powers leave float32, is read again with care. A
second kernel adds the chunks of a tensor in their order and in float64: the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from holter.statistics.histogram import HALF as _HALF
from holter.statistics.histogram import SHIFT as _SHIFT
from holter.statistics.histogram import SIZE as _SIZE

# Dtypes that the kernels read, by their place in `triton_rows.DTYPES`; everything else is converted beforehand.
FLOAT32, FLOAT16, BFLOAT16, FLOAT64 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
COLUMNS = tl.constexpr(11)
STRIDE = tl.constexpr(16)  # columns of a partial row in memory: a power of two
HALF, SHIFT, SIZE = tl.constexpr(_HALF), tl.constexpr(_SHIFT), tl.constexpr(_SIZE)
INFINITE = tl.constexpr(0x7F800000)  # the bits of float32's infinity; NaN is above
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Fourth powers are taken of 4096 x. Sums of a chunk then neither overflow nor lose digits for these largest values.
LIFT = tl.constexpr(4096.0)
LEAST, MOST = tl.constexpr(2.0**-34), tl.constexpr(2.0**15)
BINS, SIGN = tl.constexpr(128), tl.constexpr(64)  # buckets counted at once: 64 of each sign
FEW = tl.constexpr(32)  # of a block outside of them: they are added one by one
MANY = tl.constexpr(16)  # chunks of a tensor of which a sample is enough


@triton.jit
def measure_chunks(
    addresses, kinds, tensor_of_chunk, start_of_chunk, length_of_chunk, partials,
    KINDS: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A program a chunk: its partial row."""
    chunk = tl.program_id(0)
    tensor = tl.load(tensor_of_chunk + chunk)
    start = tl.load(start_of_chunk + chunk)
    length = tl.load(length_of_chunk + chunk)
    address = tl.load(addresses + tensor)
    kind = tl.load(kinds + tensor)
    row = partials + chunk.to(tl.int64) * STRIDE
    if (KINDS & 1) != 0 and kind == FLOAT32:
        _measure(address.to(tl.pointer_type(tl.float32)) + start, length, row, LINES, WIDTH, TILES)
    if (KINDS & 2) != 0 and kind == FLOAT16:
        _measure(address.to(tl.pointer_type(tl.float16)) + start, length, row, LINES, WIDTH, TILES)
    if (KINDS & 4) != 0 and kind == BFLOAT16:
        _measure(address.to(tl.pointer_type(tl.bfloat16)) + start, length, row, LINES, WIDTH, TILES)
    if (KINDS & 8) != 0 and kind == FLOAT64:  # its own range is wide enough for any fourth power of float32's
        values = address.to(tl.pointer_type(tl.float64)) + start
        _sum_with_care(values, length, row, tl.full([], 1.0, tl.float64), tl.float64, WIDTH)


@triton.jit
def _measure(values, length, row, LINES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr):
    is_sound = False
    if length == LINES * WIDTH * TILES:
        is_sound = _measure_whole(values, row, LINES, WIDTH, TILES)
    if not is_sound:
        _measure_with_care(values, length, row, WIDTH)


@triton.jit
def _measure_whole(values, row, LINES: tl.constexpr, WIDTH: tl.constexpr, TILES: tl.constexpr):
    """One pass without any guard. Returns whether its sums can be trusted."""
    total = tl.zeros([WIDTH], tl.float32)
    absolute = tl.zeros([WIDTH], tl.float32)
    squares = tl.zeros([WIDTH], tl.float32)
    fourths = tl.zeros([WIDTH], tl.float32)
    nonzero = tl.zeros([WIDTH], tl.int32)
    low = tl.full([WIDTH], float("inf"), tl.float32)
    high = tl.full([WIDTH], float("-inf"), tl.float32)
    places = tl.arange(0, LINES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    for tile in range(TILES):
        # Whole chunks start at 16 bytes, which the compiler cannot know: it makes the loads wide.
        pointers = tl.multiple_of(values + tile * (LINES * WIDTH) + places, (16, 16))
        x = tl.load(pointers, eviction_policy="evict_first").to(tl.float32)
        lifted = x * LIFT
        square = lifted * lifted
        total += tl.sum(x, 0)
        absolute += tl.sum(tl.abs(x), 0)
        squares += tl.sum(square, 0)
        fourths += tl.sum(square * square, 0)
        nonzero += tl.sum((x != 0).to(tl.int32), 0)
        low = tl.minimum(low, tl.min(x, 0))
        high = tl.maximum(high, tl.max(x, 0))
    least, most = tl.min(low, 0), tl.max(high, 0)
    top = tl.maximum(most, -least)
    magnitude = tl.sum(absolute, 0)
    unit = 1.0 / LIFT
    count = LINES * WIDTH * TILES
    _store(
        row, count, count - tl.sum(nonzero, 0), 0, 0, 0, tl.sum(total, 0).to(tl.float64), magnitude.to(tl.float64),
        tl.sum(squares, 0).to(tl.float64) * (unit * unit),
        tl.sum(fourths, 0).to(tl.float64) * (unit * unit * unit * unit), least, most,
    )  # fmt: skip
    # A NaN is in the sum only: minimum and maximum pass over it.
    return (((top >= LEAST) & (top <= MOST)) | (top == 0)) & (magnitude == magnitude)


@triton.jit
def _measure_with_care(values, length, row, BLOCK: tl.constexpr):
    """Finds the largest value first, then sums what is finite, scaled by it."""
    places = tl.arange(0, BLOCK)
    tops = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        x = tl.load(values + start + places, mask=start + places < length, other=0.0).to(tl.float32)
        magnitude = x.to(tl.int32, bitcast=True) & MAGNITUDE
        tops = tl.maximum(tops, tl.where(magnitude < INFINITE, magnitude, 0))
    # The power of two that brings the largest value to [1, 2).
    scale = _power_of_two(127 - (tl.max(tops, 0) >> 23))
    _sum_with_care(values, length, row, scale, tl.float32, BLOCK)


@triton.jit
def _power_of_two(exponent):
    """2^exponent, or the nearest that is a normal float32."""
    return (tl.minimum(tl.maximum(exponent + 127, 1), 254) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _sum_with_care(values, length, row, scale, WORK: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], WORK)
    absolute = tl.zeros([BLOCK], WORK)
    squares = tl.zeros([BLOCK], WORK)
    fourths = tl.zeros([BLOCK], WORK)
    nonzero = tl.zeros([BLOCK], tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    positive = tl.zeros([BLOCK], tl.int32)
    negative = tl.zeros([BLOCK], tl.int32)
    low = tl.full([BLOCK], float("inf"), WORK)
    high = tl.full([BLOCK], float("-inf"), WORK)
    for start in range(0, length, BLOCK):
        places = start + tl.arange(0, BLOCK)
        here = places < length
        x = tl.load(values + places, mask=here, other=0.0).to(WORK)
        finite = tl.abs(x) < float("inf")
        nans += (x != x).to(tl.int32)
        positive += (x == float("inf")).to(tl.int32)
        negative += (x == float("-inf")).to(tl.int32)
        nonzero += (finite & (x != 0)).to(tl.int32)
        low = tl.minimum(low, tl.where(here & finite, x, float("inf")))
        high = tl.maximum(high, tl.where(here & finite, x, float("-inf")))
        lifted = tl.where(finite, x, 0.0) * scale
        square = lifted * lifted
        total += lifted
        absolute += tl.abs(lifted)
        squares += square
        fourths += square * square
    unit = 1.0 / scale.to(tl.float64)
    bad = tl.sum(nans, 0), tl.sum(positive, 0), tl.sum(negative, 0)
    zeros = length - tl.sum(nonzero, 0) - bad[0] - bad[1] - bad[2]
    _store(
        row, length, zeros, bad[0], bad[1], bad[2], tl.sum(total, 0).to(tl.float64) * unit,
        tl.sum(absolute, 0).to(tl.float64) * unit, tl.sum(squares, 0).to(tl.float64) * (unit * unit),
        tl.sum(fourths, 0).to(tl.float64) * (unit * unit * unit * unit), tl.min(low, 0), tl.max(high, 0),
    )  # fmt: skip


@triton.jit
def _store(row, count, zeros, nans, positive, negative, total, absolute, squares, fourths, low, high):
    """In the order of rows.COLUMNS."""
    tl.store(row + 0, count * 1.0)
    tl.store(row + 1, zeros * 1.0)
    tl.store(row + 2, nans * 1.0)
    tl.store(row + 3, positive * 1.0)
    tl.store(row + 4, negative * 1.0)
    tl.store(row + 5, total)
    tl.store(row + 6, absolute)
    tl.store(row + 7, squares)
    tl.store(row + 8, fourths)
    tl.store(row + 9, low)
    tl.store(row + 10, high)


@triton.jit
def count_chunks(
    addresses, kinds, tensor_of_chunk, start_of_chunk, length_of_chunk, partials, first_chunk, counts,
    KINDS: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """A program a part of a chunk: its buckets, added to those of the tensor. Needs the partial rows.

    Of tensors with many chunks one block in `SAMPLE` is counted, and stands for all of them.
    """
    chunk = tl.program_id(0)
    tensor = tl.load(tensor_of_chunk + chunk)
    start = tl.load(start_of_chunk + chunk)
    length = tl.load(length_of_chunk + chunk)
    address = tl.load(addresses + tensor)
    kind = tl.load(kinds + tensor)
    is_large = tl.load(first_chunk + tensor + 1) - tl.load(first_chunk + tensor) >= MANY
    row = partials + chunk.to(tl.int64) * STRIDE
    buckets = counts + tensor.to(tl.int64) * SIZE
    first = tl.program_id(1) * (WHOLE // PARTS)
    last = tl.minimum(first + WHOLE // PARTS, length)
    if first < length:
        if (KINDS & 1) != 0 and kind == FLOAT32:
            values = address.to(tl.pointer_type(tl.float32)) + start
            _count(values, first, last, length == WHOLE, is_large, chunk * 31, row, buckets, BLOCK, SAMPLE)
        if (KINDS & 2) != 0 and kind == FLOAT16:
            values = address.to(tl.pointer_type(tl.float16)) + start
            _count(values, first, last, length == WHOLE, is_large, chunk * 31, row, buckets, BLOCK, SAMPLE)
        if (KINDS & 4) != 0 and kind == BFLOAT16:
            values = address.to(tl.pointer_type(tl.bfloat16)) + start
            _count(values, first, last, length == WHOLE, is_large, chunk * 31, row, buckets, BLOCK, SAMPLE)
        if (KINDS & 8) != 0 and kind == FLOAT64:
            values = address.to(tl.pointer_type(tl.float64)) + start
            _count(values, first, last, False, False, 0, row, buckets, BLOCK, SAMPLE)


@triton.jit
def _count(values, first, last, is_whole, is_large, seed, row, buckets, BLOCK: tl.constexpr, SAMPLE: tl.constexpr):
    """Counts the 64 buckets of each sign that begin with the largest value's together, the few others one by one."""
    nonfinite = tl.load(row + 2) + tl.load(row + 3) + tl.load(row + 4)
    top = _single(tl.maximum(tl.load(row + 10), -tl.load(row + 9)))
    exponent = (top.to(tl.int32, bitcast=True) & MAGNITUDE) >> 23
    # Numbers are scaled so that the largest lies in [2^16, 2^17): the lowest bits of its exponent are all ones, and
    # the 64 buckets down to 2.0 are told apart by six bits. Where denormals would fall among them, there is no window.
    has_window = (exponent > 17) & (nonfinite == 0)
    scale = tl.where(has_window, _power_of_two(143 - exponent), 0.0)
    bins = tl.arange(0, BINS)
    counted = tl.zeros([BINS], tl.int32)
    places = tl.arange(0, BLOCK)
    zeros = 0
    others = 0
    each = 1
    if is_whole:
        step = BLOCK
        if is_large and nonfinite == 0:
            each = SAMPLE
            step = BLOCK * SAMPLE
        for start in range(first, last, step):
            # Which block of a group is taken looks random, so that no regular pattern of the tensor is missed.
            chosen = ((seed + start // step) * 40503 >> 7) & (each - 1)
            pointers = tl.multiple_of(values + start + chosen * BLOCK + places, 16)
            bin, left, strays = _window(_single(tl.load(pointers, eviction_policy="evict_first")), scale, each, buckets)
            counted += tl.histogram(bin, BINS)
            zeros += left - strays
            others += left
    else:
        for start in range(first, last, BLOCK):
            x = _single(tl.load(values + start + places, mask=start + places < last, other=0.0))
            bin, left, strays = _window(x, scale, each, buckets)
            counted += tl.histogram(bin, BINS)
            zeros += left - strays - tl.maximum(start + BLOCK - last, 0)  # less the padding
            others += left
    counted = tl.where(bins == 0, counted - others, counted) * each
    bucket = (bins & (SIGN - 1)) + (exponent - 15) * 4 + (bins >= SIGN).to(tl.int32) * HALF
    tl.atomic_add(buckets + bucket, counted.to(buckets.dtype.element_ty), mask=counted > 0, sem="relaxed")
    zeros = tl.cast(zeros * each, buckets.dtype.element_ty)
    tl.atomic_add(buckets, zeros, mask=zeros > 0, sem="relaxed")


@triton.jit
def _window(x, scale, each, buckets):
    """The bin of each value; how many are in bin 0 without belonging there; how many of these were counted here."""
    scaled = x * scale
    inside = tl.abs(scaled) >= 2.0
    bits = tl.where(inside, scaled, 0.0).to(tl.int32, bitcast=True)
    is_stray = (inside == 0) & (x != 0)  # NaN is one
    both = tl.sum(tl.where(inside, 0, tl.where(x != 0, 65537, 1)), 0)  # two counts in one sum
    if both > 65536:
        _count_strays(x, is_stray, both >> 16, each, buckets)
    return ((bits >> SHIFT) & (SIGN - 1)) | ((bits >> 25) & SIGN), both & 65535, both >> 16


@triton.jit
def _count_strays(x, is_stray, strays, each, buckets):
    """From the largest of them downwards, 63 buckets of each sign at a time, until few are left."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = (bits & MAGNITUDE) >> SHIFT
    sign = (bits < 0).to(tl.int32)
    bins = tl.arange(0, BINS)
    while strays > FEW:
        lower = tl.max(tl.where(is_stray, magnitude, 0), 0) - (SIGN - 1)
        inside = is_stray & (magnitude > lower)
        found = tl.histogram(tl.where(inside, magnitude - lower + sign * SIGN, 0), BINS)
        found = tl.where((bins & (SIGN - 1)) == 0, 0, found)
        bucket = lower + (bins & (SIGN - 1)) + (bins >= SIGN).to(tl.int32) * HALF
        bucket = tl.where(bucket == HALF, 0, bucket)
        tl.atomic_add(buckets + bucket, (found * each).to(buckets.dtype.element_ty), mask=found > 0, sem="relaxed")
        is_stray = is_stray & (magnitude <= lower)
        strays -= tl.sum(found, 0)
    bucket = magnitude + tl.where(magnitude == 0, 0, sign) * HALF  # what is below 2^-128 has no sign
    one = tl.zeros_like(bucket) + each
    tl.atomic_add(buckets + bucket, one.to(buckets.dtype.element_ty), mask=is_stray, sem="relaxed")


@triton.jit
def _single(x):
    """As float32. What is too large for it is not infinite: the last finite bucket takes it."""
    if x.dtype == tl.float64:
        limit = 3.4028234663852886e38
        x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -limit), limit), x)
    return x.to(tl.float32)


@triton.jit
def add_chunks(partials, first_chunk, rows, BLOCK: tl.constexpr):
    """A program a tensor: its partial rows, added in their order."""
    tensor = tl.program_id(0)
    first = tl.load(first_chunk + tensor)
    last = tl.load(first_chunk + tensor + 1)
    columns = tl.arange(0, STRIDE)
    sums = tl.zeros([STRIDE], tl.float64)
    low = tl.full([STRIDE], float("inf"), tl.float64)
    high = tl.full([STRIDE], float("-inf"), tl.float64)
    for start in range(first, last, BLOCK):
        lines = start + tl.arange(0, BLOCK)
        here = (lines < last)[:, None] & (columns < COLUMNS)[None, :]
        found = tl.load(partials + lines[:, None].to(tl.int64) * STRIDE + columns[None, :], mask=here, other=0.0)
        sums += tl.sum(found, 0)
        low = tl.minimum(low, tl.min(tl.where(here, found, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(here, found, float("-inf")), 0))
    row = tl.where(columns == COLUMNS - 2, low, tl.where(columns == COLUMNS - 1, high, sums))
    tl.store(rows + tensor.to(tl.int64) * COLUMNS + columns, row, mask=columns < COLUMNS)


@triton.jit(do_not_specialize=["tensors"])
def total_norm(rows, tensors, max_norm, norm, coefficient, BLOCK: tl.constexpr):
    """The norm of all tensors as torch gives it, NaN and Inf included, and torch's clipping coefficient."""
    squares = tl.zeros([BLOCK], tl.float64)
    nans = tl.zeros([BLOCK], tl.float64)
    infinite = tl.zeros([BLOCK], tl.float64)
    for start in range(0, tensors, BLOCK):
        lines = start + tl.arange(0, BLOCK)
        row = rows + lines.to(tl.int64) * COLUMNS
        nans += tl.load(row + 2, mask=lines < tensors, other=0.0)
        infinite += tl.load(row + 3, mask=lines < tensors, other=0.0)
        infinite += tl.load(row + 4, mask=lines < tensors, other=0.0)
        squares += tl.load(row + 7, mask=lines < tensors, other=0.0)
    total = tl.sqrt(tl.sum(squares, 0)).to(tl.float32)
    total = tl.where(tl.sum(infinite, 0) > 0, float("inf"), total)
    total = tl.where(tl.sum(nans, 0) > 0, float("nan"), total)
    tl.store(norm, total)
    tl.store(coefficient, max_norm / (total + 1e-6))


@triton.jit
def scale_chunks(
    addresses, kinds, tensor_of_chunk, start_of_chunk, length_of_chunk, coefficient,
    KINDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiplies every chunk by the coefficient; where that is 1 or more nothing is read or written."""
    factor = tl.load(coefficient)
    if not (factor >= 1.0):  # a NaN reaches the gradients, as it does with torch
        chunk = tl.program_id(0)
        tensor = tl.load(tensor_of_chunk + chunk)
        start = tl.load(start_of_chunk + chunk)
        length = tl.load(length_of_chunk + chunk)
        address = tl.load(addresses + tensor)
        kind = tl.load(kinds + tensor)
        if (KINDS & 1) != 0 and kind == FLOAT32:
            _scale(address.to(tl.pointer_type(tl.float32)) + start, length, factor, BLOCK)
        if (KINDS & 2) != 0 and kind == FLOAT16:
            _scale(address.to(tl.pointer_type(tl.float16)) + start, length, factor, BLOCK)
        if (KINDS & 4) != 0 and kind == BFLOAT16:
            _scale(address.to(tl.pointer_type(tl.bfloat16)) + start, length, factor, BLOCK)
        if (KINDS & 8) != 0 and kind == FLOAT64:
            _scale(address.to(tl.pointer_type(tl.float64)) + start, length, factor, BLOCK)


@triton.jit
def _scale(values, length, factor, BLOCK: tl.constexpr):
    for start in range(0, length, BLOCK):
        places = start + tl.arange(0, BLOCK)
        x = tl.load(values + places, mask=places < length, other=0.0)
        if x.dtype == tl.float64:
            scaled = x * factor.to(tl.float64)
        else:
            scaled = (x.to(tl.float32) * factor).to(x.dtype)
        tl.store(values + places, scaled, mask=places < length)
