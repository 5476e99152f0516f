"""Runs a random case with `cavs` and with the per-vertex reference, and compares values and gradients."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs._engines.persistent.chip import MEASURED, Layouts
from cavs._engines.persistent.engine import Persistent
from cavs._function.keep_options import MemoryOptions
from cavs._run.run import run_with_options
from tests import pallas_device
from tests.per_vertex import PerVertex, Steps, with_edges
from tests.random_cases import WAYS, Case, Options, functions
from tests.random_compare import Outcome, differences, judged, tolerance, unsteady
from tests.random_plans import in_parts, whole_batch
from tests.random_programs import Program
from tests.random_values import (
    TOP,
    build,
    cast,
    count_of,
    engines_of,
    given,
    inputs,
    is_float,
    moved_by,
    parameters,
    per_vertex,
    precision_of,
    rounded,
    rows_wanted,
    vertex_function,
)

INTERPRET = "persistent-interpret"


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
            got = in_parts(case, fns, used) if case.options.parts else batched(case, fns, used)
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
        if case.options.float32 and unsteady(want, reference(case, fns, dtype=jnp.float32), tolerance(case) / 3):
            return Outcome("ill", "the reference itself needs more than float32")
        return Outcome("wrong", found[0].split(":")[0], "\n".join(found[:6]), *used[:1])
    return Outcome("ok", "", "", *used[:1])


def rerun(fns: dict[Any, Any], spec: dict[str, Any], graphs: Any, kinds: Any, options: dict[str, Any], seed: int) -> Outcome:
    """Repeats the case of a printed script."""
    jax.config.update("jax_enable_x64", True)
    return check(Case(seed, Program({kind: None for kind in fns}, **spec), graphs, kinds, Options(**options)), fns)  # type: ignore[misc]


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
    joined = jnp.where(jnp.isfinite(joined), joined, 0)  # sin(inf) is NaN, and a NaN's cotangents say nothing
    pulled = jnp.stack([joined[:, i :: TOP[0]].sum(1) for i in range(TOP[0])], 1)
    upper = layer(1, params["top"], jnp.sin(pulled), at)
    return {"f": pushes if at is None else jax.tree.map(lambda y: y[at], pushes), "top": upper}


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
def reference(case: Case, fns: dict[Any, Any], moved: float = 0.0, dtype: Any = jnp.float64) -> Any:
    """The result of the loop over vertices; `moved` is a relative perturbation of parameters and inputs."""
    # On the CPU, because XLA's GPU compiler is under test, too. Its float64 gradients were once wrong.
    with jax.default_device(jax.devices("cpu")[0]):
        return (whole_batch if case.options.parts else _reference)(case, fns, moved, dtype)


def _reference(case: Case, fns: dict[Any, Any], moved: float, dtype: Any) -> Any:
    params, x = (moved_by(moved, rounded(case, values)) for values in (parameters(case), inputs(case)))
    at, count = rows_wanted(case), sum(map(len, case.graphs))
    spec = case.program
    top = Steps({None: top_net}, jnp.zeros(TOP[1], dtype))
    nets = [per_vertex(case, fns, dtype), PerVertex(top, case.graphs, [None] * count)]

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


def batched(case: Case, fns: dict[Any, Any], used: list[str] | None = None) -> Any:
    """The gradients and pushes of real vertices by `cavs.run`, with the options of the case. Appends the engine to `used`."""
    spec, how = case.program, case.options
    dtype = jnp.float32 if how.float32 else jnp.float64
    F = vertex_function(case, fns)
    top = cavs.VertexFunction(top_net if None in fns else {k: top_net for k in fns}, state=(TOP[1],))
    layouts = Layouts(_spread) if how.spread else MEASURED
    interpret = pallas_device.__name__ if how.engine == INTERPRET else None
    engine = Persistent(interpret, layouts) if interpret or how.spread else how.engine
    sched = cavs.schedule(build(case), **({"scripts": True} if how.engine == INTERPRET else {}), **how.schedule)
    if how.engine == INTERPRET and not sched.shape.levels:
        raise NotForThisEngine("the batch has no scripts: no vertex with children, or several kinds of them")
    at, count = rows_wanted(case), sum(map(len, case.graphs))
    rows = count if at is None else len(at)
    params, x = cast(parameters(case), dtype), cast(inputs(case), dtype)
    if how.traced:
        x = {name: _padded(y, sched.shape.all_edges if name in spec.edges else sched.shape.vertices) for name, y in x.items()}

    run = functools.partial(run_with_options, options=MemoryOptions(names=tuple(sorted(how.names.items()))))

    def net(p: Any, y: Any, sched: Any = sched) -> Any:
        def layer(number: int, p: Any, y: Any, at: Any) -> Any:
            if number:
                return run(top, p, sched, y, select=at, engine="scan" if how.engine == INTERPRET else engine)
            x, edges = given(spec, y)
            return run(F, p, sched, x, edges=edges, select=at, engine=engine)

        def whole(p: Any, y: Any) -> Any:
            return two_nets(layer, case, p, y, at)

        return (jax.checkpoint(whole) if how.checkpoint else whole)(p, y)

    data = (sched,) if how.traced else ()
    with jax.default_matmul_precision(precision_of(case)):
        (gp, gx), pushes = gradient(net, case, params, x, rows, how.vmap, how.way, *data)
    if used is not None:
        used += ["scan"] if how.vmap else engines_of(F, engine, sched)
    axis = int(how.vmap)
    whole = jax.tree.leaves(pushes) if how.traced or at is None else []
    beyond = [y[(slice(None),) * axis + (slice(rows, None),)] for y in whole]
    beyond += [y[(slice(None),) * axis + (slice(count_of(case, name), None),)] for name, y in gx.items()]
    if any((np.asarray(y) != 0).any() for y in beyond if not jax.dtypes.issubdtype(y.dtype, jax.dtypes.extended)):
        raise PaddingError("padding rows are not zeros")
    cut = jax.tree.map(lambda y: y[(slice(None),) * axis + (slice(0, rows),)], pushes)
    real = {name: y[(slice(None),) * axis + (slice(0, count_of(case, name)),)] for name, y in gx.items()}
    return (gp, real), cut


def _spread(level: Any, forward: bool, config: Any) -> Any:
    return dataclasses.replace(config, spread=True, dataflow=False)


class NotForThisEngine(Exception):
    """The interpreted engine cannot run the schedule. `cavs.run` does not check this for it."""


class PaddingError(Exception):
    """Padding rows, or their gradients, are not zero."""


def _padded(x: Any, rows: int) -> Any:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x.at[jnp.arange(rows)].get(mode="clip") if len(x) else jax.random.split(jax.random.key(0), rows)
    return jnp.pad(x, ((0, rows - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
