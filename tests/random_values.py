"""Parameters, inputs and graphs of a random case, and its net by `cavs` and by the loop over vertices."""

import types
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs._engines.choose import choose_engine
from cavs._engines.engine import Job
from cavs._run.plans import plans_of
from cavs._run.run import kind_names
from cavs.kernels import Target
from tests.per_vertex import Graph, PerVertex, Steps
from tests.random_cases import Case
from tests.random_programs import Program, cast_from

TOP = (4, 3)  # widths of the second net: what it pulls is mixed to 4, its state has 3


def parameters(case: Case) -> dict[str, Any]:
    """{"f": F's parameters, "top": those of the second net}, in float64."""

    def draw(name: str, shape: Any, lo: float, hi: float) -> np.ndarray:
        return np.random.default_rng([case.seed, zlib.crc32(name.encode())]).uniform(lo, hi, shape)

    top = {"w": draw("w", TOP, -0.5, 0.5), "u": draw("u", (TOP[1], TOP[1]), -0.5, 0.5)}
    return {"f": {name: draw(name, *spec) for name, spec in case.program.params.items()}, "top": top}


def rounded(case: Case, values: Any) -> Any:
    """Returns values that float32 can represent, if the case is in float32."""
    if not case.options.float32:
        return values
    return jax.tree.map(lambda y: y.astype(np.float32).astype(np.float64) if wide(y) else y, values)


def moved_by(by: float, values: Any) -> Any:
    """Returns values with a relative perturbation."""
    move = np.random.default_rng(5)
    return jax.tree.map(lambda y: y * (1 + by * move.uniform(-1, 1, y.shape)) if by and wide(y) else y, values)


def wide(y: Any) -> bool:
    """Whether an array is float64, which the case may compute with in another dtype."""
    return isinstance(y, np.ndarray) and y.dtype == np.float64


def inputs(case: Case) -> dict[str, Any]:
    """One row per vertex, floats in float64; and the edges, one row per edge."""
    out = {}
    for name, (shape, kind, lo, hi) in (case.program.inputs | case.program.edges).items():
        count = count_of(case, name)
        rng = np.random.default_rng([case.seed, zlib.crc32(name.encode()), 1])
        if kind == "k":
            out[name] = jax.random.split(jax.random.key(case.seed % 1000), count)
        elif kind == "b":
            out[name] = rng.random((count, *shape)) < 0.5
        elif cast_from(kind)[1] == "i":
            out[name] = rng.integers(int(lo), int(hi) + 1, (count, *shape)).astype("int32" if kind == "i" else kind)
        else:
            out[name] = rng.uniform(lo, hi, (count, *shape)).astype(jnp.dtype("float64" if kind == "f" else kind))
    return out


def count_of(case: Case, name: str) -> int:
    """The number of rows of an input, or of edges."""
    rows = [row for graph in case.graphs for row in graph]
    return sum(map(len, rows)) if name in case.program.edges else len(rows)


def given(spec: Program, x: dict[str, Any]) -> tuple[Any, Any]:
    """(inputs, edges) as `run` takes them, of what `inputs` returns."""
    rows = {name: y for name, y in x.items() if name not in spec.edges}
    return rows["x"] if spec.bare_input else (rows or None), {name: x[name] for name in spec.edges} or None


def rows_wanted(case: Case) -> np.ndarray | None:
    """`at`: some vertices, one of them perhaps twice."""
    count = sum(map(len, case.graphs))
    rng = np.random.default_rng([case.seed, 3])
    return rng.integers(0, max(count, 1), (count + 1) // 2).astype(np.int32) if case.options.at else None


def dtype_of(name: str, plain: Any) -> Any:
    """The dtype of a state that is given as "f", "i", "b" or by its name."""
    return {"f": plain, "i": jnp.int32, "b": jnp.bool_}.get(name) or jnp.dtype(name)


def cast(tree: Any, dtype: Any) -> Any:
    """Casts the floats of a tree to another dtype."""
    return jax.tree.map(
        lambda x: jnp.asarray(x, dtype) if isinstance(x, np.ndarray) and x.dtype == np.float64 else jnp.asarray(x), tree
    )


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def regloballed(fns: dict[Any, Any], dtype: Any) -> dict[Any, Any]:
    """The functions with another dtype `D`."""
    return {k: types.FunctionType(f.__code__, f.__globals__ | {"D": dtype}, f.__name__) for k, f in fns.items()}


def per_vertex(case: Case, fns: dict[Any, Any], dtype: Any) -> PerVertex:
    """Returns the net of a case as a loop over vertices."""
    spec = case.program
    leaves = {name: jnp.zeros(shape, dtype_of(kind, dtype)) for name, (shape, kind) in spec.states.items()}
    zero = next(iter(leaves.values())) if spec.bare_state else leaves
    return PerVertex(Steps(regloballed(fns, dtype), zero), case.graphs, case.kinds)


def vertex_function(case: Case, fns: dict[Any, Any]) -> cavs.VertexFunction:
    """Returns the vertex function of a case."""
    spec, how = case.program, case.options
    dtype = jnp.float32 if how.float32 else jnp.float64
    bare = bool(spec.params) and not how.float32  # a bare shape takes the dtype of the parameters
    leaves: Any = {
        name: shape if kind == "f" and bare else jax.ShapeDtypeStruct(shape, dtype_of(kind, dtype))
        for name, (shape, kind) in spec.states.items()
    }
    state = next(iter(leaves.values())) if spec.bare_state else leaves
    fn = fns[None] if None in fns else fns
    return cavs.VertexFunction(fn, state=state, arity=spec.arity, optimizations=cavs.Optimizations(**how.optimizations))


def precision_of(case: Case) -> str | None:
    """Returns the precision of products as JAX names it; None for TF32, its default on a GPU."""
    return None if case.options.precision == "tf32" else case.options.precision


def engines_of(F: cavs.VertexFunction, engine: Any, sched: cavs.Schedule) -> list[str]:
    """Returns the name of the engine that has run F on a schedule, once for each plan of F."""
    return [choose_engine(engine, Job(plan, sched.shape, kind_names(F, sched), Target.here())).name for plan in plans_of(F)]


def build(case: Case) -> cavs.Graphs:
    """Returns the graphs of a case."""
    rows: list[Graph] = [row for graph in case.graphs for row in graph]  # type: ignore[misc]
    flat = [child for row in rows for child in row]
    fields: dict[str, Any] = {}
    names = list(case.program.bodies)
    if None not in names:
        fields = {"kind": [names.index(k) for k in case.kinds], "kind_names": [str(k) for k in names]}
    return cavs.Graphs.build([len(graph) for graph in case.graphs], [len(row) for row in rows], flat, **fields)
