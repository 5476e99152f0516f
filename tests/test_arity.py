"""More children than F gathers are an error, kind by kind, whatever the functions of other kinds do."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from tests.odd_graphs import from_children, joined
from tests.slow import few

H = 3
NAMES = ("first", "all", "none")


def gathers(limit: int) -> dict[str, Any]:
    """Functions of three kinds: of the first `limit` children, of all, and of none."""

    def done(v: cavs.Vertex, h: Any) -> None:
        v.scatter(h)
        v.push(h)

    return {
        "first": lambda p, v: done(v, jnp.tanh(v.pull() + sum(v.gather(k) for k in range(limit)))),
        "all": lambda p, v: done(v, jnp.tanh(v.pull() + v.gather_all(lambda s: s @ p))),
        "none": lambda p, v: done(v, v.pull()),
    }


def of_kinds(most: dict[str, int], seed: int) -> cavs.Graphs:
    """Graphs in random order, in which the vertices of a kind have up to `most` children, and one vertex so many."""
    rng = np.random.default_rng(seed)
    graphs, kinds = [], []
    for _ in range(3):
        children: list[list[int]] = [[] for _ in range(8)]
        kinds += [rng.integers(3) for _ in children]
        for name, limit in sorted(most.items()):
            for count in {*rng.integers(1, limit + 1, 2).tolist(), limit}:
                children.append(rng.integers(len(children), size=count).tolist())
                kinds.append(NAMES.index(name))
        graphs.append(from_children(children))
    return dataclasses.replace(joined(graphs), kind=np.array(kinds, np.int32), kind_names=NAMES)


def test_children_are_named_by_integers_of_numpy_too() -> None:
    def F(p: Any, v: cavs.Vertex) -> None:
        h = v.pull() + sum(jnp.where(v.has_child(k), v.gather(k), 2) for k in np.arange(3))  # type: ignore[arg-type]
        v.scatter(h)
        v.push(h)

    graphs = from_children([[], [0], [1, 0, 1]])
    f = cavs.VertexFunction(F, state=(), arity=np.max([2, 3]))  # type: ignore[arg-type]
    assert cavs.run(f, {}, cavs.schedule(graphs), np.ones(3, np.float32)).tolist() == [7, 12, 32]


@pytest.mark.parametrize("arity", [1, 3, 5])
@pytest.mark.parametrize("seed", few(range(4), 2))
def test_children_are_counted_kind_by_kind(arity: int, seed: int) -> None:
    """With and without `jax.jit`, in turn."""
    rng, jit = np.random.default_rng(seed), (seed + arity // 2) % 2 == 1
    most = {name: int(rng.integers(1, 2 * arity + 1)) for name in NAMES}
    if seed == 0:
        most = {"first": arity, "all": 9, "none": arity}
    graphs = of_kinds(most, seed)
    F = cavs.VertexFunction(gathers(arity), state=jax.ShapeDtypeStruct((H,), float), arity=arity)
    kinds = "mixed" if seed % 2 else True
    sched, x, p = cavs.schedule(graphs, kinds=kinds), rng.standard_normal((graphs.num_vertices, H)), np.eye(H)
    bad = [name for name in NAMES if name != "all" and most[name] > arity]

    def run() -> Any:
        if not jit:
            return cavs.run(F, p, sched, x)
        out = jax.block_until_ready(jax.jit(lambda s, x: cavs.run(F, p, s, x))(sched, sched.pad(x)))
        jax.effects_barrier()
        return out[: graphs.num_vertices]

    if not bad:
        np.testing.assert_allclose(run(), cavs.interpret(F, p, graphs, x), atol=1e-12)
        return
    with pytest.raises(Exception, match=f"got a vertex of kind '{bad[0]}' with {most[bad[0]]} child.*at most {arity}"):
        run()
