"""Programs for the tests of engine `persistent`, their inputs, and the comparison of results."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs._engines.engine import Engine
from cavs._engines.persistent.chip import Layouts
from cavs._engines.persistent.engine import Persistent
from cavs._run import plans
from tests import pallas_device
from tests.odd_graphs import chain, from_children, joined, random_binary_tree, random_dag
from tests.vertex_functions import COPYING, copying

H, E = 16, 3
INTERPRETED = Persistent(pallas_device.__name__)  # the engine's kernels in Pallas' interpreter: slow, on any machine
INTERPRETER = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason=f"Pallas' GPU interpreter needs jax 0.11, and this is {jax.__version__}"
)


def laid_out(narrow: Any = None, wide: Any = None, interpret: bool = False) -> Persistent:
    """Engine `persistent` with these layouts on the chip; see `cavs._engines.persistent.chip.Layouts`."""
    return Persistent(INTERPRETED.interpret if interpret else None, Layouts(narrow, wide))


def reset_before(p: Any, v: cavs.Vertex) -> None:
    """A GRU that resets before its product: two products, one after the other (Cho et al., 2014)."""
    h, x = v.gather(0), v.pull()
    r, z = jnp.split(jax.nn.sigmoid(x @ p["w"] + h @ p["u"]), 2)
    h = (1 - z) * h + z * jnp.tanh(x @ p["v"] + (r * h) @ p["q"])
    v.scatter(h)
    v.push(jnp.sin(h))  # lazy


def normed(p: Any, v: cavs.Vertex) -> None:
    """Layer norm of a sum over children: sums over a vector, and a parameter within the recurrent part."""
    h = v.gather_all(lambda c: jax.nn.relu(c["h"]) + c["m"])
    a = h @ p["q"] + v.pull() @ p["v"]
    a = (a - a.mean()) * jax.lax.rsqrt(a.var() + 1e-3) * p["scale"]
    v.scatter({"h": jnp.tanh(a), "m": a / (1 + v.num_children())})
    v.push({"h": jnp.tanh(a), "n": jnp.abs(a).sum()})


def unread(p: Any, v: cavs.Vertex) -> None:
    """A state that is neither gathered nor pushed: no vertex writes its cotangents, which are zero."""
    h = jnp.tanh(v.gather(0)["h"] @ p["q"] + v.pull() @ p["v"])
    v.scatter({"h": h, "m": h * h})
    v.push(h)


def reciprocals(p: Any, v: cavs.Vertex) -> None:
    """A value that is not finite for a zero state, such as padding; a maximum that the zeros of padding would exceed."""
    y = 3 + jnp.tanh(v.pull() @ p["v"])  # between 1 and 5: nothing is divided by numbers that products leave near zero
    if not v.is_leaf():
        h = v.gather(0)
        b = 1 / (h * h) + jnp.log(jnp.abs(h)) - 2
        y = y + jnp.tanh(b @ p["q"] / 4 + b - b.max())
    v.scatter(y)
    v.push(y)


def linear(p: Any, v: cavs.Vertex) -> None:
    """Products that read the cotangents of parents directly; states that are read of one child but not of the other."""
    x, other = v.pull() @ p["v"], v.gather(1)["m"]
    h = v.gather(0)["h"] @ p["q"] + other + x
    v.scatter({"h": h, "m": 0.5 * other - x})
    v.push(h)


def constant_states(p: Any, v: cavs.Vertex) -> None:
    """States that are constants, integers and booleans; children that are read only for a comparison."""
    x = v.pull() @ p["v"]
    if v.is_leaf():
        h, depth, score = jnp.tanh(x), jnp.int32(0), x[0] * 0
    else:
        depths = v.gather_all(lambda c: c["depth"].astype(jnp.float32), reduce="max")
        some = v.gather_all(lambda c: jnp.where(c["leaf"] | (c["h"] > 0.2), c["b"], 0.5) * p["scale"]) / (1 + depths)
        h = jnp.tanh(some @ p["q"] + x + v.gather(0)["score"])
        depth, score = v.gather(0)["depth"] + 1, h @ p["scale"]
    v.scatter({"h": h, "b": h * h, "leaf": jnp.bool_(v.is_leaf()), "depth": depth, "score": score})
    v.push({"h": h, "score": score})


def copies(step: Any, gather: str, n: int) -> tuple[Any, Any]:
    fn = copying(step, gather)
    arity = 2 if gather == "by number" else 0
    return own(lambda p, v: fn({"w": p["v"], "u": p["q"]}, v), "v q", n, state={"c": (n,), "h": (n,)}, arity=arity)


def own(fn: Any, names: str, hidden: int, **kwargs: Any) -> tuple[Any, Any]:
    """F, and parameters that do not depend on earlier tests. With this seed no state that `constant_states` compares is so
    near to the limit that an error of tf32 (2e-4) changes the answer, which would change a gradient by up to 0.7 %."""
    rng = np.random.default_rng([11, hidden])
    shapes = {"w": (E, 2 * hidden), "u": (hidden, 2 * hidden), "v": (E, hidden), "q": (hidden, hidden), "scale": (hidden,)}
    params = {n: (rng.standard_normal(shapes[n]) / shapes[n][0] ** 0.5).astype(np.float32) for n in names.split()}
    F = cavs.VertexFunction(fn, **kwargs)
    return F, params


DAG = joined([random_dag(14, (1, 2, 3), seed=4), from_children([[], [], [0, 1], [0, 0], [2, 3], [2], [4, 5]]), chain(1)])
TREES = joined([random_binary_tree(n, seed=n) for n in (9, 1, 4, 2)])
CHAINS = joined([chain(n) for n in (5, 1, 12)])


def mixed(n: int) -> dict[str, Any]:
    """The states of `constant_states`."""
    scalars = {"leaf": jnp.bool_, "depth": jnp.int32, "score": jnp.float32}
    return {"h": (n,), "b": (n,)} | {name: jax.ShapeDtypeStruct((), dtype) for name, dtype in scalars.items()}


def ready(program: Any) -> tuple[Any, Any]:
    return program.vertex_function(), _params_of(program)


@functools.cache
def _params_of(program: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), program.init(jax.random.key(0)))


CASES = {
    "BinaryTreeLSTM": (lambda n=H: ready(vp.BinaryTreeLSTM(n, E)), TREES),
    "ChildSumTreeLSTM": (lambda n=H: ready(vp.ChildSumTreeLSTM(n, E)), DAG),
    "NaryTreeLSTM": (lambda n=H: ready(vp.NaryTreeLSTM(n, E)), TREES),
    "TreeFC": (lambda n=H: ready(vp.TreeFC(n)), TREES),
    "ElmanRNN": (lambda n=H: ready(vp.ElmanRNN(n, E)), CHAINS),
    "LSTM": (lambda n=H: ready(vp.LSTM(n, E)), CHAINS),
    "GRU": (lambda n=H: ready(vp.GRU(n, E)), CHAINS),
    "reset before the product": (lambda n=H: own(reset_before, "w u v q", n, state=(n,), arity=1), CHAINS),
    "layer norm": (lambda n=H: own(normed, "v q scale", n, state={"h": (n,), "m": (n,)}), DAG),
    "unread state": (lambda n=H: own(unread, "v q", n, state={"h": (n,), "m": (n,)}, arity=1), CHAINS),
    "reciprocals": (lambda n=H: own(reciprocals, "v q", n, state=(n,), arity=1), CHAINS),
    "linear": (lambda n=H: own(linear, "v q", n, state={"h": (n,), "m": (n,)}, arity=2), TREES),
    "constant states": (lambda n=H: own(constant_states, "v q scale", n, state=mixed(n), arity=1), DAG),
    "DAGNN": (lambda n=H: ready(vp.DAGNN(n, E)), DAG),
    "EncoderDecoder": (lambda n=H: ready(vp.EncoderDecoder(n, E)), vp.EncoderDecoder.graphs([4, 1, 2], [3, 2, 1])[1]),
}

# Programs that pass states on as they are, and so the cotangents: of children by number and of all children in turn.
COPIES = {
    step.__name__: (lambda n=H, step=step, gather=gather: copies(step, gather, n), graphs)
    for step, (gather, graphs) in zip(COPYING, itertools.cycle([("all", DAG), ("by number", TREES)]), strict=False)
}


def inputs_of(name: str, graphs: cavs.Graphs, hidden: int = H) -> Any:
    def rows(width: int) -> np.ndarray:
        return np.random.default_rng(7).standard_normal((graphs.num_vertices, width)).astype(np.float32)

    if name == "EncoderDecoder":
        return {"x": rows(E), "c": rows(hidden), "h": rows(hidden)}
    return rows(hidden if name == "TreeFC" else E)


def plan_of(F: Any, params: Any, x: Any) -> Any:
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), jnp.float32), params)
    return plans.plan_of(F, shapes, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], jnp.float32), x))


def with_gradients(F: Any, graphs: cavs.Graphs, engine: str | Engine, run: Callable[..., Any] = cavs.run) -> Callable[..., Any]:
    """(params, x) -> pushes, and the gradients of a fixed combination of them; compiled, but for kernels in the interpreter."""
    sched = cavs.schedule(graphs, scripts=True)

    def loss(params: Any, x: Any) -> Any:
        pushes = run(F, params, sched, x, engine=engine)
        rng = np.random.default_rng(1)
        total = sum((y * rng.standard_normal(y.shape).astype(np.float32)).sum() for y in jax.tree.leaves(pushes))
        return total, pushes

    def both(params: Any, x: Any) -> tuple[Any, Any]:
        (_, pushes), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        return pushes, grads

    return both if isinstance(engine, Engine) and engine.interpret else jax.jit(both)


def values(
    F: Any, params: Any, graphs: cavs.Graphs, x: Any, engine: str | Engine, run: Callable[..., Any] = cavs.run
) -> tuple[Any, Any]:
    """Pushes and gradients, as `with_gradients` returns them."""
    return with_gradients(F, graphs, engine, run)(params, x)


def assert_near(got: Any, want: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * (np.linalg.norm(b) + 1e-6), (np.abs(a - b).max(), a.shape)
