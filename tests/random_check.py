"""Runs a random case with `cavs` and with the per-vertex reference, and compares values and gradients."""

import contextlib
import types
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs._engines.choose import choose_engine, name_of
from cavs._engines.persistent import Persistent
from cavs._function.asked import keep
from cavs._function.plan import FunctionPlan
from cavs._run.run import kind_names
from tests.per_vertex import Graph, PerVertex, with_edges
from tests.random_cases import Case, Options, functions
from tests.random_compare import Outcome, differences, judged, named, tolerance, unsteady
from tests.random_programs import Program, cast_from

INTERPRET = "persistent-interpret"
TOP = (4, 3)  # widths of the second net: what it pulls is mixed to 4, its state has 3


def check(case: Case, fns: dict[Any, Any] | None = None, setting: Any = contextlib.nullcontext) -> Outcome:
    """Runs a case with both. `fns`: its functions, if they are given; `setting`: a context in which `cavs` runs."""
    before = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_filtering", "off")
    try:
        return _check(case, fns or functions(case.program, "float32" if case.options.float32 else "float64"), setting)
    finally:
        jax.config.update("jax_traceback_filtering", before)


def _check(case: Case, fns: dict[Any, Any], setting: Any) -> Outcome:
    try:
        want = reference(case, fns)
    except Exception as error:  # JAX itself refuses the program
        return Outcome("ill", f"the reference fails: {type(error).__name__}", str(error)[:500])
    used: list[str] = []
    try:
        with setting():
            got = batched(case, fns, used)
    except Exception as error:
        return judged(error, case.options.engine)
    found = differences(case, got, want)
    if found:
        by, most = 1e-9, 1e2 * tolerance(case) if case.program.coarse else 1e-5
        if case.options.float32:
            # To round arguments to TF32 can itself change a gradient by more than the tolerance.
            by, most = (1e-5, 1e2 * tolerance(case)) if case.options.precision == "highest" else (2**-11, tolerance(case))
        if unsteady(want, reference(case, fns, moved=by), most):
            return Outcome("ill", "the reference itself is ill-conditioned")
        return Outcome("wrong", found[0].split(":")[0], "\n".join(found[:6]), *used[:1])
    return Outcome("ok", "", "", *used[:1])


def rerun(fns: dict[Any, Any], spec: dict[str, Any], graphs: Any, kinds: Any, options: dict[str, Any], seed: int) -> Outcome:
    """Repeats the case of a printed script."""
    jax.config.update("jax_enable_x64", True)
    return check(Case(seed, Program({kind: None for kind in fns}, **spec), graphs, kinds, Options(**options)), fns)  # type: ignore[misc]


# --- parameters and inputs
def parameters(case: Case) -> dict[str, Any]:
    """{"f": F's parameters, "top": those of the second net}, in float64."""

    def draw(name: str, shape: Any, lo: float, hi: float) -> np.ndarray:
        return np.random.default_rng([case.seed, zlib.crc32(name.encode())]).uniform(lo, hi, shape)

    top = {"w": draw("w", TOP, -0.5, 0.5), "u": draw("u", (TOP[1], TOP[1]), -0.5, 0.5)}
    return {"f": {name: draw(name, *spec) for name, spec in case.program.params.items()}, "top": top}


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
            out[name] = rng.integers(lo, hi + 1, (count, *shape)).astype("int32" if kind == "i" else kind)
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


# --- the loss of both
def loss_and_pushes(pushes: Any, rows: int) -> tuple[Any, Any]:
    """Sums every float push over its first `rows` rows, with random weights."""
    total: Any = 0.0
    for i, x in enumerate(jax.tree.leaves(pushes)):
        if is_float(x):
            weights = np.random.default_rng(i).standard_normal((rows, *x.shape[1:]))
            weights = np.concatenate([weights, np.zeros((x.shape[0] - rows, *x.shape[1:]))])
            total = total + (x * weights.astype(x.dtype)).sum()
    return total, pushes


def top_net(p: Any, v: Any) -> None:
    """The second of two nets: pulls what the first pushes."""
    h = jnp.tanh(v.gather_all(lambda s: s @ p["u"]) + v.pull() @ p["w"])
    v.scatter(h)
    v.push(h)


