"""The few device operations of the persistent kernels, in Pallas Mosaic GPU (Hopper); `_interpret` has their twins.

Pallas has no gather of rows by number and no tf32 product for a few rows, so these are inline Mosaic: per-thread loads
and stores by row number, and `mma.sync` products whose left operand is the weights (M = weight columns, N = 8 rows).
Everything elementwise between them is ordinary Pallas, on arrays of (rows, units) with one element a register.

A product's K is split over the four warps of a warpgroup. Each warp reads its part of the rows straight from global
memory into the operand's registers (K may be permuted at will, so that every read is 16 bytes), and leaves partial sums
in shared memory.
"""

# `inline_mgpu` adds the context to a function's arguments, and MLIR's builders are typed loosely: unknown to the checker.
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, gpu, llvm, memref, scf, vector
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mu
from jax.experimental.pallas import mosaic_gpu as plgpu

from cavs.kernels._phases import Tile

_REF, _SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())


def _layout(tile: Tile) -> Any:
    """One element a register, row-major over the threads."""
    return plgpu.Layout.WG_STRIDED(tile.shape, vec_size=1)


def _i32(value: int) -> Any:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def _constant(dtype: Any, value: float) -> Any:
    kind = mgpu.utils.dtype_to_ir_type(dtype)
    return arith.constant(kind, ir.FloatAttr.get(kind, value) if jnp.issubdtype(dtype, jnp.floating) else int(value))


def _first(array: Any) -> Any:
    """The value of a scalar that Pallas passed as an array."""
    return array.registers.flat[0]


def _asm(text: str, results: Sequence[Any], *args: Any) -> Any:
    """One volatile PTX statement; the compiler keeps such statements in order."""
    letter = {"f32": "f", "i32": "r", "i64": "l"}
    codes = [f"={letter[str(t)]}" for t in results] + [letter[str(a.type)] for a in args] + ["~{memory}"]
    kind = ir.Type.parse("!llvm.void") if not results else results[0]
    if len(results) > 1:
        kind = llvm.StructType.get_literal(list(results))
    out = llvm.inline_asm(kind, list(args), text, ",".join(codes), has_side_effects=True)
    return [llvm.extractvalue(t, out, [i]) for i, t in enumerate(results)] if len(results) > 1 else out


def _address(ref: Any, space: int) -> Any:
    """A ref's address: 64 bits in global memory (space 1), 32 in shared memory (space 3)."""
    pointer = mu.memref_ptr(ref)
    if space == 1:
        pointer = llvm.addrspacecast(llvm.PointerType.get(1), pointer)
    return llvm.ptrtoint(ir.IntegerType.get_signless(64 if space == 1 else 32), pointer)


def sync() -> None:
    """All threads of the CTA."""

    @plgpu.inline_mgpu()
    def go(ctx: Any) -> None:
        gpu.barrier()

    go()


