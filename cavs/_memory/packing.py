"""How XLA lays out buffers in one heap: large ones first, each in the smallest gap that fits (its "best fit" heuristics)."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

_ALIGNMENT = 256  # bytes
_LARGE = 256  # buffers that are laid out one by one


@dataclasses.dataclass(eq=False)
class Buffer:
    """A buffer: its bytes, from when to when it is alive, and the values that it holds one after the other."""

    size: int
    start: int
    end: int = -1
    held: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)


def packed(buffers: Iterable[Buffer], by_size_alone: bool = False) -> int:
    """Returns the size in bytes of a heap in which buffers that are alive at the same time do not overlap.

    As in XLA, the better of two orders is taken: by size, or by the time that buffers live. The times are known roughly, so the
    worse of two orders by time is taken: as they are, and in steps of a half, with the smallest first.

    Args:
        buffers: the buffers.
        by_size_alone: whether to try the first order alone, because the times are known too roughly for the second one.
    """
    largest = sorted(buffers, key=lambda b: -b.size)[:_LARGE]
    by_size: Callable[[Buffer], Any] = lambda b: (-b.size, b.start)  # noqa: E731
    by_time: Callable[[Buffer], Any] = lambda b: (b.start - b.end, -b.size)  # noqa: E731
    by_rough_time: Callable[[Buffer], Any] = lambda b: (-round(math.log(b.end - b.start + 1, 1.5)), b.size)  # noqa: E731
    size = _height(sorted(largest, key=by_size))
    if by_size_alone or size == _alive(largest):  # if it is that, no other order is better
        return size
    return min(size, max(_height(sorted(largest, key=order)) for order in (by_time, by_rough_time)))


def _alive(buffers: list[Buffer]) -> int:
    """The most bytes of buffers that are alive at the same time."""
    changes = sorted([(b.start, 0, _aligned(b)) for b in buffers] + [(b.end, 1, -_aligned(b)) for b in buffers])
    return max(itertools.accumulate(change for _, _, change in changes), default=0)


def _aligned(buffer: Buffer) -> int:
    return -(-buffer.size // _ALIGNMENT) * _ALIGNMENT


def _height(buffers: list[Buffer]) -> int:
    placed: list[tuple[int, int, Buffer]] = []  # begin, end and buffer
    for buffer in buffers:
        size = _aligned(buffer)
        taken = sorted((a, b) for a, b, x in placed if x.start <= buffer.end and buffer.start <= x.end)
        gaps, top = [], 0
        for begin, end in taken:
            if begin - top >= size:
                gaps.append((begin - top, top))
            top = max(top, end)
        at = min(gaps)[1] if gaps else top
        placed.append((at, at + size, buffer))
    return max((end for _, end, _ in placed), default=0)
