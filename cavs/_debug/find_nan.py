"""`find_nan`: finds the vertex, the equation and the line that produced the first NaN, forward or in the gradient."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from cavs._debug.compare import batched, probed
from cavs._debug.interpret import at_vertex, checked_rows, children_of, compiled, edges_of
from cavs._function.arrays import as_arrays
from cavs._function.vertex import VertexFunction, check_function
from cavs._graphs.arguments import check_takes
from cavs._graphs.checks import check_bool, vertex_at
from cavs._graphs.graphs import Graphs, check_graphs
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.equations import is_float, run_equations, values
from cavs._jaxpr.jaxprs import CALLS, Eqn, Jaxpr, Literal, Var, body_of, opened
from cavs._jaxpr.settings import promoting
from cavs._jaxpr.source_lines import source_line
from cavs._schedule.scheduler import schedule
from cavs._stages.cotangents import zero_cotangent


@dataclasses.dataclass(frozen=True)
class NanReport:
    """The origin of a NaN, as [`cavs.debug.find_nan`][] found it. `print` shows it.

    Attributes:
        where: "params", "inputs" or "edges" if it was there before F ran, "forward", "loss" if the user's loss produced it, or
            "gradient".
        symbol: the array that contains it: `"state['h']"`, `"push"`, `"gradient of params['w']"`, ...
        row: the flat row of the vertex, or `None`.
        graph: the graph of the vertex, or `None`.
        vertex: the vertex within its graph, or `None`.
        level: the height of the vertex, or `None`.
        equation: the equation that produced the NaN from operands without one, with the ranges of its operands; `None` if F
            did not produce it.
        source: the line of the program that contains this equation, or `None`.
        what: "NaN", or "NaN or infinity" if infinite values were searched for, too.
    """

    where: str
    symbol: str
    row: int | None = None
    graph: int | None = None
    vertex: int | None = None
    level: int | None = None
    equation: str | None = None
    source: str | None = None
    what: str = "NaN"

    def __str__(self) -> str:
        at = "" if self.row is None else f" at vertex {self.vertex} of graph {self.graph} (row {self.row}, level {self.level})"
        lines = [f"{self.where}: {self.symbol} is the first {self.what}{at}", *filter(None, (self.equation, self.source))]
        return "\n  ".join(lines)


# The only types of the operands and results of equations that are evaluated here.
Value: TypeAlias = jax.Array | np.ndarray
AtVertex: TypeAlias = Callable[..., PyTree]  # F or its transpose at one vertex


def find_nan(
    F: VertexFunction,
    params: PyTree,
    graphs: Graphs,
    inputs: PyTree = None,
    *,
    edges: PyTree = None,
    loss: Callable[[PyTree], jax.Array] | None = None,
    infinities: bool = False,
) -> NanReport | None:
    """Finds the first NaN of a run or of its gradient, and the equation that produced it.

    ```python
    print(cavs.debug.find_nan(F, params, graphs, x))
    # gradient: gradient of params['w'] is the first NaN at vertex 2 of graph 0 (row 2, level 1)
    #   mul of float64[5] 0 to 0 and float64[5] 0.31 to inf, in the transpose of
    #   program.py, line 12, in cell: h = jnp.where(z > 0, jnp.sqrt(z), 0)
    ```

    The batch runs once; if F has no derivative in reverse mode, only this run is searched. Then F is evaluated at the vertex
    in question, one equation at a time.

    Args:
        F: the vertex function.
        params: as for [`cavs.interpret`][].
        graphs: as for [`cavs.interpret`][].
        inputs: as for [`cavs.interpret`][].
        edges: as for [`cavs.interpret`][].
        loss: a function from the pushes (V, ...) to a scalar, which is searched, and whose gradient is; `None` for the sum of
            all float pushes.
        infinities: whether to search for infinite values, too.

    Returns:
        The origin of the NaN, or `None` if there is none.

    Raises:
        TypeError: as [`cavs.run`][]; or `infinities` is no bool, or `loss` returns something else than a real scalar.
        ValueError: as [`cavs.run`][].
    """
    check_function("find_nan", F)
    check_graphs(graphs, "find_nan(F, params, graphs, inputs)")
    if loss is not None:
        check_takes("find_nan: loss", loss, "pushes")
    check_bool("find_nan: infinities", infinities)
    params = as_arrays(params, "find_nan: params")
    inputs = checked_rows("find_nan: inputs", inputs, graphs.num_vertices, "vertex")
    edges = checked_rows("find_nan: edges", edges, graphs.num_edges, "edge")
    search = _Search(F, params, graphs, inputs, edges, infinities)
    vertices = np.arange(graphs.num_vertices)
    for where, tree, owners in (("params", params, None), ("inputs", inputs, vertices), ("edges", edges, graphs._edges[0])):
        if bad := search.first_bad([(where, tree)]):
            return search.report(where, bad.symbol, None if owners is None else owners[search.bad_rows(bad.leaf)][0])
    if not graphs.num_vertices:
        return None

    probe, deltas = probed(F, params, inputs, graphs.num_vertices)
    batch, args = batched(probe, schedule(graphs), graphs), (params, {"inputs": inputs, "delta": deltas}, edges)
    try:
        pushes, vjp = jax.vjp(batch, *args)
    except TypeError:  # F has no derivative, unless the run itself raises the error again
        return search.forward(batch(*args))
    report = search.forward(pushes)
    if report is not None:
        return report
    if loss is not None:
        _check_scalar(jax.eval_shape(loss, pushes["push"]))
    value, cotangents = jax.value_and_grad(loss or _sum, allow_int=True)(pushes["push"])
    if bad := search.first_bad([("gradient of push", cotangents)]):
        return search.report("loss", bad.symbol, int(np.argmax(search.bad_rows(bad.leaf))))
    if loss is not None and search.bad(jnp.asarray(value)):
        return search.report("loss", "its value")
    zeros = jax.tree.map(zero_cotangent, pushes["state"])
    return search.backward(pushes["state"], cotangents, *vjp({"state": zeros, "push": cotangents}))


def _check_scalar(found: PyTree) -> None:
    """Raises `TypeError` if the shape of what the user's loss returns is not that of a real scalar."""
    if not isinstance(found, jax.ShapeDtypeStruct) or found.shape or not jnp.issubdtype(found.dtype, jnp.floating):
        got = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", found)
        raise TypeError(f"find_nan: loss: returned {got!r:.200}; expected a real scalar. Write lambda pushes: pushes.sum().")


