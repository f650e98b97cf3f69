"""How tensors are laid out for measuring. Pure planning, from sizes alone.

For any device: cut into pieces, pieces into chunks, chunks gathered into blocks (`plan_blocks`). A block fills the
workspace once; a chunk is one line of it and gives one partial row. Small tensors get short chunks, so that little
is padded, and many of them share a block.

For the CPU alone: long tensors are read where they lie, and the rest is packed side by side, unpadded
(`plan_layout`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

WIDTHS = (64, 512, 4096)  # chunk lengths to choose from
# Elements of a block. Below torch's grain size of 32,768 an operation stays on its thread: for a small model, waking
# the others costs more than it gives, and far more where the cores are shared. A large one needs them, and a cache.
SMALL_BLOCK = 7 * 4096
LARGE_BLOCK = 1 << 20
DEVICE_BLOCK = 1 << 22  # elsewhere than on the CPU a call is dear and memory is fast
SMALL_MODEL = 1 << 22


def block_size(elements: int, on_cpu: bool) -> int:
    if not on_cpu:
        return DEVICE_BLOCK
    return SMALL_BLOCK if elements <= SMALL_MODEL else LARGE_BLOCK


@dataclass(frozen=True)
class Make:
    """What the plan needs to know of a tensor; `wide` is what float32 cannot hold, and gets a workspace of its own."""

    size: int
    wide: bool

    def width(self, widths: Sequence[int]) -> int:
        return next((width for width in widths if self.size <= width), widths[-1])


@dataclass
class Block:
    """One filling of the workspace: pieces of tensors, each starting on a new chunk."""

    size: int  # elements that it may hold
    width: int
    wide: bool
    pieces: list[tuple[int, int, int]] = field(default_factory=list)  # (tensor, start, stop)
    valid: list[int] = field(default_factory=list)  # per chunk: how much of it is not padding
    tensor_of_chunk: list[int] = field(default_factory=list)

    @property
    def room(self) -> int:
        return self.size // self.width * self.width - len(self.valid) * self.width

    def add(self, tensor: int, start: int, stop: int) -> None:
        self.pieces.append((tensor, start, stop))
        for left in range(stop - start, 0, -self.width):
            self.valid.append(min(left, self.width))
            self.tensor_of_chunk.append(tensor)


def plan_blocks(makes: Sequence[Make], size: int) -> list[Block]:
    """Blocks of at most this size that hold every element once; the chunks of one tensor follow each other."""
    padded = sum(-(-make.size // WIDTHS[1]) * WIDTHS[1] for make in makes)
    widths = WIDTHS[1:2] if padded <= size else WIDTHS  # what is tiny fits into one block: one round of calls
    groups: dict[tuple[bool, int], list[int]] = {}
    for tensor, make in enumerate(makes):
        if make.size:
            groups.setdefault((make.wide, make.width(widths)), []).append(tensor)
    return [
        block
        for (wide, width), members in sorted(groups.items())
        for block in _fill(Block(size, width, wide), [(tensor, makes[tensor].size) for tensor in members])
    ]


def _fill(block: Block, members: list[tuple[int, int]]) -> Iterator[Block]:
    for tensor, size in members:
        start = 0
        while start < size:
            if not block.room:
                yield block
                block = Block(block.size, block.width, block.wide)
            stop = min(size, start + block.room)
            block.add(tensor, start, stop)
            start = stop
    yield block


# Sums of float32 are taken over so many elements at once, and merged in float64: the more, the further they drift.
CHUNK, CHUNK_IN_PARALLEL = 1024, 4096  # the second with torch's sums, which drift less
PACKED = 8192  # up to this size a tensor is cheaper to copy than to read with calls of its own
STRETCH = 1 << 16  # with the workspace of the same size, it stays in the cache of a core


class Piece(NamedTuple):
    """Elements `start` to `stop` of a tensor."""

    tensor: int
    start: int
    stop: int


class Stretch(NamedTuple):
    """Whole chunks of one tensor, to be read where they lie, on one thread or on all of torch's threads."""

    piece: Piece
    chunk: int
    in_parallel: bool

    @property
    def size(self) -> int:
        return self.piece.stop - self.piece.start

    @property
    def owners(self) -> list[int]:
        """The tensor of each partial result: one a chunk."""
        return [self.piece.tensor] * (self.size // self.chunk)


class Pack(NamedTuple):
    """Short tensors and ends of long ones, to be copied side by side."""

    pieces: list[Piece]

    @property
    def owners(self) -> list[int]:
        """The tensor of each partial result: one a piece."""
        return [piece.tensor for piece in self.pieces]


def plan_layout(sizes: Sequence[tuple[int, int]], in_parallel: bool) -> tuple[list[Stretch], list[Pack]]:
    """Every element of these (tensor, size) once; in_parallel: whether long tensors are worth all of torch's threads.

    A tensor has at most one packed piece.
    """
    stretches: list[Stretch] = []
    packs: list[Pack] = []
    room = 0
    for tensor, size in sizes:
        is_long = in_parallel and size > LARGE_BLOCK // 8
        chunk, block = (CHUNK_IN_PARALLEL, LARGE_BLOCK) if is_long else (CHUNK, STRETCH)
        whole = size // chunk * chunk if size > PACKED else 0
        for start in range(0, whole, block):
            stretches.append(Stretch(Piece(tensor, start, min(whole, start + block)), chunk, is_long))
        rest = size - whole
        if rest > room:
            packs.append(Pack([]))
            room = SMALL_BLOCK
        if rest:
            packs[-1].pieces.append(Piece(tensor, whole, size))
            room -= rest
    return stretches, packs
