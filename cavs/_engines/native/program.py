"""Engine `native`: orders the operations of a kind, lays out their memory, and encodes them for kernels/_cpu/program.h.

Elementwise work runs on a few rows at a time, so that its values stay in the L1 cache; products run on all rows of a tile. So a
program is a list of segments: operations, chunk by chunk, and then products. An operation goes to the last segment in which all
of its readers still find its result.

What overwrites rows comes after everything else, and reads none of these rows: they are copied first. So the order of what
overwrites does not matter. `native_check` follows all values of each program that is built through memory.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from cavs._engines.native.check import check_accesses
from cavs._engines.native.operations import CODE
from cavs._engines.native.values import NOT_GATHERED, Base, Op, Opcode, Place, Segment, Shift, Slot, View
from cavs._function.domains import EDGE, STATIC, Domain


class Written(NamedTuple):
    """A tensor in which rows that no vertex has are filled with zeros, or with `repeat` with a vertex's row."""

    tensor: Any
    domain: Domain
    shift: Shift
    repeat: bool


@dataclasses.dataclass(frozen=True)
class KindProgram:
    segments: list[Segment]  # the operations, in the order in which the library runs them
    bases: dict[Base, int | None]  # all memory that they access, each with its slot of the arena; `None` if it lies elsewhere
    slots: list[Slot]  # the slots of the arena
    written: list[Written]  # the tensors of which the library fills other rows


def kind_program(ops: Sequence[Op], written: list[Written]) -> KindProgram:
    """Orders the operations of a kind, and lays out their memory.

    Raises `AssertionError` if an operation would read memory that another one has overwritten; a mistake of this engine.
    """
    segments = _segments(_with_copies(_with_bias(ops)))
    bases, slots = _placed(segments)
    check_accesses(segments, bases, slots)
    return KindProgram(segments, bases, slots, written)


def encoded(kind: KindProgram, sizes: Sequence[int], number: Callable[[Any], int]) -> list[int]:
    """Returns the words of a kind's program.

    `sizes`: rows and edges of the kind, its first among all, and the slack of rows and of edges. `number`: the number of a
    tensor among the arguments and results of the call.
    """
    segments, bases, slots = kind.segments, kind.bases, kind.slots
    weights = list(dict.fromkeys(op.weight for segment in segments for op in segment.products))
    words = [*sizes, len(slots)]
    for slot in slots:
        edge = slot.domain == EDGE
        words += [0 if edge else slot.n, slot.n if edge else 0, int(slot.chunk)]
    words.append(len(bases))
    for base, slot in bases.items():
        tensor = base.tensor if base.place == Place.LITERAL else 0 if base.place == Place.ARENA else number(base.tensor)
        chunk = slot is not None and slots[slot].chunk
        words += [base.place, _domain(base.domain), base.n, slot or 0, int(chunk), tensor, base.shift]
    words.append(len(weights))
    for tensor, turned, k, n in weights:
        words += [number(tensor), int(turned), k, n]
    words.append(len(kind.written))
    for tensor, domain, shift, repeat in kind.written:
        words += [number(tensor), _domain(domain), shift, int(repeat)]
    index = {base: i for i, base in enumerate(bases)}
    words.append(len(segments))
    for segment in segments:
        for ops in (segment.ops, segment.products):
            words.append(len(ops))
            for op in ops:
                words += _words(op, index, weights, number)
    return [int(w) for w in words]


def _domain(domain: Domain) -> int:
    return int(domain == EDGE)


def _words(op: Op, index: dict[Base, int], weights: list[Any], number: Callable[[Any], int]) -> list[int]:
    def ref(view: View) -> list[int]:
        base, offset = view.base.root()
        return [index[base], view.offset + offset]

    tensor = 0 if op.tensor is None else number(op.tensor)
    weight = weights.index(op.weight) if op.opcode == Opcode.PRODUCT else 0
    to = ref(op.to) if op.to else [0, 0]
    words = [op.opcode, _domain(op.domain), op.code, op.n, *to, op.imm, tensor, op.child, weight, int(op.bias is not None)]
    sources = [(ref(v), v.step) for v in op.sources]
    if op.opcode == Opcode.PRODUCT:  # a source for each row: what is gathered names its tensor
        remaining = iter(sources)
        sources = [next(remaining) if child == NOT_GATHERED else ([number(t), 0], 1) for child, t in op.gathered]
        if op.bias is not None:
            sources.append((ref(op.bias), op.bias.step))
    words.append(len(sources))
    for at, step in sources:
        words += [*at, step]
    words += [len(op.gathered), *(child for child, _ in op.gathered), len(op.runs)]
    for view, to_offset, count in op.runs:
        words += [*ref(view), to_offset, count, view.step]
    return [*words, len(op.sizes), *op.sizes]