def two_nets(layer: Any, case: Case, params: Any, x: Any, at: Any) -> Any:
    """The pushes of F, and with `nets` of a second net that reads them. `layer(number of the net, params, inputs, at)`."""
    if not case.options.nets:
        return layer(0, params["f"], x, at)
    pushes = layer(0, params["f"], x, None)
    floats = [y.reshape(y.shape[0], -1) for y in jax.tree.leaves(pushes) if is_float(y) and y.size]
    dtype = jax.tree.leaves(params)[0].dtype
    rows = jax.tree.leaves(pushes)[0].shape[0]
    joined = jnp.concatenate([*floats, jnp.zeros((rows, TOP[0]))], 1).astype(dtype)
    pulled = jnp.stack([joined[:, i :: TOP[0]].sum(1) for i in range(TOP[0])], 1)
    upper = layer(1, params["top"], jnp.sin(pulled), at)
    return {"f": pushes if at is None else jax.tree.map(lambda y: y[at], pushes), "top": upper}


WAYS: dict[str, Any] = {"eager": lambda fn: fn, "jit": jax.jit, "concurrent_jit": cavs.concurrent_jit}


def gradient(net: Any, case: Case, params: Any, x: dict[str, Any], rows: int, vmap: bool, way: str, *data: Any) -> Any:
    """(gradients of parameters, of float inputs), pushes. `net(params, inputs, *data)`; `data` is not closed over."""
    fixed = case.options.fixed
    floats = {name: y for name, y in x.items() if is_float(y) and name not in fixed}
    rest = {name: y for name, y in x.items() if name not in floats}

    def one(params: Any, floats: Any, rest: Any, *data: Any) -> Any:
        varied = params | {"f": {name: y for name, y in params["f"].items() if name not in fixed}}

        def loss(varied: Any, floats: Any) -> Any:
            return loss_and_pushes(net(varied | {"f": params["f"] | varied["f"]}, floats | rest, *data), rows)

        return jax.grad(loss, (0, 1), has_aux=True)(varied, floats)

    if vmap:
        plain = one

        def one(params: Any, floats: Any, rest: Any, *data: Any) -> Any:
            both = jax.tree.map(lambda y: jnp.stack([y, 0.9 * y]), params)
            return jax.vmap(lambda p: plain(p, floats, rest, *data))(both)

    return WAYS[way](one)(params, floats, rest, *data)


# --- the reference and cavs
def regloballed(fns: dict[Any, Any], dtype: Any) -> dict[Any, Any]:
    """The functions with another dtype `D`."""
    return {k: types.FunctionType(f.__code__, f.__globals__ | {"D": dtype}, f.__name__) for k, f in fns.items()}


def reference(case: Case, fns: dict[Any, Any], moved: float = 0.0) -> Any:
    """The result of the loop over vertices in float64; `moved` is a relative perturbation of parameters and inputs."""
    # On the CPU, because XLA's GPU compiler is under test, too. Its float64 gradients were once wrong.
    with jax.default_device(jax.devices("cpu")[0]):
        return _reference(case, regloballed(fns, jnp.float64), moved)


def _reference(case: Case, fns: dict[Any, Any], moved: float) -> Any:
    dtype = jnp.float64
    params, x = parameters(case), inputs(case)
    if case.options.float32:  # values that float32 can represent
        params, x = (jax.tree.map(lambda y: y.astype(np.float32).astype(np.float64) if _wide(y) else y, t) for t in (params, x))
    if moved:
        move = np.random.default_rng(5)
        params, x = (
            jax.tree.map(lambda y: y * (1 + moved * move.uniform(-1, 1, y.shape)) if _wide(y) else y, t) for t in (params, x)
        )
    at, count = rows_wanted(case), sum(map(len, case.graphs))
    spec = case.program
    leaves = {name: jnp.zeros(shape, dtype_of(kind, dtype)) for name, (shape, kind) in spec.states.items()}
    zero = next(iter(leaves.values())) if spec.bare_state else leaves

    nets = [
        PerVertex(fns, case.graphs, case.kinds, zero),
        PerVertex({None: top_net}, case.graphs, [None] * count, jnp.zeros(TOP[1], dtype)),
    ]

    def layer(number: int, params: Any, x: Any, at: Any) -> Any:
        if number == 0:
            x, edges = given(spec, x)
            x = x if edges is None else with_edges(x, edges, case.graphs)
        out = nets[number](params, x)
        return out if at is None else jax.tree.map(lambda y: y[at], out)

    rows = count if at is None else len(at)
    params, x = cast(params, dtype), cast(x, dtype)

    def net(p: Any, y: Any) -> Any:
        return two_nets(layer, case, p, y, at)

    if not case.options.vmap:
        return gradient(net, case, params, x, rows, False, "eager")
    both = [gradient(net, case, jax.tree.map(lambda y, s=s: y * s, params), x, rows, False, "eager") for s in (1.0, 0.9)]
    return jax.tree.map(lambda *ys: jnp.stack(ys), *both)


def _wide(y: Any) -> bool:
    return isinstance(y, np.ndarray) and y.dtype == np.float64


