"""`compare`: compares a batched run with the per-vertex interpreter and reports the first difference."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from cavs._debug.interpret import checked_rows, compiled, loop
from cavs._function.arrays import as_arrays
from cavs._function.evaluate import pad_rows
from cavs._function.vertex import Vertex, VertexFunction, check_function
from cavs._graphs.checks import check_bool, check_type, vertex_at
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs, check_graphs
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.memo import memoized
from cavs._run.run import run
from cavs._schedule.schedule import Schedule, check_schedule
from cavs._schedule.scheduler import schedule


@dataclasses.dataclass(frozen=True)
class Difference:
    """A symbol for which a run and the interpreter differ, at the first vertex where they do.

    Attributes:
        symbol: the symbol: `"state['h']"`, `"push"`, `"gradient of params['w']"`, ...
        row: the flat row of the vertex; `None` for a gradient of params, which has no vertex.
        graph: the graph of the vertex, or `None`.
        vertex: the vertex within its graph, or `None`.
        level: the height of the vertex, or `None`.
        got: the value of the run.
        expected: the value of the interpreter.
        error: their largest absolute difference.
        vertices: the number of vertices at which the symbol differs.
    """

    symbol: str
    row: int | None
    graph: int | None
    vertex: int | None
    level: int | None
    got: np.ndarray
    expected: np.ndarray
    error: float
    vertices: int

    def __str__(self) -> str:
        index = np.unravel_index(int(np.argmax(_distance(self.got, self.expected))), self.got.shape)
        entry = f" (entry {list(map(int, index))})" if index else ""
        values = f"run has {self.got[index]:.9g}, interpret has {self.expected[index]:.9g}{entry}"
        if self.row is None:
            return f"{self.symbol}: {values}"
        at = f"vertex {self.vertex} of graph {self.graph} (row {self.row}, level {self.level})"
        return f"{self.symbol} at {at}: {values}; differs at {counted(self.vertices, 'vertex')}"


class _Differences:
    """Collects the first vertex at which each symbol of two results differs: from the leaves up, or from the roots `down`."""

    def __init__(self, graphs: Graphs, tolerance: float, down: bool = False):
        self._graphs, self._tolerance, self.worst = graphs, tolerance, 0.0
        self._levels = -graphs.height if down else graphs.height
        self._all: list[Difference] = []

    def add(self, name: str, got: PyTree, want: PyTree, vertex: np.ndarray | None) -> None:
        """Compares leaves with a row for each of `vertex`, the vertices in flat rows; `None`: the leaves have no such axis."""
        for path, a, b in _leaves(got, want):
            bad, error = self._wrong(*((a, b) if vertex is not None else (a[None], b[None])))
            if not bad.any():
                continue
            if vertex is None:
                self._all.append(Difference(f"{name}{path}", None, None, None, None, a, b, float(error[0]), 0))
                continue
            rows = np.flatnonzero(bad)
            first = int(rows[np.argmin(self._levels[vertex[rows]])])
            row, vertices = int(vertex[first]), len(np.unique(vertex[rows]))
            place = (row, *vertex_at(self._graphs.vertex_offsets, row), int(self._graphs.height[row]))
            self._all.append(Difference(f"{name}{path}", *place, a[first], b[first], float(error[first]), vertices))

    def in_order(self) -> list[Difference]:
        """Returns the differences by level and row, those without a vertex last. Those at one vertex keep their order."""
        return sorted(self._all, key=lambda d: (1, 0, 0) if d.row is None else (0, self._levels[d.row], d.row))

    def _wrong(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inner = tuple(range(1, a.ndim))
        error = _distance(a, b).max(inner, initial=0)
        self.worst = max(self.worst, float(error.max(initial=0)))
        size = np.where(np.isfinite(b), np.abs(b), 0).max(inner, initial=1) if is_float(b) else 0
        return error > self._tolerance * size, error


def _leaves(got: PyTree, want: PyTree) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """The paths and values of both, without keys of `jax.random` and the gradients of integers."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True)
    return [
        (jax.tree_util.keystr(path), np.asarray(a), np.asarray(b))
        for (path, b), a in pairs
        if b.dtype != jax.dtypes.float0 and not jax.dtypes.issubdtype(b.dtype, jax.dtypes.extended)
    ]


