"""Arrays of size 0: a launch of engine persistent is compiled in a program that has none (`cavs._jaxpr.empty`)."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import cavs
from cavs._jaxpr.empty import without_empty
from cavs._jaxpr.jaxprs import CALLS, ClosedJaxpr, Eqn, bodies_in, opened
from cavs._schedule.schedule import ExportedSchedule
from cavs.kernels import H200, Target
from tests.lower_for_hopper import DEVICE

NEW_JAX = jax.__version_info__ >= (0, 11)


HARMLESS = {"broadcast_in_dim", "random_wrap", "stop_gradient", *CALLS}  # they create such arrays, or pass them on


def work_on_empty(eqns: list[Eqn]) -> set[str]:
    """Returns the names of equations that compute something with arrays of size 0."""
    found: set[str] = set()
    for eqn in eqns:
        if any(getattr(x.aval, "size", 1) == 0 for x in (*eqn.invars, *eqn.outvars)):
            found.add(eqn.primitive.name)
        for body in bodies_in(eqn):
            found |= work_on_empty(body.eqns)
    return found - HARMLESS


def computed(x: Any, n: int) -> Any:
    """Reads `n` rows of `x`: selections, calls, concatenations, paddings, updates and products."""
    part = x[:n]
    y = jnp.where(part > 0, part, jnp.sin(part)) + jax.nn.relu(part)
    z = jnp.concatenate([jnp.cos(x), y])
    w = jnp.pad(y, ((2, 1), (0, 0)), constant_values=0.5)
    z = lax.dynamic_update_slice(z, y, (1, 0))
    z = z.at[jnp.arange(n)].add(y).at[jnp.arange(n)].set(y * 2)
    keys = jax.random.split(jax.random.key(0), 3)[:n]
    return y, z, w, jnp.sum(z), x.T[:, :n] @ y, jnp.sum(y), jax.random.key_data(keys)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_function_without_empty_arrays_gives_the_same_results(n: int) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 4)))
    want, got = (jax.jit(f, static_argnums=1)(x, n) for f in (computed, without_empty(computed)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    closed = jax.make_jaxpr(jax.jit(without_empty(computed), static_argnums=1), static_argnums=1)(x, n)
    assert not work_on_empty(opened(cast(ClosedJaxpr, closed))[0].eqns)


@pytest.mark.skipif(not NEW_JAX, reason="engine persistent needs jax 0.11")
@pytest.mark.parametrize("kind", ["inner", "leaves"])
def test_kinds_without_vertices_leave_no_empty_arrays_in_a_program_with_launches(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA would drop the configuration of the launch (seen on an H100 with jax 0.11.2)."""
    monkeypatch.setattr(Target, "here", lambda: H200)

    def inner(p: Any, v: Any) -> None:
        h = jnp.tanh(v.pull() @ p["w"] + v.gather(0) @ p["u"])
        v.scatter(h), v.push(jnp.where(h > 0, h, 0.5 * h))

    def leaf(p: Any, v: Any) -> None:
        h = jnp.tanh(v.pull() @ p["w"])
        v.scatter(h), v.push(h)

    vertex_kinds = {"inner": [1, 0, 0], "leaves": [0, 1, 1]}[kind]
    graphs = cavs.from_edges([3] * 4, [[(1, 0), (2, 1)]] * 4, kind=np.array(vertex_kinds * 4), kind_names=("a", "b", "c"))
    F = cavs.VertexFunction({"a": inner, "b": leaf, "c": inner}, state=(64,), arity=1)
    sched = cavs.schedule(graphs, scripts=True)
    params = {"w": jnp.ones((4, 64), jnp.float32), "u": jnp.ones((64, 64), jnp.float32)}
    x = jnp.ones((sched.shape.vertices, 4), jnp.float32)

    def loss(params: Any, data: Any, x: Any) -> Any:
        return cavs.run(F, params, ExportedSchedule(data, sched.shape), x, engine="persistent").sum()

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(**DEVICE))):
        closed = jax.make_jaxpr(jax.grad(loss))(params, jnp.asarray(sched.data), x)
    eqns = opened(cast(ClosedJaxpr, closed))[0].eqns
    assert "cavs_backward" in str(closed) and not work_on_empty(eqns)
