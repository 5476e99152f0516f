"""Memory plans: overrides by name, plans in files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import cavs
from cavs._function.keep_options import KeepOptions
from cavs._run.plans import plan_of
from tests.odd_graphs import joined, random_binary_tree
from tests.truth import assert_close

W = 0.1 * jnp.sin(jnp.arange(64.0)).reshape(8, 8)
X = jnp.cos(jnp.arange(240.0)).reshape(30, 8)


def layers(w, x):
    for i in range(3):
        x = checkpoint_name(jnp.tanh(x @ w), f"h{i}")
    return jnp.sum(x**2)


def loop(w, x):
    def step(h, row):
        h = checkpoint_name(jnp.tanh(row @ w + h @ w), "state")
        return h, jnp.sin(h)

    h, rows = jax.lax.scan(step, x[0], x)
    return jnp.sum(rows**2) + h.sum()


def cell(w, v):
    """A recurrence whose backward reads `gate` and `out`."""
    gate = checkpoint_name(jnp.tanh((v.gather(0) + v.gather(1)) @ w["u"] + v.pull() @ w["x"]), "gate")
    out = checkpoint_name(jnp.tanh(gate @ w["v"]), "out")
    v.scatter(out)
    v.push(out)


F = cavs.VertexFunction(cell, state=jax.ShapeDtypeStruct((8,), jnp.float64), arity=2)
GRAPHS = joined([random_binary_tree(2 + i % 5, seed=i) for i in range(8)])
PARAMS = {k: 0.3 * np.sin(np.arange(64.0) + i).reshape(8, 8) for i, k in enumerate("uvx")}


def loss(params, sched):
    return jnp.sum(cavs.run(F, params, sched, jnp.ones((sched.shape.vertices, 8)), select=sched.roots) ** 2)


@pytest.mark.parametrize(
    ("names", "kept", "again"),
    [
        ({}, 3, 0),
        ({"h1": "recompute"}, 2, 1),
        ({"h0": "recompute", "h1": "recompute", "h2": "recompute"}, 0, 3),
        ({"h1": "offload", "h2": "keep"}, 2, 0),
    ],
)
def test_what_is_named_is_kept_or_not(names, kept, again):
    small = cavs.memory.recompute(layers, names=names)
    plan = small.plan(W, X)
    assert plan.bytes == kept * X.nbytes and plan.flops == again * 2 * X.size * 8
    assert_close(jax.jit(jax.grad(small))(W, X), jax.grad(layers)(W, X), 1e-6)


def test_what_is_recomputed_follows_from_what_is_kept():
    small = cavs.memory.recompute(layers, names={"h0": "recompute", "h1": "keep", "h2": "recompute"})
    assert small.plan(W, X).bytes == X.nbytes
    assert_close(jax.jit(jax.grad(small))(W, X), jax.grad(layers)(W, X), 1e-6)


def test_names_in_f():
    want = jax.jit(jax.value_and_grad(loss))(PARAMS, cavs.schedule(GRAPHS))
    plans = {way: cavs.memory.plan(loss, PARAMS, GRAPHS, names={"gate": way}, parts=1) for way in ("keep", "recompute")}
    for plan in plans.values():
        assert_close(jax.jit(jax.value_and_grad(plan.loss))(PARAMS, plan.batch(GRAPHS)), want, 1e-12)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    traced = plan_of(F, shapes, jax.ShapeDtypeStruct((8,), jnp.float64))
    kept = {way: traced.keeping(KeepOptions(names=(("gate", way),))).inner[None].forward.keep for way in plans}
    gate = traced.inner[None].joint.names["gate"]
    assert gate <= set(kept["keep"]) and gate.isdisjoint(kept["recompute"])


@pytest.mark.parametrize(("fn", "budget"), [(layers, None), (loop, "min")])
def test_a_saved_plan_is_replayed(fn, budget, tmp_path):
    first = cavs.memory.recompute(fn, budget)
    plan = first.plan(W, X)
    plan.save(tmp_path / "plan.json")
    again = cavs.memory.recompute(fn, plan=tmp_path / "plan.json")
    assert again.plan(W, X).rows() == plan.rows() and again.verify(W, X) == first.verify(W, X)
    assert_close(jax.jit(jax.grad(again))(W, X), jax.grad(fn)(W, X), 1e-5)
    with pytest.raises(ValueError, match="recompute: plan: got the plan of another function"):
        cavs.memory.recompute(fn, plan=tmp_path / "plan.json").plan(W, X[:20])


@pytest.mark.slow
def test_a_saved_batch_plan_is_loaded(tmp_path):
    plan = cavs.memory.plan(loss, PARAMS, GRAPHS, parts=4, names={"out": "recompute"})
    plan.save(tmp_path / "plan.json")
    again = cavs.memory.load(tmp_path / "plan.json", loss, PARAMS, GRAPHS)
    assert (again.parts, again.segments, again.peak) == (plan.parts, plan.segments, plan.peak)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="load: path: got .*other.json; expected a file that BatchPlan.save wrote"):
        cavs.memory.load(tmp_path / "other.json", loss, PARAMS, GRAPHS)
    with pytest.raises(ValueError, match="load: batch: got 4 graphs; expected 8"):
        cavs.memory.load(tmp_path / "plan.json", loss, PARAMS, GRAPHS[:4])


def test_misuse_says_what_to_write():
    with pytest.raises(ValueError, match=r"recompute of layers: names: got 'q'; expected one of \['h0', 'h1', 'h2'\]"):
        cavs.memory.recompute(layers, names={"q": "keep"}).plan(W, X)
    with pytest.raises(ValueError, match="recompute: names: got 'drop' for 'h0'; expected a dict"):
        cavs.memory.recompute(layers, names={"h0": "drop"})
    with pytest.raises(ValueError, match="plan: names: got 'offload' for 'gate'"):
        cavs.memory.plan(loss, PARAMS, GRAPHS, names={"gate": "offload"})
    with pytest.raises(ValueError, match=r"plan: names: got 'gates'; expected one of \['gate', 'out'\]"):
        cavs.memory.plan(loss, PARAMS, GRAPHS, names={"gates": "keep"})


def named_everywhere(params, x):
    """Parts that depend on one parameter each, with a name inside: in plain equations, a call, and loops and conditions."""

    def named(name, x):
        return checkpoint_name(jnp.tanh(x @ params[name]), name)

    @jax.jit
    def call(x):
        return named("call", x)

    rows = x[:, None]
    scanned = jax.lax.scan(lambda h, row: (named("scan", h + row), None), jnp.zeros((1, 8)), rows)[0]
    nested = jax.lax.scan(
        lambda h, row: (jax.lax.scan(lambda c, _: (named("nested", c), None), h + row, None, length=2)[0], None),
        jnp.zeros((1, 8)), rows,
    )[0]  # fmt: skip
    branch = jax.lax.cond(x[0, 0] > 2, lambda: x, lambda: named("cond", x))
    dynamic = jax.lax.stop_gradient(
        jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, named("while", c[1])), (0, x))[1]
    )
    parts = named("plain", x), call(x), scanned, nested, branch, dynamic
    return sum(jnp.sum(jnp.sin(part)) for part in parts)


NAMES = ("plain", "call", "scan", "nested", "cond", "while")


@pytest.mark.parametrize(
    ("which", "way"),
    [(("plain",), "keep"), (("scan",), "recompute"), (("cond",), "keep"), (("plain", "nested", "call"), "recompute")],
)
def test_names_of_what_is_not_differentiated(which, way):
    """They exist, wherever they are, so they are no errors; the backward reads none of their values."""
    params = {name: W * (1 + i) for i, name in enumerate(NAMES)}
    names = {name: way for name in NAMES if name not in which}
    small = cavs.memory.recompute(named_everywhere, names=names)

    some = {name: params[name] for name in which}
    got, want = (jax.jit(jax.grad(lambda some, fn=fn: fn(params | some, X)))(some) for fn in (small, named_everywhere))
    assert_close(got, want, 1e-10)


def test_names_that_no_value_has_or_that_cannot_be_kept():
    params = {name: W for name in NAMES}
    for name, wanted in (("cell", ("plain",)), ("cond", ("cond",))):
        small = cavs.memory.recompute(named_everywhere, names={name: "keep"})
        with pytest.raises(ValueError, match=f"names: got '{name}'; expected one of .*'call', .*'scan'"):
            jax.grad(lambda some, fn=small: fn(params | some, X))({name: params[name] for name in wanted})