def _distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a - b|. The distance of NaN or an infinity to itself is 0, and to any other value infinite."""
    if not is_float(a):
        return np.abs(a.astype(np.int64) - b.astype(np.int64)).astype(np.float64)
    wide = np.complex128 if np.iscomplexobj(a) else np.float64
    a, b = a.astype(wide), b.astype(wide)
    with np.errstate(invalid="ignore"):
        distance = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return np.where(np.isnan(distance), np.inf, distance)


Run: TypeAlias = Callable[[PyTree, PyTree, PyTree], PyTree]  # (params, inputs, edges) -> pushes

# The default tolerance for the coarsest floating dtype among parameters, inputs and states.
_TOLERANCE = {"float64": 1e-9, "complex128": 1e-9, "float32": 1e-4, "complex64": 1e-4}
_COARSE = 0.05  # bfloat16, float16 and coarser dtypes


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of [`cavs.debug.compare`][]. `print` shows it.

    Attributes:
        differences: one per symbol that differs, the first difference first.
        summary: what was compared, and the largest difference.
    """

    differences: tuple[Difference, ...]
    summary: str

    @property
    def first(self) -> Difference | None:
        """The first difference, or `None`: values in the order of levels, then gradients from the roots down."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        if not self.differences:
            return f"run and interpret agree: {self.summary}"
        first, *rest = map(str, self.differences)
        return "\n".join([f"run and interpret differ: {self.summary}", f"first: {first}", *(f"then:  {d}" for d in rest)])


def compare(
    F: VertexFunction,
    params: PyTree,
    graphs: Graphs,
    inputs: PyTree = None,
    *,
    edges: PyTree = None,
    engine: str | None = None,
    sched: Schedule | None = None,
    gradients: bool = True,
    tolerance: float | None = None,
) -> Comparison:
    """Compares [`cavs.run`][] with [`cavs.interpret`][]: every state, push and gradient at every vertex.

    ```python
    print(cavs.debug.compare(F, params, graphs[:8], x))
    # run and interpret differ: states, pushes and gradients of 412 vertices, largest difference 0.06
    # first: state['c'] at vertex 3 of graph 5 (row 288, level 2): run has 0.25, interpret has 0.31 (entry [7]); ...
    ```

    The gradients are those of a weighted sum of all float pushes, with a different fixed weight for each. The gradient of a
    vertex's state is the sum over its parents and its own pushes. The comparison is slow: pass a few graphs.

    Args:
        F: the vertex function.
        params: as for [`cavs.interpret`][].
        graphs: as for [`cavs.interpret`][].
        inputs: as for [`cavs.interpret`][].
        edges: as for [`cavs.interpret`][].
        engine: the engine of the run; `None` for the default of [`cavs.run`][].
        sched: the schedule of the run; `None` for `cavs.schedule(graphs)`.
        gradients: whether to compare gradients, too.
        tolerance: relative to the largest entry of a row, or to 1 if that is smaller. Integers must be equal. `None`
            depends on the coarsest dtype among parameters, inputs and states: 1e-9 for float64, 1e-4 for float32, 0.05 for
            bfloat16.

    Returns:
        The differences.

    Raises:
        TypeError: as `run` and `interpret`; or `gradients` is no bool.
        ValueError: as `run` and `interpret`; or `tolerance` is negative or NaN.
    """
    check_function("compare", F)
    check_graphs(graphs, "compare(F, params, graphs, inputs)")
    params = as_arrays(params, "compare: params")
    inputs = checked_rows("compare: inputs", inputs, graphs.num_vertices, "vertex")
    edges = checked_rows("compare: edges", edges, graphs.num_edges, "edge")
    check_bool("compare: gradients", gradients)
    check_type("compare: tolerance", tolerance, int | float | np.number | None, "a number, or None")
    if tolerance is not None and not tolerance >= 0:  # nothing differs by more than NaN
        raise ValueError(f"compare: tolerance: got {tolerance!r}; expected a number >= 0, or None.")
    sched = schedule(graphs) if sched is None else sched
    check_schedule("compare", sched)
    if sched.num_vertices != graphs.num_vertices:
        raise ValueError(
            f"compare: sched: got a schedule of {counted(int(sched.num_vertices), 'vertex')}; expected one of graphs, which "
            f"have {graphs.num_vertices}. Write sched=cavs.schedule(graphs, ...)."
        )
    if not graphs.num_vertices:
        return Comparison((), "no vertices")
    probe, deltas = probed(F, params, inputs, graphs.num_vertices)
    call = compiled(probe, graphs)

    def looped(p: PyTree, x: PyTree, e: PyTree) -> PyTree:
        return loop(probe, p, graphs, x, e, call)

    probe_inputs = {"inputs": inputs, "delta": deltas}
    evaluate = functools.partial(_values_and_gradients, gradients=gradients)
    plain, plain_grads = evaluate(batched(F, sched, graphs, engine), params, inputs, edges)
    got, got_grads = evaluate(batched(probe, sched, graphs, engine), params, probe_inputs, edges, "push")
    want, want_grads = evaluate(looped, params, probe_inputs, edges, "push")

    if tolerance is None:
        dtypes = {x.dtype for x in (*jax.tree.leaves((params, inputs)), *F.state_avals(params, inputs))}
        tolerance = max([_TOLERANCE.get(d.name, _COARSE) for d in dtypes if jnp.issubdtype(d, jnp.inexact)], default=0.0)
    forward, backward = _Differences(graphs, tolerance), _Differences(graphs, tolerance, down=True)
    vertices = np.arange(graphs.num_vertices)
    forward.add("state", got["state"], want["state"], vertices)
    forward.add("push", plain, want["push"], vertices)
    if gradients:
        named = F.state_tree.unflatten(range(F.state_tree.num_leaves))
        names = {str(i): jax.tree_util.keystr(path) for path, i in jax.tree_util.tree_leaves_with_path(named)}
        for i in got_grads[1]["delta"]:
            backward.add(f"gradient of state{names[i]}", got_grads[1]["delta"][i], want_grads[1]["delta"][i], vertices)
        backward.add("gradient of inputs", plain_grads[1], want_grads[1]["inputs"], vertices)
        backward.add("gradient of edges", plain_grads[2], want_grads[2], graphs._edges[0])
        backward.add("gradient of params", plain_grads[0], want_grads[0], None)
    worst, compared = max(forward.worst, backward.worst), "states, pushes and gradients" if gradients else "states and pushes"
    summary = f"{compared} of {counted(graphs.num_vertices, 'vertex')}, largest difference {worst:.3g}"
    return Comparison((*forward.in_order(), *backward.in_order()), summary)


def probed(F: VertexFunction, params: PyTree, inputs: PyTree, num_vertices: int) -> tuple[VertexFunction, dict[str, jax.Array]]:
    """Instruments F so that a run returns its states and their gradients.

    Returns a vertex function that pushes {"state": the state of F, "push": the pushes of F}. Its inputs are {"inputs": the
    inputs of F, "delta": ...}. It adds delta to the float states, so that both have the same gradients. And returns a delta of
    zeros, by the number of the state leaf.
    """
    avals = tuple(F.state_avals(params, inputs))
    deltas = {str(i): jnp.zeros((num_vertices, *a.shape), a.dtype) for i, a in enumerate(avals) if is_float(a)}
    return _probe(F, avals), deltas


@memoized
def _probe(F: VertexFunction, avals: tuple[jax.ShapeDtypeStruct, ...]) -> VertexFunction:
    """The function of `probed`. Later calls reuse its compiled code."""

    def wrap(fn: Callable[[PyTree, Vertex], None]) -> Callable[[PyTree, Vertex], None]:
        def one_vertex(params: PyTree, v: Vertex) -> None:
            inner = v._with_inputs(v.pull("inputs"))
            fn(params, inner)
            if inner.scattered is None:
                return
            deltas = v.pull("delta")
            leaves = [x + deltas[str(i)] if str(i) in deltas else x for i, x in enumerate(inner.scattered)]
            state = F.state_tree.unflatten(leaves)
            v.scatter(state)
            if inner.pushed:
                v.push({"state": state, "push": inner._value})

        return one_vertex

    fns = wrap(F.fns[None]) if None in F.fns else {kind: wrap(fn) for kind, fn in F.fns.items()}
    return VertexFunction(fns, state=F.state_tree.unflatten(avals), arity=F.arity, optimizations=F.optimizations)


def batched(F: VertexFunction, sched: Schedule, graphs: Graphs, engine: str | None = None) -> Run:
    """Returns `run` as a function of params, inputs and edges without padding. It can be traced, other than `sched.pad`."""

    def batch(params: PyTree, inputs: PyTree, edges: PyTree) -> PyTree:
        inputs = jax.tree.map(lambda x: pad_rows(x, sched.shape.vertices), inputs)
        pushes = run(F, params, sched, inputs, edges=edges, engine=engine)
        return jax.tree.map(lambda y: y[: graphs.num_vertices], pushes)

    return batch


def _values_and_gradients(
    fn: Run, params: PyTree, inputs: PyTree, edges: PyTree, key: str | None = None, *, gradients: bool
) -> tuple[PyTree, PyTree]:
    """Returns the pushes, and the `gradients` of the weighted sum of them, or of those with a key; else `None`.

    The gradients are with respect to (params, inputs, edges), float0 for integers.
    """

    def scalar(params: PyTree, inputs: PyTree, edges: PyTree) -> tuple[jax.Array, PyTree]:
        out = fn(params, inputs, edges)
        total = jnp.zeros(())
        for x in jax.tree.leaves(out if key is None else out[key]):
            if is_float(x):
                weights = np.cos(np.arange(x.size, dtype=np.float64)).reshape(x.shape)
                total = total + (jnp.real(x) * weights.astype(np.float32)).sum()
        return total, out

    if not gradients:
        return fn(params, inputs, edges), None
    grads, out = jax.grad(scalar, argnums=(0, 1, 2), has_aux=True, allow_int=True)(params, inputs, edges)
    return out, grads
