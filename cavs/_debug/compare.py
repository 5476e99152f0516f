"""`compare`: a batched run against the loop over its vertices: the first vertex and symbol that differ."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cavs._debug.interpret import compiled, loop, place_of
from cavs._function.equations import pad_rows
from cavs._function.vertex import Vertex, VertexFunction, as_arrays
from cavs._graphs.graphs import Graphs
from cavs._run.run import run
from cavs._schedule.schedule import Schedule
from cavs._schedule.scheduler import schedule

# By the coarsest floating dtype among parameters, inputs and states.
_TOLERANCE = {"float64": 1e-9, "complex128": 1e-9, "float32": 1e-4, "complex64": 1e-4}
_COARSE = 0.05  # bfloat16, float16 and less


@dataclasses.dataclass(frozen=True)
class Difference:
    """One symbol that a run and the loop compute differently, at the first vertex where they do.

    **Fields:** `symbol`: `"state['h']"`, `"push"`, `"gradient of params['w']"`, ...; `row`, `graph`, `vertex`, `level`: where:
    flat row, graph, vertex within the graph, height; `None` for a gradient of params, which has no vertex; `got` and
    `wanted`: the values of the run and of the loop there; `error`: their largest difference; `vertices`: at how many
    vertices the symbol differs.
    """

    symbol: str
    row: int | None
    graph: int | None
    vertex: int | None
    level: int | None
    got: np.ndarray
    wanted: np.ndarray
    error: float
    vertices: int

    def __str__(self) -> str:
        index = np.unravel_index(int(np.argmax(_distance(self.got, self.wanted))), self.got.shape)
        entry = f" (entry {list(map(int, index))})" if index else ""
        values = f"run has {self.got[index]:.9g}, the loop {self.wanted[index]:.9g}{entry}"
        if self.row is None:
            return f"{self.symbol}: {values}"
        at = f"vertex {self.vertex} of graph {self.graph} (row {self.row}, level {self.level})"
        return f"{self.symbol} at {at}: {values}; differs at {self.vertices} vertices"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found. **Fields:** `differences`, one a symbol, the first first; `summary` of what was compared."""

    differences: tuple[Difference, ...]
    summary: str

    @property
    def first(self) -> Difference | None:
        """The first difference: of values by level, then of gradients from the roots down; `None` where all agree."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        if not self.differences:
            return f"run and the loop agree: {self.summary}"
        first, *rest = map(str, self.differences)
        return "\n".join([f"run and the loop differ: {self.summary}", f"first: {first}", *(f"then:  {d}" for d in rest)])


def compare(
    F: VertexFunction,
    params: Any,
    graphs: Graphs,
    inputs: Any = None,
    *,
    engine: str | None = None,
    sched: Schedule | None = None,
    gradients: bool = True,
    tolerance: float | None = None,
) -> Comparison:
    """Holds `cavs.run` against `cavs.interpret`: every state, push and gradient at every vertex.

    ```python
    print(cavs.debug.compare(F, params, graphs[:8], x))
    # run and the loop differ: states, pushes and gradients of 412 vertices, largest difference 0.06
    # first: state['c'] at vertex 3 of graph 5 (row 288, level 2): run has 0.25, the loop 0.31 (entry [7]); ...
    ```

    Gradients are those of the sum of all float pushes, each weighted by a fixed number of its own; the gradient of a
    vertex's state is what reaches it from all its parents and pushes.

    **Arguments:**

    - `F`, `params`, `graphs`, `inputs`: as for `cavs.interpret`.
    - `engine`, `sched`: what to run with; `None`: as `cavs.run` chooses, and `cavs.schedule(graphs)`.
    - `gradients`: `False` compares values alone.
    - `tolerance`: relative to a row's largest entry, or 1; `None`: 1e-9, or with a float32
      among parameters, inputs and states 1e-4, with a bfloat16 0.05. Integers must be equal.

    **Raises:** what `run` and `interpret` raise. Slow: for a few graphs.
    """
    params, inputs = as_arrays(params, "compare: params"), as_arrays(inputs, "compare: inputs")
    sched = schedule(graphs) if sched is None else sched
    if not graphs.num_vertices:
        return Comparison((), "no vertices")
    probe, deltas = probed(F, params, inputs, graphs.num_vertices)

    def batched(function: VertexFunction) -> Callable[[Any, Any], Any]:
        return lambda p, x: jax.tree.map(
            lambda y: y[: graphs.num_vertices], run(function, p, sched, padded_rows(x, sched), engine=engine)
        )

    call = compiled(probe, graphs)

    def looped(p: Any, x: Any) -> Any:
        return loop(probe, p, graphs, x, call)

    both = {"inputs": inputs, "delta": deltas}
    how = _values_and_gradients if gradients else _values
    plain, plain_grads = how(batched(F), params, inputs, lambda pushes: pushes)
    got, got_grads = how(batched(probe), params, both, lambda pushes: pushes["push"])
    want, want_grads = how(looped, params, both, lambda pushes: pushes["push"])

    if tolerance is None:
        dtypes = {x.dtype for x in (*jax.tree.leaves((params, inputs)), *F.state_avals(params, inputs))}
        tolerance = max([_TOLERANCE.get(d.name, _COARSE) for d in dtypes if jnp.issubdtype(d, jnp.inexact)], default=0.0)
    found, later = _Differences(graphs, tolerance), _Differences(graphs, tolerance)
    for name, got_values, want_values in (("state", got["state"], want["state"]), ("push", plain, want["push"])):
        found.per_vertex(name, got_values, want_values, sign=1)
    found.sort(sign=1)
    if gradients:
        named = F.state_tree.unflatten(range(F.state_tree.num_leaves))
        names = {str(i): jax.tree_util.keystr(path) for path, i in jax.tree_util.tree_flatten_with_path(named)[0]}
        for i in got_grads[1]["delta"]:
            later.per_vertex(f"gradient of state{names[i]}", got_grads[1]["delta"][i], want_grads[1]["delta"][i], sign=-1)
        later.per_vertex("gradient of inputs", plain_grads[1], want_grads[1]["inputs"], sign=-1)
        later.sort(sign=-1)
        later.whole("gradient of params", plain_grads[0], want_grads[0])
    worst, what = max(found.worst, later.worst), "states, pushes and gradients" if gradients else "states and pushes"
    summary = f"{what} of {graphs.num_vertices} vertices, largest difference {worst:.3g}"
    return Comparison((*found.all, *later.all), summary)


def probed(F: VertexFunction, params: Any, inputs: Any, num_vertices: int) -> tuple[VertexFunction, dict[str, Any]]:
    """F that pushes {"state": what it scatters, "push": what F pushes}, and adds its input "delta" to the float states, so
    that delta's gradients are the states'. Its inputs are {"inputs": F's, "delta": ...}; also returns a delta of zeros, by
    the state leaf's number."""
    avals = tuple(F.state_avals(params, inputs))
    floats = [i for i, a in enumerate(avals) if jnp.issubdtype(a.dtype, jnp.inexact)]
    return _probe(F, avals), {str(i): jnp.zeros((num_vertices, *avals[i].shape), avals[i].dtype) for i in floats}


@functools.lru_cache(maxsize=16)
def _probe(F: VertexFunction, avals: tuple[jax.ShapeDtypeStruct, ...]) -> VertexFunction:
    """`probed`'s function, kept: its compiled code serves the next call."""

    def wrap(fn: Callable[[Any, Vertex], None]) -> Callable[[Any, Vertex], None]:
        def one_vertex(params: Any, v: Vertex) -> None:
            inner = copy.copy(v)
            inner._inputs, inner.pushed = v._inputs["inputs"], {}
            fn(params, inner)
            if inner.scattered is None:
                return
            deltas = v._inputs["delta"]
            leaves = [x + deltas[str(i)] if str(i) in deltas else x for i, x in enumerate(inner.scattered)]
            state = F.state_tree.unflatten(leaves)
            v.scatter(state)
            if inner.pushed:
                v.push({"state": state, "push": inner.pushed[None] if None in inner.pushed else inner.pushed})

        return one_vertex

    fns = wrap(F.fns[None]) if None in F.fns else {kind: wrap(fn) for kind, fn in F.fns.items()}
    return VertexFunction(fns, state=F.state_tree.unflatten(avals), arity=F.arity, optimizations=F.optimizations)


def padded_rows(inputs: Any, sched: Schedule) -> Any:
    """Inputs of one row per vertex as the padded ones that `run` takes under jit."""
    return jax.tree.map(lambda x: pad_rows(x, sched.shape.vertices), inputs)


def _values(fn: Any, params: Any, inputs: Any, pushes_of: Any) -> tuple[Any, Any]:
    return fn(params, inputs), None


def _values_and_gradients(fn: Any, params: Any, inputs: Any, pushes_of: Any) -> tuple[Any, Any]:
    """Pushes, and the gradients of their weighted sum with respect to (params, inputs); zeros for what is no float."""

    def scalar(params: Any, inputs: Any) -> Any:
        out = fn(params, inputs)
        total = jnp.zeros(())
        for x in jax.tree.leaves(pushes_of(out)):
            if jnp.issubdtype(x.dtype, jnp.inexact):
                weights = np.cos(np.arange(x.size, dtype=np.float64)).reshape(x.shape)
                total = total + (jnp.real(x) * weights.astype(np.float32)).sum()
        return total, out

    grads, out = jax.grad(scalar, argnums=(0, 1), has_aux=True, allow_int=True)(params, inputs)
    return out, grads


class _Differences:
    """Collects, for each symbol, the first vertex where two results differ."""

    def __init__(self, graphs: Graphs, tolerance: float):
        self.graphs, self.tolerance, self.worst = graphs, tolerance, 0.0
        self.all: list[Difference] = []

    def per_vertex(self, name: str, got: Any, want: Any, sign: int) -> None:
        """Leaves of one row per vertex; the first vertex has the least level (`sign` 1) or the greatest (-1)."""
        for path, a, b in _leaves(got, want):
            bad, error = self._wrong(a, b)
            if bad.any():
                rows = np.flatnonzero(bad)
                row = int(rows[np.argmin(sign * self.graphs.height[rows])])
                where = (row, *place_of(self.graphs, row), int(self.graphs.height[row]))
                self.all.append(Difference(f"{name}{path}", *where, a[row], b[row], float(error[row]), len(rows)))

    def whole(self, name: str, got: Any, want: Any) -> None:
        """Leaves without vertices."""
        for path, a, b in _leaves(got, want):
            bad, error = self._wrong(a[None], b[None])
            if bad.any():
                self.all.append(Difference(f"{name}{path}", None, None, None, None, a, b, float(error[0]), 0))

    def sort(self, sign: int) -> None:
        """The earliest first; at one vertex in the order in which they came."""
        self.all.sort(key=lambda d: (sign * (d.level or 0), d.row))

    def _wrong(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        error = _distance(a, b).reshape(len(a), -1).max(1, initial=0)
        size = np.where(np.isfinite(b), np.abs(b), 0) if b.dtype != bool else np.zeros(b.shape)
        size = np.maximum(size.reshape(len(b), -1).max(1, initial=0), 1)
        exact = not jnp.issubdtype(b.dtype, jnp.inexact)
        self.worst = max(self.worst, float(error.max(initial=0)))
        return error > (0 if exact else self.tolerance * size), error


def _leaves(got: Any, want: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    paths = jax.tree_util.tree_flatten_with_path(want)[0]
    pairs = zip(paths, jax.tree.leaves(got), strict=True)
    skipped = (jax.dtypes.float0, jax.dtypes.extended)
    return [
        (jax.tree_util.keystr(path), np.asarray(a), np.asarray(b))
        for (path, b), a in pairs
        if not any(b.dtype == d or jax.dtypes.issubdtype(b.dtype, d) for d in skipped)
    ]


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b|, in which NaN and infinity are equal to themselves alone, and infinitely far from the rest."""
    if a.dtype == bool or not jnp.issubdtype(a.dtype, jnp.inexact):
        return np.abs(a.astype(np.int64) - b.astype(np.int64)).astype(np.float64)
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    with np.errstate(invalid="ignore"):
        distance = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return np.where(np.isnan(distance), np.inf, distance)
