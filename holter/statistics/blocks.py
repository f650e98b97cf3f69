"""How tensors are laid out for measuring: cut into pieces, pieces into chunks, chunks gathered into blocks.

Pure planning, from sizes alone. A block fills the workspace once; a chunk is one line of it and gives one partial
row. Small tensors get short chunks, so that little is padded, and many of them share a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
