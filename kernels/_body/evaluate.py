"""The elementwise part of a phase: equations for one vertex, evaluated on (rows, units) arrays in Pallas.

A vector of b unit vectors is b arrays; so slices, concatenations and reshapes move arrays about and cost nothing.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs.kernels._program.fit import ACROSS, ELEMENTWISE, REDUCTIONS
from cavs.kernels._program.specs import STATIC, Constant, Phase, Rows, Source, Sum, blocks, is_var


class Values:
    """The values of a phase at one tile, each made when it is first read."""

    def __init__(
        self,
        kernel: Any,
        phase: Phase,
        tile: Any,
        results: dict[Any, tuple[int, tuple[int, ...]]],
        found: dict[str, Any] | None = None,
        part: Any = None,
    ):
        self._kernel, self._phase, self._tile, self._results = kernel, phase, tile, results
        self._part = kernel.part if part is None else part  # where the products' sums for the tile are
        self._device, self._table, self._unit = kernel.device, kernel.table, kernel.level.valid
        self._known: dict[Any, np.ndarray] = {}
        self._asked: dict[Any, Callable[[int], Any]] = {}  # inputs that are on their way, by block
        self._found = found or {}  # what index arrays hold at the tile, as far as it was read before

    def __getitem__(self, x: Any) -> np.ndarray:
        """An array of arrays, of the shape `blocks` of the variable."""
        if not is_var(x):
            return _box(x.val)
        if x not in self._known:
            if x in self._phase.eqns:
                self._run(self._phase.eqns[x])
            else:
                self._known[x] = self._read(x)
        return self._known[x]

    def fetch(self) -> None:
        """Begins to read all inputs that the phase's equations and stores need, but for what other CTAs write."""
        for x in self._inputs():
            self._ask(x)

    def prefetch(self) -> None:
        """Brings to L2 what lies in the tile's own rows and was there before the launch."""
        k, made = self._kernel, self._kernel.level.stored()
        for x in self._inputs():
            source = self._source(x)
            if isinstance(source, Rows) and source.index is None and source.tensor not in made:
                ref = self._table[source.tensor]
                for b in range(int(np.prod(self._blocks(x))) if ref.shape[1] > 1 else 1):
                    self._device.prefetch(self._tile, ref, k.scalar(source.base), k.column(b + source.part))

    def indices(self) -> list[str]:
        """Names of the index arrays that say where `fetch` reads."""
        names: list[str | None] = []
        for source in map(self._source, self._inputs()):
            if isinstance(source, Sum):
                names.append(source.direct and source.direct[1])
                names += [index for _, index in source.parts] if source.first is None else []
            elif isinstance(source, Rows):
                names.append(source.index)
        return [name for name in dict.fromkeys(names) if name]

    def _inputs(self) -> list[Any]:
        eqns = self._phase.eqns
        skip = {e.invars[0] for e in eqns.values() if e.primitive.name in (*ACROSS, *REDUCTIONS) and is_var(e.invars[0])}
        read = [x for e in eqns.values() for x in e.invars if e.outvars[0] not in self._results and is_var(x)]
        inputs = dict.fromkeys([*read, *self._phase.stores])
        return [x for x in inputs if x in self._kernel.level.sources and x not in eqns and x not in skip]

    def _source(self, x: Any) -> Source:
        return self._phase.inputs.get(x) or self._kernel.level.sources[x]

    def _blocks(self, x: Any) -> tuple[int, ...]:
        return blocks(x.aval, self._unit)

    def _each(self, x: Any, make: Any) -> np.ndarray:
        out = np.empty(self._blocks(x), object)
        for i, at in enumerate(np.ndindex(*out.shape)):
            out[at] = make(i)
        return out

    def _read(self, x: Any) -> np.ndarray:
        """An input, or what an earlier phase stored. Bools lie in memory as int32, constants in one vector of float32."""
        if x not in self._asked:
            self._ask(x)
        values = self._each(x, self._asked[x])
        if x.aval.dtype == np.bool_:
            return self._each(x, lambda b: values.flat[b] != 0)
        if isinstance(self._source(x), Constant) and x.aval.dtype != np.float32:
            return self._each(x, lambda b: values.flat[b].astype(x.aval.dtype))
        return values

    def _ask(self, x: Any) -> None:
        """Begins to read an input. Nothing is computed with it yet: that would wait until it is there."""
        source = self._source(x)
        dtype = np.dtype(np.int32) if x.aval.dtype == np.bool_ else x.aval.dtype
        asked = [self._parts(source, dtype, b) for b in range(int(np.prod(self._blocks(x))))]
        self._asked[x] = lambda b: functools.reduce(operator.add, asked[b])

    def _parts(self, source: Source, dtype: Any, b: int) -> list[Any]:
        """What adds up to a block of an input."""
        tile, column = self._tile, self._kernel.column(b)
        if isinstance(source, Rows):
            return [self._rows(source, dtype, b, source.index)]
        if isinstance(source, Constant):
            ref, first = self._table[source.tensor], type(tile)(tile.shape, jnp.int32(0), jnp.int32(0))
            wide = ref.shape[1] > 1
            column = column if wide else jnp.int32(0)
            return [self._device.load(first, np.dtype(np.float32), ref, None, jnp.int32(0), column, wide)]
        found = []
        if source.direct is not None:
            ref, number = self._table[source.direct[0]], self._number(source.direct[1])
            wide = ref.shape[1] > 1
            found.append(self._device.load(tile, dtype, ref, number, jnp.int32(0), column if wide else jnp.int32(0), wide))
        for name, index in source.parts:
            ref = self._table[name]
            if source.first is None:
                found.append(self._device.load(tile, dtype, ref, self._number(index), jnp.int32(0), column))
            else:
                ends = self._table[source.first], self._table[source.count]
                found.append(self._device.segments(tile, dtype, ref, self._table[index], *ends, jnp.int32(0), column, False))
        return found or [jnp.zeros(tile.shape, dtype)]  # a state that is neither pushed nor gathered

    def _rows(self, source: Rows, dtype: Any, b: int, index: str | None) -> Any:
        ref = self._table[source.tensor]
        wide = ref.shape[1] > 1
        column = self._kernel.column(b + source.part) if wide else jnp.int32(0)
        found = None if index is None else self._number(index)
        return self._device.load(self._tile, dtype, ref, found, self._kernel.scalar(source.base), column, wide)

    def _number(self, index: str) -> Any:
        """What an index array holds at each row of the tile."""
        if index not in self._found:
            self._found[index] = self._device.number(self._tile, self._table[index])
        return self._found[index]

    def _run(self, e: Any) -> None:
        name, out = e.primitive.name, e.outvars[0]
        if out in self._results:
            slots, columns = self._results[out]
            hb, split = self._kernel.config.hb, self._kernel.config.split
            own = lax.rem(self._kernel.cta, jnp.int32(split)) * hb if split > 1 else 0

            def read(i: int) -> Any:
                lead, b = divmod(i, max(1, self._blocks(out)[-1]))
                return self._device.read_product(self._tile, self._part, slots, columns[lead] + b * hb * split + own)

            self._known[out] = self._each(out, read)
        elif name in ACROSS:
            self._known[out] = self._across(e)
        elif name in REDUCTIONS:
            source = self._kernel.level.sources[e.invars[0]]
            ref, base = self._table[source.tensor], self._kernel.scalar(source.base)
            unit = self._kernel.level.unit
            whole = self._device.whole_rows(self._tile, out.aval.dtype, ref, base, unit, self._unit, REDUCTIONS[name])
            self._known[out] = _box(whole)
        elif name in ELEMENTWISE:
            self._known[out] = self._elementwise(e)
        else:
            outs = _structure(e, [self[x] for x in e.invars], self._unit)
            for v, x in zip(e.outvars, outs, strict=True):
                self._known[v] = x.reshape(self._blocks(v))

    def _across(self, e: Any) -> np.ndarray:
        """Between a vertex and its child edges."""
        x, out = e.invars[0], e.outvars[0]
        name = e.primitive.name
        assert is_var(x) and self._kernel.level.level.get(x, STATIC) != STATIC, "constants are not spread"
        source, dtype = self._kernel.level.sources[x], out.aval.dtype
        if name == "spread":
            if isinstance(source, Constant):
                return self._read(x)
            asked = np.dtype(np.int32) if dtype == np.bool_ else dtype  # as bools lie in memory
            values = self._each(out, lambda b: self._rows(source, asked, b, "edge_owner"))
            return self._each(out, lambda b: values.flat[b] != 0) if dtype == np.bool_ else values
        ref = self._table[source.tensor]
        wide = ref.shape[1] > 1
        index = None if source.index is None else self._table[source.index]
        offset = None if source.base is None else self._kernel.scalar(source.base)
        return self._each(
            out,
            lambda b: self._device.segments(
                self._tile,
                dtype,
                ref,
                index,
                self._table["first"],
                self._table["count"],
                jnp.int32(0),
                self._kernel.column(b + source.part) if wide else jnp.int32(0),
                name == "reduce_children_max",
                wide,
                offset,
            ),
        )

    def _elementwise(self, e: Any) -> np.ndarray:
        args = [self[x] for x in e.invars]
        dtypes = [x.aval.dtype for x in e.invars]

        def one(i: int) -> Any:
            picked = [a.flat[i] if a.size > 1 else a.flat[0] for a in args]
            full = [
                x if np.shape(x) == self._tile.shape else jnp.full(self._tile.shape, x, d)
                for x, d in zip(picked, dtypes, strict=True)
            ]
            return _apply(e, full)

        return self._each(e.outvars[0], one)


