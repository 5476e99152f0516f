"""Emits the operations of a phase for one tile: equations for one vertex, on (rows, units) arrays in Pallas.

A vector of b unit vectors is b arrays; so slices, concatenations and reshapes rearrange arrays and cost nothing.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs.kernels._body.device import ProductRows
from cavs.kernels._body.launch import Launch
from cavs.kernels._body.primitives import Blocks, elementwise, structure
from cavs.kernels._layout.layout import Sums
from cavs.kernels._layout.specs import Tile
from cavs.kernels._program.arrays import Ref
from cavs.kernels._program.fit import ELEMENTWISE
from cavs.kernels._program.jaxprs import Atom, Eqn, Var, aval, dtype_of, is_var
from cavs.kernels._program.names import EDGE_COUNT, EDGE_OWNER, FIRST_EDGE, Index
from cavs.kernels._program.operations import (
    ConstantRead,
    Equation,
    Load,
    ParentSum,
    Phase,
    Product,
    ReduceChildren,
    ReduceVector,
    RowRead,
    Source,
    Spread,
    Store,
)
from cavs.kernels._program.widths import blocks, num_blocks

# The row numbers of a tile: those of its products' sources (`None` without products), and of its vectors of indices.
Where: TypeAlias = tuple[ProductRows | None, dict[Index, jax.Array]]


class Values:
    """The values of a phase at one tile.

    `numbers` is what vectors of indices hold at the tile, as far as it was read before; `part` are the products' sums for the
    tile, if not all of the warpgroup's.
    """

    def __init__(
        self,
        launch: Launch,
        phase: Phase,
        tile: Tile,
        sums: dict[Var, Sums],
        numbers: dict[Index, jax.Array] | None = None,
        part: Ref | None = None,
    ):
        self._launch, self._phase, self._tile, self._sums = launch, phase, tile, sums
        self._part = launch.buffers.sums if part is None else part
        self._device, self._unit = launch.device, launch.program.valid
        self._known: dict[Var, Blocks] = {}
        self._issued: dict[Load, list[list[jax.Array]]] = {}  # for each block, the loaded arrays that are summed
        self._numbers = numbers or {}

    def issue(self) -> None:
        """Issues the early loads."""
        for load in self._phase.early_loads:
            self._issue(load)

    def finish(self) -> None:
        """Computes the equations and stores the results, first those that other thread blocks wait for."""
        launch, program = self._launch, self._launch.program
        valid = None if program.valid == program.unit else program.valid - launch.block * launch.config.hb
        stores = sorted(self._phase.stores, key=lambda store: store.place.tensor not in launch.awaited)
        for op in self._phase.in_order(tuple(stores)):
            match op:
                case Load():
                    self._known[op.value] = self._arrived(op)
                case Product():
                    self._known[op.value] = self._product(op.value)
                case Equation(eqn):
                    self._equation(eqn)
                case Spread(value, _, source):
                    self._known[value] = self._spread(value, source)
                case ReduceChildren():
                    self._known[op.value] = self._children(op)
                case ReduceVector():
                    self._known[op.value] = self._vector(op)
                case Store():
                    self._store(op, valid)

    def prefetch(self) -> None:
        """Prefetches into L2 the tile's rows of tensors that the launch does not write."""
        launch, written = self._launch, self._launch.program.stored()
        for load in self._phase.early_loads:
            source = load.source
            if isinstance(source, RowRead) and source.index is None and source.tensor not in written:
                ref = launch.buffers.tensors[source.tensor]
                for b in range(int(np.prod(self._blocks(load.value))) if ref.shape[1] > 1 else 1):
                    self._device.prefetch(self._tile, ref, launch.scalar(source.base), launch.column(b + source.part))

    def indices(self) -> list[Index]:
        """The vectors of indices that the early loads use."""
        names: list[Index | None] = []
        for load in self._phase.early_loads:
            if isinstance(load.source, ParentSum):
                names.append(load.source.direct and load.source.direct[1])
                names += [index for _, index in load.source.parts] if load.source.first is None else []
            elif isinstance(load.source, RowRead):
                names.append(load.source.index)
        return [name for name in dict.fromkeys(names) if name]

    def _blocks(self, x: Atom) -> tuple[int, ...]:
        return blocks(aval(x), self._unit)

    def _each(self, x: Atom, make: Callable[[int], jax.Array]) -> Blocks:
        out = np.empty(self._blocks(x), object)
        for i, at in enumerate(np.ndindex(*out.shape)):
            out[at] = make(i)
        return out

    def _operand(self, x: Atom) -> Blocks:
        """A value that is known, or a literal."""
        if is_var(x):
            return self._known[x]
        return _box(x.val)  # type: ignore[union-attr]

    # Loads.

    def _issue(self, load: Load) -> None:
        """Issues the reads of a value. Computing with it here would wait for them."""
        dtype = np.dtype(np.int32) if dtype_of(load.value) == np.bool_ else dtype_of(load.value)
        count = int(np.prod(self._blocks(load.value)))
        self._issued[load] = [self._terms(load.source, dtype, b) for b in range(count)]

    def _arrived(self, load: Load) -> Blocks:
        """A loaded value. In memory, bools are int32, and all constants form one vector, which holds the bits of integers."""
        if load not in self._issued:
            self._issue(load)
        x, terms = load.value, self._issued[load]
        values = self._each(x, lambda b: functools.reduce(operator.add, terms[b]))
        if isinstance(load.source, ConstantRead) and dtype_of(x) != np.float32:
            bits = values
            values = self._each(x, lambda b: lax.bitcast_convert_type(bits.flat[b], jnp.int32))
        return self._each(x, lambda b: values.flat[b] != 0) if dtype_of(x) == np.bool_ else values

    def _terms(self, source: Source, dtype: np.dtype, b: int) -> list[jax.Array]:
        """The arrays whose sum is a block of a loaded value."""
        column = self._launch.column(b)
        match source:
            case RowRead():
                return [self._rows(source, dtype, b, source.index)]
            case ConstantRead(tensor):
                return [self._constant(self._launch.buffers.tensors[tensor], column)]
            case ParentSum():
                return self._from_parents(source, dtype, column)

    def _rows(self, source: RowRead, dtype: np.dtype, b: int, index: Index | None) -> jax.Array:
        ref = self._launch.buffers.tensors[source.tensor]
        wide = ref.shape[1] > 1
        column = self._launch.column(b + source.part) if wide else jnp.int32(0)
        numbers = None if index is None else self._rows_at(index)
        return self._device.load(self._tile, dtype, ref, numbers, self._launch.scalar(source.base), column, wide)

    def _constant(self, ref: Ref, column: jax.Array) -> jax.Array:
        first = Tile(self._tile.shape, jnp.int32(0), jnp.int32(0))
        wide = ref.shape[1] > 1
        column = column if wide else jnp.int32(0)
        return self._device.load(first, np.dtype(np.float32), ref, None, jnp.int32(0), column, wide)

    def _from_parents(self, source: ParentSum, dtype: np.dtype, column: jax.Array) -> list[jax.Array]:
        buffers, terms = self._launch.buffers, []
        if source.direct is not None:
            ref, rows = buffers.tensors[source.direct[0]], self._rows_at(source.direct[1])
            wide = ref.shape[1] > 1
            at = column if wide else jnp.int32(0)
            terms.append(self._device.load(self._tile, dtype, ref, rows, jnp.int32(0), at, wide))
        for tensor, index in source.parts:
            ref = buffers.tensors[tensor]
            if source.first is None or source.count is None:
                terms.append(self._device.load(self._tile, dtype, ref, self._rows_at(index), jnp.int32(0), column))
            else:
                ends = buffers.integers[source.first], buffers.integers[source.count]
                edges = buffers.integers[index]
                terms.append(self._device.segments(self._tile, dtype, ref, edges, *ends, jnp.int32(0), column, False))
        return terms or [jnp.zeros(self._tile.shape, dtype)]  # a state that is neither pushed nor gathered

    def _rows_at(self, index: Index) -> jax.Array:
        """The elements of a vector of indices at the rows of the tile."""
        if index not in self._numbers:
            self._numbers[index] = self._device.number(self._tile, self._launch.buffers.integers[index])
        return self._numbers[index]

    # Products and equations.

    def _product(self, value: Var) -> Blocks:
        sums, config = self._sums[value], self._launch.config
        hb, split = config.hb, config.split
        first = lax.rem(self._launch.block, jnp.int32(split)) * hb if split > 1 else 0

        def read(i: int) -> jax.Array:
            lead, b = divmod(i, max(1, self._blocks(value)[-1]))
            return self._device.read_product(self._tile, self._part, sums.slots, sums.columns[lead] + b * hb * split + first)

        return self._each(value, read)

    def _equation(self, eqn: Eqn) -> None:
        args = [self._operand(x) for x in eqn.invars]
        if eqn.primitive.name in ELEMENTWISE:
            self._known[eqn.outvars[0]] = self._elementwise(eqn, args)
            return
        for v, x in zip(eqn.outvars, structure(eqn, args, self._unit), strict=True):
            self._known[v] = x.reshape(self._blocks(v))

    def _elementwise(self, eqn: Eqn, args: Sequence[Blocks]) -> Blocks:
        dtypes = [dtype_of(x) for x in eqn.invars]

        def one(i: int) -> jax.Array:
            picked = [a.flat[i] if a.size > 1 else a.flat[0] for a in args]
            full = [
                x if np.shape(x) == self._tile.shape else jnp.full(self._tile.shape, x, d)
                for x, d in zip(picked, dtypes, strict=True)
            ]
            return elementwise(eqn, full)

        return self._each(eqn.outvars[0], one)

    def _spread(self, value: Var, source: RowRead) -> Blocks:
        dtype = dtype_of(value)
        stored = np.dtype(np.int32) if dtype == np.bool_ else dtype
        values = self._each(value, lambda b: self._rows(source, stored, b, EDGE_OWNER))
        return self._each(value, lambda b: values.flat[b] != 0) if dtype == np.bool_ else values

    def _children(self, op: ReduceChildren) -> Blocks:
        launch, source, integers = self._launch, op.source, self._launch.buffers.integers
        ref = launch.buffers.tensors[source.tensor]
        wide = ref.shape[1] > 1
        index = launch.index(source.index)
        offset = None if source.base is None else launch.scalar(source.base)
        return self._each(
            op.value,
            lambda b: self._device.segments(
                self._tile,
                dtype_of(op.value),
                ref,
                index,
                integers[FIRST_EDGE],
                integers[EDGE_COUNT],
                jnp.int32(0),
                launch.column(b + source.part) if wide else jnp.int32(0),
                op.operation == "max",
                wide,
                offset,
            ),
        )

    def _vector(self, op: ReduceVector) -> Blocks:
        launch, source = self._launch, op.source
        ref, base = launch.buffers.tensors[source.tensor], launch.scalar(source.base)
        unit = launch.program.unit
        return _box(self._device.whole_rows(self._tile, dtype_of(op.value), ref, base, unit, self._unit, op.operation))

    # Stores.

    def _store(self, store: Store, valid: jax.Array | None) -> None:
        """Stores a value; zeros from the thread block's column `valid` on."""
        launch, tile, place = self._launch, self._tile, store.place
        awaited = place.tensor in launch.awaited
        for b in range(max(1, num_blocks(aval(store.value), self._unit))):
            x, base = self._known[store.value].flat[b], launch.scalar(place.base)
            column = launch.column(b + place.offset // self._unit)
            if np.shape(x) != tile.shape:  # a constant
                x = jnp.full(tile.shape, x, dtype_of(store.value))
            if dtype_of(store.value) == np.bool_:
                x = jnp.where(x, jnp.int32(1), jnp.int32(0))
            self._device.store(tile, launch.buffers.tensors[place.tensor], x, base, column, valid, awaited)


def _box(x: jax.Array) -> Blocks:
    out = np.empty((), object)
    out[()] = x
    return out
