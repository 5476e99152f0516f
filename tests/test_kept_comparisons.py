"""Comparisons, booleans and integers that the backward keeps, per vertex and per edge, on all engines that run on a CPU."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import cavs
from cavs._engines.persistent.lower import recurrence_of
from cavs._function.keep_options import KeepOptions, MemoryOptions
from cavs._run.run import run_with_options
from cavs.kernels import Equation, LevelProgram, is_var, native_unavailable
from tests.odd_graphs import children_of
from tests.per_vertex import PerVertex, Steps
from tests.persistent_programs import DAG, INTERPRETED, H, assert_near, plan_of, values
from tests.slow import few

KEEP = (("kept", "keep"),)
KEEPING = functools.partial(run_with_options, options=MemoryOptions(names=KEEP))


def curved(x: Any, c: Any) -> Any:
    """Products and sums that XLA turns into one instruction or into two, depending on what surrounds them."""
    return jax.nn.sigmoid(2 * c + x) * c + x * c


def kept(x: Any) -> Any:
    return checkpoint_name(x, "kept")


def maximum(x: Any, v: cavs.Vertex) -> Any:
    return v.gather_all(lambda c: curved(x, c), reduce="max")


def maximum_kept(x: Any, v: cavs.Vertex) -> Any:
    return kept(v.gather_all(lambda c: jnp.tanh(3 * c), reduce="max"))


def operand_kept(x: Any, v: cavs.Vertex) -> Any:
    return v.gather_all(lambda c: kept(curved(x, c)), reduce="max")


def two_maxima(x: Any, v: cavs.Vertex) -> Any:
    m = v.gather_all(lambda c: kept(curved(x, c)), reduce="max")
    return m - v.gather_all(lambda c: curved(m, c), reduce="max")


def elementwise_maximum(x: Any, v: cavs.Vertex) -> Any:
    return v.gather_all(lambda c: kept(jnp.maximum(curved(x, c), c * x - c)))


def maximum_of_a_vector(x: Any, v: cavs.Vertex) -> Any:
    return v.gather_all(lambda c: curved(x, c) - kept(curved(x, c).max()))


def bool_per_edge(x: Any, v: cavs.Vertex) -> Any:
    m = v.gather_all(lambda c: curved(x, c), reduce="max")
    return v.gather_all(lambda c: jnp.where(kept(curved(x, c) > 0.3 * m), c * c, x * c))


def scalar_bool_per_edge(x: Any, v: cavs.Vertex) -> Any:
    return v.gather_all(lambda c: jnp.where(kept(curved(x, c).sum() > 0.1), c * c, x * c))


def bool_per_row(x: Any, v: cavs.Vertex) -> Any:
    s = v.gather_all(lambda c: curved(x, c))
    return jnp.where(kept(s > 0.5 * x), jnp.sin(s), s * x)


def largest_of_a_row(x: Any, v: cavs.Vertex) -> Any:
    s = v.gather_all(lambda c: curved(x, c))
    return jnp.where(kept(s >= s.max()), jnp.sin(s), s * x)


def integer_per_edge(x: Any, v: cavs.Vertex) -> Any:
    # Not so large that `tanh` is flat: gradients in float32 would be off by 1e-5 on some processors, also those of a loop.
    return v.gather_all(lambda c: kept((3 * curved(x, c)).astype(jnp.int32)).astype(c.dtype) * c / 4)


def integer_per_row(x: Any, v: cavs.Vertex) -> Any:
    s = v.gather_all(lambda c: curved(x, c))
    return kept((3 * s).astype(jnp.int32)).astype(s.dtype) * s / 8  # not so large that `tanh` is flat


def stopped(x: Any, v: cavs.Vertex) -> Any:
    return v.gather_all(lambda c: jnp.sin(c) * kept(jax.lax.stop_gradient(curved(x, c))))


def largest_child(x: Any, v: cavs.Vertex) -> Any:
    """The user writes the operand of the maximum again."""
    m = v.gather_all(lambda c: curved(x, c), reduce="max")
    return v.gather_all(lambda c: jnp.where(curved(x, c) == m, c * c, 0.0))


def largest_of_a_row_written_again(x: Any, v: cavs.Vertex) -> Any:
    s = v.gather_all(lambda c: jnp.sin(c))
    return jnp.where(curved(x, s) == curved(x, s).max(), jnp.sin(s), s * x)


BODIES = [
    largest_child,
    largest_of_a_row_written_again,
    maximum,
    maximum_kept,
    operand_kept,
    two_maxima,
    elementwise_maximum,
    maximum_of_a_vector,
    bool_per_edge,
    scalar_bool_per_edge,
    bool_per_row,
    largest_of_a_row,
    integer_per_edge,
    integer_per_row,
    stopped,
]
ENGINES = [
    "scan",
    pytest.param("native", marks=pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))),
    pytest.param(
        INTERPRETED, marks=pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Pallas' interpreter"), id="persistent"
    ),
]


def function(body: Callable[..., Any]) -> Callable[..., None]:
    def fn(p: Any, v: Any) -> None:
        x = v.pull()
        h = jnp.tanh(body(x, v) @ p["w"] + x)
        v.scatter(h)
        v.push(h)

    return fn


def arguments() -> tuple[Any, np.ndarray]:
    rng = np.random.default_rng(0)
    params = {"w": (rng.standard_normal((H, H)) / 4).astype(np.float32)}
    return params, rng.standard_normal((DAG.num_vertices, H)).astype(np.float32)


@functools.cache
def truth(body: Callable[..., Any]) -> tuple[Any, Any]:
    """As `values`, by the loop over vertices in float64."""
    graphs = [children_of(DAG, i) for i in range(len(DAG))]
    params, x = jax.tree.map(lambda a: a.astype(np.float64), arguments())
    net = PerVertex(Steps({None: function(body)}, jnp.zeros(H, jnp.float64)), graphs, [None] * DAG.num_vertices)

    def loss(params: Any, x: Any) -> Any:
        pushes = net(params, x)
        return (pushes * np.random.default_rng(1).standard_normal(pushes.shape).astype(np.float32)).sum(), pushes

    grads, pushes = jax.grad(loss, (0, 1), has_aux=True)(params, x)
    return pushes, grads


# Engine scan runs all; the others one of each kind, and all on the card.
RUN = [(body, engine) for engine in ENGINES for body in (BODIES if engine == "scan" else BODIES[::3])]


@pytest.mark.parametrize(
    ("body", "engine"),
    few([pytest.param(b, *getattr(e, "values", [e]), marks=getattr(e, "marks", ())) for b, e in RUN], 8),
)
def test_gradients_with_kept_comparisons(body: Callable[..., Any], engine: Any) -> None:
    with jax.enable_x64(True):
        want = truth(body)
    F = cavs.VertexFunction(function(body), state=(H,))
    with jax.enable_x64(False):
        params, x = arguments()
        assert_near(values(F, params, DAG, x, engine, KEEPING), want, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["scan", "persistent"])
@pytest.mark.parametrize("body", BODIES)
def test_gradients_with_kept_comparisons_on_the_card(body: Callable[..., Any], engine: str) -> None:
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(True):
        want = truth(body)
    F = cavs.VertexFunction(function(body), state=(H,))
    with jax.enable_x64(False), jax.default_matmul_precision("highest"):
        params, x = arguments()
        assert_near(values(F, params, DAG, x, engine, KEEPING), want, 1e-4)


@pytest.mark.parametrize("body", BODIES)
def test_one_phase_computes_what_is_compared(body: Callable[..., Any]) -> None:
    """Another phase, which a compiler may round differently, reads it: the maximum equals one of the values to the last bit."""
    with jax.enable_x64(False):
        F = cavs.VertexFunction(function(body), state=(H,))
        plan = plan_of(F, *arguments()).keeping(KeepOptions(names=KEEP, masks=True))
        for forward in (True, False):
            assert not computed_again(recurrence_of(plan, None, forward, forest=False).program)


def computed_again(program: LevelProgram) -> set[Any]:
    """The floats whose equality equations test, and that more than one phase computes."""
    phases = [[op.eqn for op in phase.operations if isinstance(op, Equation)] for phase in program.phases]
    made = [{v for eqn in eqns for v in eqn.outvars} for eqns in phases]
    compared = {x for eqns in phases for eqn in eqns if eqn.primitive.name == "eq" for x in eqn.invars if is_var(x)}
    return {x for x in compared if sum(x in found for found in made) > 1}