def _box(x: Any) -> np.ndarray:
    out = np.empty((), object)
    out[()] = x
    return out


def _apply(e: Any, args: list[Any]) -> Any:
    """One elementwise equation; what Mosaic GPU lacks is written with what it has."""
    x, name = args[0], e.primitive.name
    if name in ("copy", "copy_p", "stop_gradient"):
        return x
    if name == "add_any":
        return x + args[1]
    if name == "expm1":
        return jnp.where(jnp.abs(x) < 1e-2, x * (1 + x * (0.5 + x * (1 / 6 + x / 24))), jnp.exp(x) - 1)
    if name == "log1p":
        return jnp.where(jnp.abs(x) < 1e-2, x * (1 - x * (0.5 - x * (1 / 3 - x / 4))), jnp.log(1 + x))
    if name == "pow":
        return jnp.exp(args[1] * jnp.log(x))
    if name == "erfc":
        return 1 - lax.erf(x)
    if name == "tan":
        return jnp.sin(x) / jnp.cos(x)
    if name == "cbrt":
        return jnp.sign(x) * jnp.exp(jnp.log(jnp.abs(x)) / 3)
    if name == "is_finite":
        return jnp.abs(x) < jnp.inf
    if name == "one_minus_square":
        return 1 - x * x
    if name == "integer_pow":
        power = functools.reduce(lambda a, _: a * x, range(abs(e.params["y"]) - 1), x)
        return 1 / power if e.params["y"] < 0 else power
    return e.primitive.bind(*args, **e.params)