def _with_bias(ops: Sequence[Op]) -> list[Op]:
    """Returns the operations in which a product adds to its result what only a sum after it would."""
    readers: dict[Base, int] = {}
    for base in (base for op in ops for base in op.reads()):
        readers[base] = readers.get(base, 0) + 1
    products = {op.to.base: op for op in ops if op.opcode == Opcode.PRODUCT and op.to and len(op.gathered) == 1}
    merged: dict[int, Op] = {}  # by the id of the sum
    absorbed: set[int] = set()
    for op in ops:
        if op.opcode != Opcode.ELEMENTWISE or op.code != CODE["add"] or op.last:
            continue
        for view, other in zip(op.sources, reversed(op.sources), strict=True):
            product = products.get(view.base)
            whole = view.offset == 0 and view.step == 1 and view.base.n == op.n and view.base.inside is None
            if product is None or not whole or readers[view.base] != 1 or view.base.place != Place.ARENA:
                continue
            if (
                product.domain == op.domain
                and other.step == 1
                and other.base.domain in (STATIC, op.domain)
                and product.bias is None
            ):
                merged[id(op)] = dataclasses.replace(product, to=op.to, bias=other)
                absorbed.add(id(product))
                break
    return [merged.get(id(op), op) for op in ops if id(op) not in absorbed]


def _with_copies(ops: Sequence[Op]) -> list[Op]:
    """Returns the operations in which what overwrites rows reads copies of rows that are overwritten.

    What lies already where it is to be stored stays there.
    """
    overwritten = {op.to.base.tensor for op in ops if op.last and op.to}
    new_ops = []
    for op in ops:
        if op.last:
            (view,) = op.sources
            base, begin = view.base.root()
            if base.place == Place.ROWS and base.tensor in overwritten:
                if op.to and op.to.base.tensor == base.tensor and begin + view.offset == 0 and view.step == 1:
                    continue
                copy = View(Base(op.n, op.domain))
                new_ops.append(Op(Opcode.ELEMENTWISE, op.domain, op.n, copy, CODE["copy"], [view]))
                op = dataclasses.replace(op, sources=[copy])
        new_ops.append(op)
    return new_ops


def _segments(ops: Sequence[Op]) -> list[Segment]:
    writers: dict[Base, list[int]] = {}
    producers: list[list[int]] = []  # of each operation, those whose results it reads
    earliest = []
    for i, op in enumerate(ops):
        producers.append([w for base in op.reads() for w in writers.get(base, ())])
        earliest.append(max((earliest[w] + (ops[w].opcode == Opcode.PRODUCT) for w in producers[-1]), default=0))
        if op.to is not None:
            writers.setdefault(op.to.base.root()[0], []).append(i)
    count = max((at + (op.opcode == Opcode.PRODUCT) for at, op in zip(earliest, ops, strict=True)), default=0) + 1
    latest: list[int | None] = [None] * len(ops)
    for i in reversed(range(len(ops))):
        segment = latest[i]
        if ops[i].last:
            segment = count - 1
        elif ops[i].opcode == Opcode.PRODUCT or segment is None:
            segment = earliest[i]
        latest[i] = segment
        for w in producers[i]:
            limit = latest[w]
            latest[w] = segment if limit is None else min(segment, limit)
    segments = [Segment([], []) for _ in range(count)]
    for at, op in zip(latest, ops, strict=True):
        assert at is not None
        segments[at][op.opcode == Opcode.PRODUCT].append(op)
    segments[-1].ops.sort(key=lambda op: op.last)
    return segments


def _placed(segments: Sequence[Segment]) -> tuple[dict[Base, int | None], list[Slot]]:
    """Returns every base with its slot of the arena, and the slots. Bases that do not live at the same time share slots."""
    uses: dict[Base, list[tuple[int, int]]] = {}  # (segment, place in it); products have the last place
    for s, (ops, products) in enumerate(segments):
        for place, op in [*enumerate(ops), *((len(ops), op) for op in products)]:
            for base in [*op.reads(), *([op.to.base.root()[0]] if op.to else [])]:
                uses.setdefault(base, []).append((s, place))
    local = {base for base, at in uses.items() if len({s for s, _ in at}) == 1 and all(p < len(segments[s][0]) for s, p in at)}
    slots: list[Slot] = []
    busy: list[tuple[int, int]] = []  # until when each slot is used
    placed: dict[Base, int | None] = {}
    for base in sorted(uses, key=lambda base: min(uses[base])):
        if base.place != Place.ARENA:
            placed[base] = None
            continue
        begin, end = min(uses[base]), max(uses[base])
        chunk = base in local
        if not chunk:  # chunk after chunk: the whole segment counts
            begin, end = (begin[0], -1), (end[0], np.iinfo(np.int32).max)
        fits = [i for i, slot in enumerate(slots) if slot[1:] == (base.domain, chunk) and busy[i] < begin]
        best = min(fits, key=lambda i: abs(slots[i].n - base.n), default=None)
        if best is None:
            best = len(slots)
            slots.append(Slot(base.n, base.domain, chunk))
            busy.append(end)
        else:
            slots[best] = Slot(max(slots[best].n, base.n), base.domain, chunk)
            busy[best] = end
        placed[base] = best
    return placed, slots