def group_barrier(counters: Any, slot: Any, target: Any, clustered: bool, spins: int) -> None:
    """All CTAs of a group; what they wrote before is seen by all after.

    A group that is a cluster meets in hardware. Else each CTA adds one to the group's counter and waits until it reads
    `target`; after `spins` reads in vain it says so in `counters[0]` and goes on, so that no launch hangs.
    """
    if clustered:

        @plgpu.inline_mgpu()
        def meet(ctx: Any) -> None:
            _asm("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;", [])

        return meet()

    @plgpu.inline_mgpu(arg_types=(_REF, _SCALAR, _SCALAR))
    def go(ctx: Any, counters: Any, slot: Any, target: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        i64 = ir.IntegerType.get_signless(64)
        gpu.barrier()
        base = _address(counters, 1)
        place = arith.addi(base, arith.extsi(i64, arith.muli(_first(slot), _i32(128))))
        leader = arith.cmpi(arith.CmpIPredicate.eq, mu.thread_idx(), _i32(0))
        with mu.when(leader):
            _asm("red.release.gpu.global.add.u32 [$0], $1;", [], place, _i32(1))
            loop = scf.WhileOp([i32], [_i32(0)])
            before = loop.before.blocks.append(i32)
            with ir.InsertionPoint.at_block_begin(before):
                seen = _asm("ld.acquire.gpu.global.u32 $0, [$1];", [i32], place)
                short = arith.cmpi(arith.CmpIPredicate.ult, seen, _first(target))
                patient = arith.cmpi(arith.CmpIPredicate.ult, before.arguments[0], _i32(spins))
                scf.condition(arith.andi(short, patient), [arith.addi(before.arguments[0], _i32(1))])
            after = loop.after.blocks.append(i32)
            with ir.InsertionPoint.at_block_begin(after):
                scf.yield_(after.arguments)
            lost = arith.cmpi(arith.CmpIPredicate.ugt, loop.results[0], _i32(spins))
            with mu.when(lost):
                _asm("st.relaxed.gpu.global.u32 [$0], $1;", [], base, _i32(1))
        gpu.barrier()

    go(counters, slot, target)


def copy_weights(parts: Sequence[Any], refs: Sequence[Any], cta: Any, target: Any, unit: int, hb: int, config: Any) -> None:
    """The CTA's columns of every weight into shared memory, in the order in which `mma.sync` reads them.

    `parts` are `persistent.Packed`: see `persistent.pack_weights`, which packs the same words.
    """
    threads = 128 * config.warpgroups

    @plgpu.inline_mgpu(arg_types=([_REF] * len(refs), _SCALAR, _REF))
    def go(ctx: Any, refs: Any, cta: Any, target: Any) -> None:
        place = _address(target, 3)
        first = arith.muli(_first(cta), _i32(hb))
        for part, ref in zip(parts, refs, strict=True):
            whole = part.width // 16 * 16
            _copy_columns(part, ref, first, place, part.offset, 0, whole // 16, 2, unit, hb, config.precision, threads)
            if part.width > whole:
                offset = part.offset + whole * part.words_a_column
                _copy_columns(part, ref, first, place, offset, whole, 1, 1, unit, hb, config.precision, threads)

    go(list(refs), cta, target)


def _copy_columns(
    part: Any,
    ref: Any,
    first: Any,
    place: Any,
    offset: int,
    column: int,
    tiles: int,
    halves: int,
    unit: int,
    hb: int,
    precision: str,
    threads: int,
) -> None:
    """`tiles` tiles of 8 * `halves` columns from `column`; each thread makes what one lane reads for one step of K."""
    i32 = ir.IntegerType.get_signless(32)
    chunk = 32 if precision == "bf16" else 16
    steps = 2 * (part.k // chunk)
    total = tiles * steps * 32
    if not total:
        return
    unroll = next(n for n in (8, 4, 2, 1) if total % (threads * n) == 0 or n == 1)

    def words(u: Any) -> list[Any]:
        lane, step = arith.andi(u, _i32(31)), arith.shrui(u, _i32(5))
        m, s = arith.divui(step, _i32(steps)), arith.remui(step, _i32(steps))
        group, quad = arith.shrui(lane, _i32(2)), arith.andi(lane, _i32(3))
        k = arith.muli(arith.shrui(s, _i32(1)), _i32(chunk))
        k = arith.addi(k, arith.muli(quad, _i32(chunk // 4)))
        k = arith.addi(k, arith.muli(arith.andi(s, _i32(1)), _i32(chunk // 8)))
        out = []
        for pair in range(2):
            for half in range(halves):
                c = arith.addi(arith.addi(arith.muli(m, _i32(8 * halves)), group), _i32(column + 8 * half))
                block, inside = arith.divui(c, _i32(hb)), arith.remui(c, _i32(hb))
                c = _index(arith.addi(arith.addi(arith.muli(block, _i32(unit)), first), inside))
                got = []
                for e in range(chunk // 16):
                    at = _index(arith.addi(k, _i32(pair * (chunk // 16) + e)))
                    got.append(memref.load(ref, [at, c] if part.axis == 0 else [c, at]))
                out.append(got)
        return out

    def rounded(got: list[Any]) -> Any:
        if precision == "bf16":
            return _asm("cvt.rn.bf16x2.f32 $0, $1, $2;", [i32], got[1], got[0])
        if precision == "tf32":
            return _asm("cvt.rna.tf32.f32 $0, $1;", [i32], got[0])
        return arith.bitcast(i32, got[0])

    loop = scf.ForOp(_index(mu.thread_idx()), _index(_i32(total)), _index(_i32(threads * unroll)))
    with ir.InsertionPoint(loop.body):
        start = arith.index_cast(i32, loop.induction_variable)
        units = [arith.addi(start, _i32(threads * n)) for n in range(unroll)]
        read = [words(u) for u in units]
        size = 2 * halves
        for u, values in zip(units, read, strict=True):
            at = arith.addi(place, arith.muli(u, _i32(4 * size)))
            args = ", ".join(f"${i + 1}" for i in range(size))
            _asm(f"st.shared.v{size}.b32 [$0+{offset * 4}], {{{args}}};", [], at, *[rounded(v) for v in values])
        scf.yield_([])


def _elements(tile: Tile, dtype: Any, value: Callable[[Any, Any], Any]) -> Any:
    """An array of `tile` whose element at (i, j) is `value(i, j)`, given as 32-bit numbers."""
    i32 = ir.IntegerType.get_signless(32)
    layout = mgpu.WGStridedFragLayout(tile.shape, 1)
    signed = jnp.issubdtype(dtype, jnp.signedinteger) or None
    template = mgpu.FragmentedArray.splat(_constant(dtype, 0), tile.shape, layout, is_signed=signed)

    def element(_: Any, at: Any) -> Any:
        return value(arith.index_cast(i32, at[0]), arith.index_cast(i32, at[1]))

    return template.foreach(element, create_array=True, is_signed=signed)


def load(tile: Tile, dtype: Any, ref: Any, index: Any, base: Any, column: Any, wide: bool = True) -> Any:
    """`ref[base + n, column + j]` for each row r of the tile, where n is `index[r]`, or r without an index.

    Rows past the tile's last repeat it; a negative `index[r]` gives zero. Unless `wide`, j is left out.
    """

    @plgpu.inline_mgpu(
        arg_types=(_REF, [_REF] * (index is not None), _SCALAR, _SCALAR, _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, dtype, _layout(tile)),
    )
    def go(ctx: Any, ref: Any, index: Any, base: Any, row: Any, last: Any, column: Any) -> Any:
        def value(i: Any, j: Any) -> Any:
            r = arith.minsi(arith.addi(_first(row), i), _first(last))
            n = memref.load(index[0], [_index(r)]) if index else r
            c = _index(arith.addi(_first(column), j) if wide else _first(column))
            if not index:
                return memref.load(ref, [_index(arith.addi(n, _first(base))), c])
            got = memref.load(ref, [_index(arith.addi(arith.maxsi(n, _i32(0)), _first(base))), c])
            return arith.select(arith.cmpi(arith.CmpIPredicate.slt, n, _i32(0)), _constant(dtype, 0), got)

        return _elements(tile, dtype, value)

    return go(ref, [] if index is None else [index], base, tile.row, tile.last, column)


def segments(
    tile: Tile, dtype: Any, ref: Any, index: Any, first: Any, count: Any, base: Any, column: Any, largest: bool
) -> Any:
    """Per row r the sum (or maximum) of `ref[n, column + j]` over e in `first[r] ... + count[r]`, n = `index[e]` or e."""

    @plgpu.inline_mgpu(
        arg_types=(_REF, [_REF] * (index is not None), _REF, _REF, _SCALAR, _SCALAR, _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, dtype, _layout(tile)),
    )
    def go(ctx: Any, ref: Any, index: Any, first: Any, count: Any, base: Any, row: Any, last: Any, column: Any) -> Any:
        def value(i: Any, j: Any) -> Any:
            r = arith.addi(arith.minsi(arith.addi(_first(row), i), _first(last)), _first(base))
            begin = memref.load(first, [_index(r)])
            end = arith.addi(begin, memref.load(count, [_index(r)]))
            c = _index(arith.addi(_first(column), j))
            kind = mgpu.utils.dtype_to_ir_type(dtype)
            start = arith.constant(kind, ir.FloatAttr.get(kind, -np.inf if largest else 0.0))
            loop = scf.ForOp(_index(begin), _index(end), _index(_i32(1)), [start])
            with ir.InsertionPoint(loop.body):
                e = loop.induction_variable
                n = memref.load(index[0], [e]) if index else arith.index_cast(ir.IntegerType.get_signless(32), e)
                got = memref.load(ref, [_index(arith.maxsi(n, _i32(0))), c])
                if index:
                    got = arith.select(arith.cmpi(arith.CmpIPredicate.slt, n, _i32(0)), start, got)
                total = loop.inner_iter_args[0]
                scf.yield_([arith.maximumf(total, got) if largest else arith.addf(total, got)])
            return loop.results[0]

        return _elements(tile, dtype, value)

    return go(ref, [] if index is None else [index], first, count, base, tile.row, tile.last, column)


def whole_rows(tile: Tile, dtype: Any, ref: Any, base: Any, width: int, operation: str) -> Any:
    """Per row the sum, max or min over all `width` columns of `ref`, repeated over the tile's units."""
    combine = {"sum": arith.addf, "max": arith.maximumf, "min": arith.minimumf}[operation]
    neutral = {"sum": 0.0, "max": -np.inf, "min": np.inf}[operation]

    @plgpu.inline_mgpu(
        arg_types=(_REF, _SCALAR, _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct(tile.shape, dtype, _layout(tile)),
    )
    def go(ctx: Any, ref: Any, base: Any, row: Any, last: Any) -> Any:
        def value(i: Any, j: Any) -> Any:
            r = _index(arith.addi(arith.minsi(arith.addi(_first(row), i), _first(last)), _first(base)))
            start = _constant(dtype, neutral)
            loop = scf.ForOp(_index(_i32(0)), _index(_i32(width)), _index(_i32(1)), [start])
            with ir.InsertionPoint(loop.body):
                got = memref.load(ref, [r, loop.induction_variable])
                scf.yield_([combine(loop.inner_iter_args[0], got)])
            return loop.results[0]

        return _elements(tile, dtype, value)

    return go(ref, base, tile.row, tile.last)


def store(tile: Tile, ref: Any, value: Any, base: Any, column: Any) -> None:
    """`ref[base + r, column + j] = value` for the tile's rows up to its last."""
    if not isinstance(value, (int, float)):
        value = plgpu.layout_cast(value, _layout(tile))

    @plgpu.inline_mgpu(arg_types=(_REF, _layout(tile), _SCALAR, _SCALAR, _SCALAR, _SCALAR))
    def go(ctx: Any, ref: Any, value: Any, base: Any, row: Any, last: Any, column: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)

        def put(x: Any, at: Any) -> None:
            r = arith.addi(_first(row), arith.index_cast(i32, at[0]))
            with mu.when(arith.cmpi(arith.CmpIPredicate.sle, r, _first(last))):
                c = arith.addi(_first(column), arith.index_cast(i32, at[1]))
                memref.store(x, ref, [_index(arith.addi(r, _first(base))), _index(c)])

        value.foreach(put)

    go(ref, value, base, tile.row, tile.last, column)


def read_product(tile: Tile, part: Any, splits: int, column: int) -> Any:
    """The sum over a warpgroup's warps of the partial products that they left in `part` (warps, rows, columns)."""

    @plgpu.inline_mgpu(arg_types=(_REF,), return_type=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, _layout(tile)))
    def go(ctx: Any, part: Any) -> Any:
        first = arith.muli(arith.shrui(mu.thread_idx(), _i32(7)), _i32(splits))

        def value(i: Any, j: Any) -> Any:
            at = [_index(i), _index(arith.addi(j, _i32(column)))]
            total = None
            for w in range(splits):
                got = memref.load(part, [_index(arith.addi(first, _i32(w))), *at])
                total = got if total is None else arith.addf(total, got)
            return total

        return _elements(tile, jnp.float32, value)

    return go(part)


def product_rows(indices: Sequence[Any], bases: Sequence[Any], row: Any, last: Any, rows: int) -> Any:
    """For each source and each 8 rows of a tile the row that this thread reads, one a register; see `product`."""
    present = [i for i, x in enumerate(indices) if x is not None]
    count = len(indices) * (rows // 8)
    layout = plgpu.Layout.WG_STRIDED((128 * count,), vec_size=1)

    @plgpu.inline_mgpu(
        arg_types=([_REF] * len(present), [_SCALAR] * len(bases), _SCALAR, _SCALAR),
        return_type=plgpu.ShapeDtypeStruct((128 * count,), jnp.int32, layout),
    )
    def go(ctx: Any, found: Any, bases: Any, row: Any, last: Any) -> Any:
        index = dict(zip(present, found, strict=True))
        group = arith.andi(arith.shrui(mu.thread_idx(), _i32(2)), _i32(7))
        kind = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        out = np.empty(count, object)
        for s in range(len(indices)):
            for n in range(rows // 8):
                r = arith.minsi(arith.addi(arith.addi(_first(row), group), _i32(8 * n)), _first(last))
                if s in index:
                    r = memref.load(index[s], [_index(r)])
                out[s * (rows // 8) + n] = vector.broadcast(kind, arith.addi(r, _first(bases[s])))
        form = mgpu.WGStridedFragLayout((128 * count,), 1)
        return mgpu.FragmentedArray(_registers=out, _layout=form, _is_signed=True)

    return go([indices[i] for i in present], list(bases), row, last)


def product(spec: Any, refs: Sequence[Any], numbers: Any, weights: Any, part: Any, row: Any, last: Any, cta: Any) -> None:
    """All products of a phase for the rows `row` ... `last` (at most `spec.rows`), into `part`.

    `spec` is a `_phases.ProductSpec`; `refs` belong to its sources, `numbers` are from `product_rows`; `weights` is one
    flat array of packed weights, in shared memory, or in global memory where they stream.
    """
    layout = plgpu.Layout.WG_STRIDED(numbers.shape, vec_size=1)

    @plgpu.inline_mgpu(arg_types=([_REF] * len(refs), layout, _REF, _REF, _SCALAR, _SCALAR, _SCALAR))
    def go(ctx: Any, refs: Any, numbers: Any, weights: Any, part: Any, row: Any, last: Any, cta: Any) -> None:
        _Product(spec, refs, numbers, weights, part, row, last, cta).emit()

    go(list(refs), numbers, weights, part, row, last, cta)


class _Product:
    """Emits one product; see the module's text. In the names of PTX: lane = 4 * group + thread-in-group."""

    def __init__(self, spec: Any, refs: Any, numbers: Any, weights: Any, part: Any, row: Any, last: Any, cta: Any):
        self.spec, self.refs, self.numbers, self.part = spec, refs, numbers, part
        self.row, self.last = _first(row), _first(last)
        self.f32, self.i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        self.i64 = ir.IntegerType.get_signless(64)
        thread = mu.thread_idx()
        self.lane = arith.andi(thread, _i32(31))
        self.warp = arith.andi(arith.shrui(thread, _i32(5)), _i32(3))
        self.place = arith.addi(arith.muli(arith.shrui(thread, _i32(7)), _i32(spec.splits)), self.warp)  # in `part`
        self.group, self.quad = arith.shrui(self.lane, _i32(2)), arith.andi(self.lane, _i32(3))
        self.resident = spec.resident
        if self.resident:
            self.weights = _address(weights, 3)
        else:
            own = arith.muli(arith.extsi(self.i64, _first(cta)), arith.constant(self.i64, spec.words * 4))
            self.weights = arith.addi(_address(weights, 1), own)

    def emit(self) -> None:
        count = arith.addi(arith.subi(self.last, self.row), _i32(1))
        groups = self.spec.rows // 8
        sizes = [n for n in (1, 2, 4, 8) if n < groups] + [groups]
        active = arith.cmpi(arith.CmpIPredicate.slt, self.warp, _i32(self.spec.splits))
        mu.warpgroup_barrier()  # the partial sums of the last tile have been read
        self._choose(sizes, count, active)
        mu.warpgroup_barrier()

    def _choose(self, sizes: list[int], count: Any, active: Any) -> None:
        """The smallest number of 8-row groups that holds the rows."""
        if len(sizes) == 1:
            with mu.when(active):
                self._rows(sizes[0])
            return
        few = arith.cmpi(arith.CmpIPredicate.sle, count, _i32(8 * sizes[0]))
        branch = scf.IfOp(few, has_else=True)
        with ir.InsertionPoint(branch.then_block):
            with mu.when(active):
                self._rows(sizes[0])
            scf.yield_([])
        with ir.InsertionPoint(branch.else_block):
            self._choose(sizes[1:], count, active)
            scf.yield_([])

    def _rows(self, groups: int) -> None:
        spec = self.spec
        per_warp = spec.chunks // spec.splits
        chunk_bytes = spec.chunk * 4
        first = arith.muli(self.warp, _i32(per_warp * chunk_bytes))
        offset = arith.addi(first, arith.muli(self.quad, _i32(chunk_bytes // 4)))
        places = []
        for s, source in enumerate(spec.sources):
            for n in range(groups):
                number = self.numbers.registers.flat[s * (spec.rows // 8) + n]
                r = vector.extract(number, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
                start = arith.muli(arith.extsi(self.i64, r), arith.constant(self.i64, source.width * 4))
                start = arith.addi(start, arith.extsi(self.i64, arith.addi(offset, _i32(source.column * 4))))
                places.append(arith.addi(_address(self.refs[s], 1), start))

        def fetch(c: int) -> list[list[Any]]:
            return [
                [
                    x
                    for q in range(spec.chunk // 16)
                    for x in _asm(
                        f"ld.global.cg.v4.f32 {{$0, $1, $2, $3}}, [$4+{c * chunk_bytes + 16 * q}];", [self.f32] * 4, place
                    )
                ]
                for place in places
            ]

        zero = arith.constant(self.f32, 0.0)
        totals = {
            (w, m, o, n): [zero] * 4
            for w, weight in enumerate(spec.weights)
            for m in range(weight.tiles)
            for o in weight.operands
            for n in range(groups)
        }
        # Enough reads in flight to cover the way to L2.
        depth = min(per_warp, max(1, spec.in_flight // (len(places) * (spec.chunk // 16))))
        queue = [fetch(c) for c in range(depth)]
        for c in range(per_warp):
            values = queue.pop(0)
            for step in range(2):
                rights = {
                    (o, n): self._right([values[s * groups + n] for s in operand], step)
                    for o, operand in enumerate(spec.operands)
                    for n in range(groups)
                }
                for w, weight in enumerate(spec.weights):
                    for m in range(weight.tiles):
                        left = self._left(weight, m, c, per_warp, step)
                        for o in weight.operands:
                            for n in range(groups):
                                key = (w, m, o, n)
                                totals[key] = self._multiply(totals[key], left, rights[o, n])
            if c + depth < per_warp:
                queue.append(fetch(c + depth))
        for (w, m, o, n), four in totals.items():
            weight = spec.weights[w]
            column = weight.columns[weight.operands.index(o)] + 16 * m
            for q, x in enumerate(four[:2] if weight.half and m == weight.tiles - 1 else four):
                r = arith.addi(arith.muli(self.quad, _i32(2)), _i32(8 * n + q % 2))
                col = arith.addi(self.group, _i32(column + 8 * (q // 2)))
                memref.store(x, self.part, [_index(self.place), _index(r), _index(col)])

    def _right(self, sources: list[list[Any]], step: int) -> list[Any]:
        """The two registers of the rows' operand for one step of K; sources are summed."""
        size = self.spec.chunk // 8  # of a thread's numbers in a step
        values = sources[0][step * size : (step + 1) * size]
        for more in sources[1:]:
            values = [arith.addf(a, b) for a, b in zip(values, more[step * size : (step + 1) * size], strict=True)]
        if self.spec.precision == "bf16":
            return [_asm("cvt.rn.bf16x2.f32 $0, $1, $2;", [self.i32], values[q + 1], values[q]) for q in (0, 2)]
        return self._tf32(values)

    def _tf32(self, values: list[Any]) -> list[Any]:
        """Rounded to tf32; at fp32 also what rounding left (3xtf32: three products of two tf32 parts)."""
        high = [_asm("cvt.rna.tf32.f32 $0, $1;", [self.i32], x) for x in values]
        if self.spec.precision == "tf32":
            return high
        rest = [arith.subf(x, arith.bitcast(self.f32, h)) for x, h in zip(values, high, strict=True)]
        return high + [_asm("cvt.rna.tf32.f32 $0, $1;", [self.i32], x) for x in rest]

    def _left(self, weight: Any, m: int, c: int, per_warp: int, step: int) -> list[Any]:
        """The four registers of a tile of 16 weight columns for one step of K; half a tile has columns 0 to 7 alone."""
        steps, half = 2 * self.spec.chunks, weight.half and m == weight.tiles - 1
        words = 64 if half else 128
        at = (weight.offset + m * steps * 128 + (2 * c + step) * words) * 4
        mine = arith.addi(arith.muli(self.warp, _i32(2 * per_warp * words * 4)), arith.muli(self.lane, _i32(words // 8)))
        text = "ld.shared" if self.resident else "ld.global.nc"
        place = arith.addi(self.weights, mine if self.resident else arith.extsi(self.i64, mine))
        if half:
            two = _asm(f"{text}.v2.b32 {{$0, $1}}, [$2+{at}];", [self.i32] * 2, place)
            four = [two[0], _i32(0), two[1], _i32(0)]
        else:
            four = _asm(f"{text}.v4.b32 {{$0, $1, $2, $3}}, [$4+{at}];", [self.i32] * 4, place)
        if self.spec.precision == "fp32":
            return self._tf32([arith.bitcast(self.f32, x) for x in four])
        return list(four)

    def _multiply(self, total: list[Any], left: list[Any], right: list[Any]) -> list[Any]:
        shape, kind = ("m16n8k16", "bf16") if self.spec.precision == "bf16" else ("m16n8k8", "tf32")
        text = (
            f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        if self.spec.precision == "fp32":
            high, low = left[:4], left[4:]
            for a, b in ((low, right[:2]), (high, right[2:]), (high, right[:2])):
                total = _asm(text, [self.f32] * 4, *a, *b, *total)
            return total
        return _asm(text, [self.f32] * 4, *left, *right, *total)