def _structure(e: Any, args: list[np.ndarray], unit: int) -> list[np.ndarray]:
    """What moves whole unit vectors."""
    name, p, x = e.primitive.name, e.params, args[0]
    rank = len(e.invars[0].aval.shape)
    if name in ("reshape", "squeeze", "expand_dims"):
        return [x]
    if name == "split":
        sizes = [n // unit if p["axis"] == rank - 1 else n for n in p["sizes"]]
        return np.split(x, np.cumsum(sizes)[:-1], axis=p["axis"])
    if name == "slice":
        scale = [1] * (rank - 1) + [unit]
        places = zip(p["start_indices"], p["limit_indices"], scale, strict=True)
        return [x[tuple(slice(a // s, b // s) for a, b, s in places)]]
    if name == "concatenate":
        return [np.concatenate(args, axis=p["dimension"])]
    if name == "stack":
        return [np.stack(args, axis=p["axis"])]
    if name == "unstack":
        return [y.squeeze(p["axis"]) for y in np.split(x, x.shape[p["axis"]], axis=p["axis"])]
    if name == "pad":
        widths = [(a, b) for a, b, _ in p["padding_config"]]
        widths[-1] = (widths[-1][0] // unit, widths[-1][1] // unit)
        return [np.pad(x, widths, constant_values=args[1][()])]
    shape = blocks(e.outvars[0].aval, unit)  # broadcast_in_dim
    if x.size == 1 and not x.shape:
        out = np.empty(shape, object)
        for at in np.ndindex(*shape):
            out[at] = x[()]
        return [out]
    kept = dict(zip(p["broadcast_dimensions"], x.shape, strict=True))
    return [np.broadcast_to(x.reshape([kept.get(d, 1) for d in range(len(shape))]), shape)]