class _Bad(NamedTuple):
    """A leaf with a NaN."""

    symbol: str
    number: int  # among all leaves
    leaf: Value


class _Search:
    """A search for NaN (or infinities) in the values of a run."""

    def __init__(self, F: VertexFunction, params: PyTree, graphs: Graphs, inputs: PyTree, edges: PyTree, infinities: bool):
        self.F, self.params, self.graphs, self.infinities = F, params, graphs, infinities
        self.inputs, self.edges = inputs, edges

    def bad(self, x: Value) -> bool:
        return bool(self.bad_rows(x[None]).any())

    def bad_rows(self, x: Value) -> np.ndarray:
        """(rows,) bool, whether each row of an array contains a NaN."""
        if not is_float(x):
            return np.zeros(x.shape[0], bool)
        x = np.asarray(x)
        bad = ~np.isfinite(x) if self.infinities else np.isnan(x)
        return np.asarray(bad.any(tuple(range(1, bad.ndim))))

    def report(
        self, where: str, symbol: str, row: int | None = None, equation: str | None = None, source: str | None = None
    ) -> NanReport:
        """The report for the vertex in a flat row, if any."""
        what = "NaN or infinity" if self.infinities else "NaN"
        if row is None:
            return NanReport(where, symbol, equation=equation, source=source, what=what)
        graph, vertex = vertex_at(self.graphs.vertex_offsets, row)
        return NanReport(where, symbol, int(row), graph, vertex, int(self.graphs.height[row]), equation, source, what)

    def first_bad(self, trees: list[tuple[str, PyTree]]) -> _Bad | None:
        """The first leaf with a NaN of some trees and their names."""
        number = 0
        for name, tree in trees:
            for path, x in jax.tree_util.tree_leaves_with_path(tree):
                if self.bad(x):
                    return _Bad(name + jax.tree_util.keystr(path), number, x)
                number += 1
        return None

    def tainted(self, tree: PyTree) -> np.ndarray:
        """(V,) bool, whether a row of any leaf contains a NaN."""
        return np.any([np.zeros(self.graphs.num_vertices, bool), *map(self.bad_rows, jax.tree.leaves(tree))], 0)

    def forward(self, pushes: PyTree) -> NanReport | None:
        """Reports the vertex of the lowest level that scatters or pushes a NaN. Its children scatter none."""
        rows = np.flatnonzero(self.tainted(pushes))
        if not len(rows):
            return None
        row = int(rows[np.argmin(self.graphs.height[rows])])
        bad = self.first_bad([(name, _row(row, pushes[name])) for name in ("state", "push")])
        assert bad is not None
        fn = functools.partial(at_vertex, self.F, self.graphs, row)
        equation, source = self.culprit(fn, (self.params, *self.around(row, pushes["state"])), bad.number)
        return self.report("forward", bad.symbol, row, equation, source)

    def backward(
        self, states: PyTree, push_cts: PyTree, ct_params: PyTree, ct_inputs: PyTree, ct_edges: PyTree
    ) -> NanReport | None:
        """Reports the first vertex, from the roots down, that turns cotangents without a NaN into cotangents with one."""
        if self.first_bad([("", (ct_params, ct_inputs, ct_edges))]) is None:
            return None
        leaves, state_tree = jax.tree.flatten(states)
        deltas = ct_inputs["delta"]  # of float states; those of others are zeros
        state_cts = state_tree.unflatten([deltas.get(str(i), jnp.zeros_like(x)) for i, x in enumerate(leaves)])
        cts = state_cts, jax.tree.map(_without_float0, push_cts)
        tainted, transpose = self.tainted(cts), compiled(self.F, self.graphs, _transpose_at_vertex)
        for row in np.argsort(-self.graphs.height, kind="stable"):
            if tainted[row]:
                continue
            args = ((self.params, *self.around(row, states)), _row(row, cts))
            names = ("params", "inputs", "edges", "child states")
            out = zip(names, transpose(row, *args), strict=True)
            if bad := self.first_bad([(f"gradient of {name}", x) for name, x in out]):
                fn = functools.partial(_transpose_at_vertex, self.F, self.graphs, row)
                return self.report("gradient", bad.symbol, row, *self.culprit(fn, args, bad.number))
        return self.report("gradient", "a sum over vertices of gradients without a NaN")

    def around(self, row: int, states: PyTree) -> tuple[PyTree, PyTree, list[PyTree]]:
        """The vertex's row of the inputs, the rows of the edges to its children, and their states."""
        children = [_row(child, states) for child in children_of(self.graphs, row)]
        return _row(row, self.inputs), edges_of(self.graphs, row, self.edges), children

    def culprit(self, fn: AtVertex, args: tuple[PyTree, ...], number: int) -> tuple[str, str | None]:
        """The equation of `fn` that produced the NaN in its output `number`, and the line of the program."""
        jaxpr, consts = opened(jax.make_jaxpr(fn)(*args))
        origin = self._trace_back(jaxpr, consts, jax.tree.leaves(args), number)
        if origin is None:
            return "(the per-vertex interpreter does not produce it; see cavs.debug.compare)", None
        outer, eqn, operands = origin
        transposed = ", in the transpose of" if "transpose" in str(outer.source_info.name_stack) else ", in"
        ranges = " and ".join(map(_range, operands))
        return f"{eqn.primitive.name} of {ranges}{transposed}", source_line(outer)

    def _trace_back(
        self, jaxpr: Jaxpr, consts: Sequence[Value], args: Sequence[Value], number: int
    ) -> tuple[Eqn, Eqn, list[Value]] | None:
        """Follows a NaN back from output `number` to the equation that produced it.

        Returns the equation of `jaxpr`, the innermost equation within it, and the operands of the latter.
        """
        env: dict[Var, Value] = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
        run_equations(jaxpr.eqns, env)
        origin = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        var = jaxpr.outvars[number]
        if isinstance(var, Literal) or not self.bad(env[var]):
            return None
        while var in origin:
            eqn = origin[var]
            carriers = [x for x in eqn.invars if not isinstance(x, Literal) and self._carries(eqn, x, env, var)]
            if not carriers:
                operands = values(eqn.invars, env)
                deeper = None
                if eqn.primitive.name in (*CALLS, "checkpoint", "remat2"):
                    deeper = self._trace_back(*body_of(eqn), operands, list(eqn.outvars).index(var))
                # The outer equation has the right line: JAX traces its own functions once, at their first call.
                return (eqn, *deeper[1:]) if deeper else (eqn, eqn, operands)
            var = carriers[0]
        return None

    def _carries(self, eqn: Eqn, x: Var, env: dict[Var, Value], out: Var) -> bool:
        """Whether the operand `x` of an equation contains a NaN that reaches its output."""
        if not self.bad(env[x]):
            return False
        if eqn.primitive.name != "select_n" or isinstance(eqn.invars[0], Literal):
            return True
        # A NaN in a branch that was not selected has no effect.
        taken = [jnp.full(jnp.shape(env[out]), x is y) for y in eqn.invars[1:]]
        return self.bad(jnp.where(jax.lax.select_n(env[eqn.invars[0]], *taken), env[x], 0))


@promoting
def _sum(pushes: PyTree) -> jax.Array:
    return sum((jnp.real(x).sum() for x in jax.tree.leaves(pushes) if is_float(x)), jnp.zeros(()))


def _row(row: int, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[row], tree)


def _transpose_at_vertex(
    F: VertexFunction, graphs: Graphs, row: int, args: tuple[PyTree, ...], cts: PyTree
) -> tuple[PyTree, ...]:
    """The transpose of F at a vertex: (arguments, cotangents) -> cotangents of the arguments."""
    vjp = jax.vjp(functools.partial(at_vertex, F, graphs, row), *args)[1]
    return jax.tree.map(_without_float0, vjp(jax.tree.map(lambda ct: ct if is_float(ct) else zero_cotangent(ct), cts)))


def _without_float0(ct: Value) -> Value:
    # Functions do not accept arguments of dtype float0, the dtype of the cotangents of integers.
    return jnp.zeros(ct.shape, bool) if ct.dtype == jax.dtypes.float0 else ct


def _range(value: Value) -> str:
    x = np.asarray(value)
    name = f"{x.dtype}{list(x.shape)}"
    return f"{name} {x.min():.3g} to {x.max():.3g}" if x.size and x.dtype != bool else name
