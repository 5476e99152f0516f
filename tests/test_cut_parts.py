"""Cut cotangents that consist of the same parts are stored once, over what nothing reads any more."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs._function.cut_parts import stored_cuts
from cavs._function.keep_options import KeepOptions
from cavs._function.keeping import overwritten_rows, reused
from cavs._run.plans import plan_of
from cavs.kernels import native_unavailable
from tests.odd_graphs import children_of, from_children, joined
from tests.per_vertex import PerVertex, Steps
from tests.slow import few
from tests.truth import assert_close

H = 4


def part_of(fn: Any, **how: Any) -> Any:
    plan = plan_of(fn.vertex_function(), jax.eval_shape(fn.init, jax.random.key(0)), jax.ShapeDtypeStruct((H,), jnp.float32))
    return plan.keeping(KeepOptions(overwrite=True, **how)).inner[None].joint


def sizes(values: Any) -> list[int]:
    return [v.aval.size // H for v in values]


def test_a_gru_stores_the_parts_that_its_products_share_once() -> None:
    apart, together = part_of(vp.GRU(H, H)), part_of(vp.GRU(H, H), together=True)
    assert sorted(sizes(apart.reverse.cuts)) == [1, 3, 3]  # of d, h U and x W + b
    assert sizes(stored_cuts(apart).values) == [1, 1, 1, 1]
    cuts = stored_cuts(together)
    assert sizes(cuts.values) == [3, 1]  # one tensor for three gates: a task writes two
    assert [len(place) for place in together.forward.places] == [3, 1]
    assert set(reused(together, cuts.values, cuts.domain)) == set(cuts.values)
    assert sizes(overwritten_rows(together, together.forward.cross).values()) == [3]  # r, z and n are kept where x W + b was


def test_gates_of_a_tree_lstm_are_overwritten_without_preferring_what_is_kept() -> None:
    apart, together = part_of(vp.BinaryTreeLSTM(H, H)), part_of(vp.BinaryTreeLSTM(H, H), together=True)
    for joint, want in ((apart, [1, 1, 1, 1, 1]), (together, [3, 2])):
        cuts = stored_cuts(joint)
        assert sorted(sizes(cuts.values), reverse=True) == want
        assert set(reused(joint, cuts.values, cuts.domain)) == set(cuts.values)


def gates(params: Any, x: jax.Array, h: jax.Array) -> jax.Array:
    """Two products whose cotangents share one of three parts, of which the last is wider."""
    a, b, c = jnp.split(x @ params["w"], [H, 2 * H])
    d, e, f = jnp.split(h @ params["u"] + params["b"], [H, 2 * H])
    return jnp.tanh(a + d) * b * jnp.tanh(e) + jnp.sin(c * f)[:H] + jnp.cos(f)[H:]


def of_vertices(params: Any, v: cavs.Vertex) -> None:
    v.scatter(gates(params, v.pull(), v.gather(0) - v.gather(1)))
    v.push(v.pull()[0] * v.gather(0))


def of_edges(params: Any, v: cavs.Vertex) -> None:
    h = v.gather_all(lambda h: gates(params, v.pull(), h))
    v.scatter(h / (1 + v.num_children()))
    v.push(h)


def matrices(params: Any, v: cavs.Vertex) -> None:
    """The rows of a product of a matrix of two children are parts of its cotangent."""
    a, b = jnp.stack([v.gather(0), v.gather(1)]) @ params["u"][:, :H] + params["b"][:H]
    c, d = jnp.split(v.gather(0) @ params["w"][:, : 2 * H] + jnp.concatenate([a, jnp.sin(b)]), 2)
    h = jnp.tanh(a * c + jnp.cos(b + d)) + v.pull() @ params["u"][:, -H:]
    v.scatter(h)
    v.push(h)


def reshaped(params: Any, v: cavs.Vertex) -> None:
    """Cut cotangents that are one value in several shapes."""
    w, u, b = (params[name][..., :H] for name in "wub")
    two = jnp.tanh((v.gather(0) @ w).reshape(2, -1) + b.reshape(2, -1))
    h = two.reshape(H) + jnp.sin(v.pull() + v.gather(1) @ u)
    v.scatter(h)
    v.push(h)


def reshaped_on_edges(params: Any, v: cavs.Vertex) -> None:
    w, u, b = (params[name][..., :H] for name in "wub")
    top = v.gather_all(lambda h: jnp.minimum((h @ w).reshape(2, -1) + b.reshape(2, -1), 0.3), reduce="max")
    first = jnp.tanh(top[0] @ u[: H // 2, : H // 2])
    h = jax.nn.sigmoid(jnp.concatenate([first, top[1] * first]) + v.gather_all(lambda h: h) + v.pull())
    v.scatter(h)
    v.push(h)


def plain(params: Any, v: cavs.Vertex) -> None:
    """The cut cotangent lies where the cotangent of the state was."""
    h = jnp.tanh(v.pull() @ params["u"][:, :H] + (v.gather(0) + v.gather(1)) @ params["w"][:, :H])
    v.scatter(h)
    v.push(h)


GRAPHS = {
    "trees": cavs.from_parents([[2, 2, 4, 4, -1], [-1], [2, 2, -1], [4, 2, 3, 4, -1], [1, 2, 3, 4, 5, 6, 7, 8, -1], [1, -1]]),
    "dags": joined([from_children([[], [], [0, 1], [0, 1], [2, 3], [4, 0]])] * 3),
}
FUNCTIONS: dict[str, tuple[Callable[..., None], int]] = {
    "vertices": (of_vertices, 2),
    "edges": (of_edges, 0),
    "matrices": (matrices, 2),
    "reshaped": (reshaped, 2),
    "reshaped on edges": (reshaped_on_edges, 0),
    "plain": (plain, 2),
}


# Any two of function, engine and batch meet.
CASES = [(n, ("scan", "native")[(i + j + i // 2) % 2], b) for i, n in enumerate(FUNCTIONS) for j, b in enumerate(GRAPHS)]


@pytest.mark.parametrize(("name", "engine", "batch"), few(CASES, 3))
def test_gradients(name: str, engine: str, batch: str) -> None:
    if engine == "native" and (reason := native_unavailable()):
        pytest.skip(reason)
    dtype, tolerance = (np.float64, 1e-11) if engine == "scan" else (np.float32, 3e-5)
    graphs = GRAPHS[batch]
    fn, arity = FUNCTIONS[name]
    function = cavs.VertexFunction(fn, state=jax.ShapeDtypeStruct((H,), dtype), arity=arity)
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(H, 4 * H)) / 2, "u": rng.normal(size=(H, 4 * H)) / 2, "b": rng.normal(size=4 * H)}
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    x, weights = (jnp.asarray(rng.normal(size=(graphs.num_vertices, H)), dtype) for _ in range(2))
    sched = cavs.schedule(graphs)
    lists = [children_of(graphs, g) for g in range(len(graphs))]
    net = PerVertex(Steps(function.fns, np.zeros(H, dtype)), lists, [None] * graphs.num_vertices)

    def loss(run: Callable[..., Any]) -> Callable[..., jax.Array]:
        return lambda params, x: jnp.sum(run(params, x) * weights)

    got = jax.jit(jax.grad(loss(lambda p, x: cavs.run(function, p, sched, x, engine=engine)), argnums=(0, 1)))(params, x)
    want = jax.grad(loss(net), argnums=(0, 1))(params, x)
    scale = max(1.0, *(float(jnp.abs(a).max()) for a in jax.tree.leaves(want)))
    assert_close(jax.tree.map(lambda a: a / scale, got), jax.tree.map(lambda a: a / scale, want), tolerance)