def build(case: Case) -> cavs.Graphs:
    """Returns the graphs of a case."""
    rows: list[Graph] = [row for graph in case.graphs for row in graph]  # type: ignore[misc]
    flat = [child for row in rows for child in row]
    fields: dict[str, Any] = {}
    names = list(case.program.bodies)
    if None not in names:
        fields = {"kind": [names.index(k) for k in case.kinds], "kind_names": [str(k) for k in names]}
    return cavs.Graphs.build([len(graph) for graph in case.graphs], [len(row) for row in rows], flat, **fields)


def batched(case: Case, fns: dict[Any, Any], used: list[str] | None = None) -> Any:
    """The gradients and pushes of real vertices by `cavs.run`, with the options of the case. Appends the engine to `used`."""
    spec, how = case.program, case.options
    dtype = jnp.float32 if how.float32 else jnp.float64
    leaves: Any = {
        name: shape if kind == "f" and not how.float32 else jax.ShapeDtypeStruct(shape, dtype_of(kind, dtype))
        for name, (shape, kind) in spec.states.items()
    }
    state = next(iter(leaves.values())) if spec.bare_state else leaves
    optimizations = cavs.Optimizations(**how.optimizations)
    fn = fns[None] if None in fns else fns
    F = cavs.VertexFunction(fn, state=state, arity=spec.arity, optimizations=optimizations)
    top = cavs.VertexFunction(top_net if None in fns else {k: top_net for k in fns}, state=(TOP[1],))
    engine = Persistent(interpret=True) if how.engine == INTERPRET else how.engine
    sched = cavs.schedule(build(case), **({"scripts": True} if how.engine == INTERPRET else {}), **how.schedule)
    if how.engine == INTERPRET and not sched.shape.levels:
        raise NotForThisEngine("the batch has no scripts: no vertex with children, or several kinds of them")
    at, count = rows_wanted(case), sum(map(len, case.graphs))
    rows = count if at is None else len(at)
    params, x = cast(parameters(case), dtype), cast(inputs(case), dtype)
    if how.traced:
        x = {name: _padded(y, sched.shape.all_edges if name in spec.edges else sched.shape.vertices) for name, y in x.items()}

    def net(p: Any, y: Any, sched: Any) -> Any:
        def layer(number: int, p: Any, y: Any, at: Any) -> Any:
            if number:
                return cavs.run(top, p, sched, y, select=at, engine="scan" if how.engine == INTERPRET else engine)
            x, edges = given(spec, y)
            return cavs.run(F, p, sched, x, edges=edges, select=at, engine=engine)

        def whole(p: Any, y: Any) -> Any:
            return two_nets(layer, case, p, y, at)

        return (jax.checkpoint(whole) if how.checkpoint else whole)(p, y)

    if not how.traced:

        def closed(p: Any, y: Any) -> Any:
            return net(p, y, sched)

        data: tuple[Any, ...] = ()
    else:
        closed, data = net, (sched,)
    names = tuple(sorted(how.names.items()))
    with jax.default_matmul_precision(None if how.precision == "tf32" else how.precision), keep(least=False, names=names):
        (gp, gx), pushes = gradient(closed, case, params, x, rows, how.vmap, how.way, *data)
    for plan in (x for x in F.cache.values() if isinstance(x, FunctionPlan)) if used is not None else ():
        used.append("scan" if how.vmap else name_of(choose_engine(engine, plan, sched.shape, kind_names(F, sched))))
    axis = int(how.vmap)
    beyond = [y[(slice(None),) * axis + (slice(rows, None),)] for y in jax.tree.leaves(pushes)] if how.traced or at is None else []
    beyond += [y[(slice(None),) * axis + (slice(count_of(case, name), None),)] for name, y in gx.items()]
    if any((np.asarray(y) != 0).any() for y in beyond if not jax.dtypes.issubdtype(y.dtype, jax.dtypes.extended)):
        raise PaddingError("padding rows are not zeros")
    cut = jax.tree.map(lambda y: y[(slice(None),) * axis + (slice(0, rows),)], pushes)
    real = {name: y[(slice(None),) * axis + (slice(0, count_of(case, name)),)] for name, y in gx.items()}
    return (gp, real), cut


class NotForThisEngine(Exception):
    """The interpreted engine cannot run the schedule. `cavs.run` does not check this for it."""


class PaddingError(Exception):
    """Padding rows, or their gradients, are not zero."""


def _padded(x: Any, rows: int) -> Any:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x.at[jnp.arange(rows)].get(mode="clip") if len(x) else jax.random.split(jax.random.key(0), rows)
    return jnp.pad(x, ((0, rows - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
