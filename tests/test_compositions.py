"""Transformations of JAX in any order: some compositions by hand, some at random (`tests/random_compositions.py`)."""

import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import cavs
from cavs._jaxpr.custom_rules import reverse_differentiable
from cavs._jaxpr.ruled import replaceable
from cavs.kernels import H200, Target, native_unavailable, persistent
from tests.random_compositions import ALL, TARGETS, Case, arguments, case_of, check, compared, plain_layers
from tests.slow import few, only
from tests.truth import assert_close

OUTSIDE = [
    ("vmap inputs", "grad params"),
    ("vmap params", "grad inputs"),
    ("checkpoint", "vmap inputs", "grad params"),
    ("map batch_size", "vjp"),
    ("vmap both", "jacrev"),
    ("vmap named", "value_and_grad"),
]
SECOND = [("scan carry", "hvp"), ("cond", "checkpoint", "hvp"), ("grad params", "jacfwd"), ("jvp", "jvp")]
CHECKED = [
    ("cond", "shard_map checked", "grad params"),
    ("shard_map checked", "checkpoint", "vjp"),
    ("checkpoint", "value_and_grad", "shard_map checked"),
    ("jacrev", "jacfwd", "shard_map checked"),  # the results of the first one are not batched with the tangents
]
INTERPRETED = [("vmap inputs", "grad params"), ("scan carry", "hvp")]
BY_HAND = [
    *(("scan", names) for names in (*OUTSIDE, *SECOND, *CHECKED)),
    *zip(("native", "recompute", "parts"), OUTSIDE[:3], strict=True),
    *zip(("segments", "native segments", "recompute run"), OUTSIDE[3:], strict=True),
    *((name, SECOND[k]) for k, name in enumerate(("native segments", "native", "recompute min"))),
    ("recompute run", CHECKED[0]),
    ("segments", ("shard_map checked", "jvp")),  # equations in the loop over segments trace when they are lowered
    *(("persistent", names) for names in INTERPRETED),
]

# Each transformation of `run`, and derivatives of first and second order.
KEPT = [
    *(("scan", names) for names in (OUTSIDE[0], SECOND[2], CHECKED[1])),
    *(("native", OUTSIDE[0]), ("parts", OUTSIDE[2]), ("recompute run", CHECKED[0]), ("recompute min", SECOND[2])),
]


def run_case(case: Case, name: str) -> str:
    if "native" in name and (reason := native_unavailable()):
        pytest.skip(reason)
    if name == "persistent" and jax.__version_info__ < (0, 11):
        pytest.skip("Pallas' interpreter")
    with jax.default_matmul_precision("highest"):
        return check(case, name)


@pytest.mark.parametrize(
    ("name", "names"), only(KEPT, BY_HAND), ids=lambda x: x if isinstance(x, str) else "-".join(x).replace(" ", "_")
)
def test_by_hand(name: str, names: tuple[str, ...]) -> None:
    cell = "tree" if len(names) % 2 else "attention"
    assert run_case(Case(cell, names, True), name) == "ok"


@pytest.mark.parametrize("name", few([name for name in TARGETS if name != "persistent"], 4))
def test_at_random(name: str) -> None:
    case = case_of(list(TARGETS).index(name))
    found = run_case(case, name)
    assert found in ("ok", "refused") or found.startswith("ill"), f"{case}: {found}"


AGAIN = [("grad params", "grad inputs"), ("jvp", "vjp"), ("vmap params", "hvp", "grad one weight")]


@pytest.mark.parametrize(
    ("name", "names"),
    few([*(("scan", names) for names in AGAIN), *zip(("native segments", "recompute run", "parts"), AGAIN, strict=True)], 5),
)
def test_in_reverse_over_a_derivative(name: str, names: tuple[str, ...]) -> None:
    """`run` refuses it, and says what to write. Of what JAX can differentiate twice, it is right."""
    assert run_case(Case("tree", names, True), name) == ("refused" if TARGETS[name].once else "ok")


def test_what_is_drawn() -> None:
    cases = [case_of(seed) for seed in range(400)]
    assert {name for case in cases for name in case.names} == ALL.keys()
    assert {len(case.names) for case in cases} == {1, 2, 3}
    assert {case.compiled for case in cases} == {True, False} and cases == [case_of(seed) for seed in range(400)]
    twice = sum(case.again_in_reverse() for case in cases)
    assert 0 < twice < 100


def test_a_wrong_result_is_seen() -> None:
    args = arguments("tree", jnp.float64)
    want = plain_layers("tree")(*args)
    assert compared(want, want, 1e-9) == "ok"
    assert compared(want | {"h": want["h"] + 1e-6}, want, 1e-9).startswith("['h']: off by 1.00e-06")
    assert compared({"h": want["h"]}, want, 1e-9).startswith("structure")


class Held:
    """Something that a derivative refers to."""


def differentiated(held: Held, how: str) -> None:
    def backward(x: jax.Array, ct: jax.Array, held: Held = held) -> tuple[jax.Array]:
        return (jnp.cos(x) * ct,)

    def forward(varied: bool, x: jax.Array) -> tuple[jax.Array, jax.tree_util.Partial]:
        return jnp.sin(x), jax.tree_util.Partial(backward, x)

    fn = reverse_differentiable(jnp.sin, forward, "sine")
    of = {
        "grad": jax.grad(fn),
        "loop": jax.grad(lambda x: lax.scan(lambda c, _: (fn(c), None), x, None, length=2)[0]),
        "vmap": jax.grad(lambda x: jax.vmap(fn)(jnp.stack([x, x])).sum()),
        "jvp": lambda x: jax.jvp(fn, (x,), (x,))[1],
    }
    assert jnp.isfinite(jax.jit(of[how])(0.5))


def test_caches_of_jax_keep_nothing_alive() -> None:
    alive = {}
    for how in ("grad", "loop", "vmap", "jvp"):
        held = Held()
        alive[how] = weakref.ref(held)
        differentiated(held, how)
        del held
    gc.collect()
    assert not [how for how, held in alive.items() if held() is not None]


class Model:
    """A function of vertices, and a jitted step that calls it, in one object."""

    def __init__(self) -> None:
        self.F = cavs.VertexFunction(self.cell, state=(3,), arity=1)
        self.step = jax.jit(jax.grad(self.loss))

    def cell(self, w: jax.Array, v: cavs.Vertex) -> None:
        h = jnp.tanh(v.pull() + v.gather(0) @ w)
        v.scatter(h)
        v.push(h)

    def loss(self, w: jax.Array, **schedule: Any) -> jax.Array:
        return cavs.run(self.F, w, cavs.schedule(cavs.from_lengths([3, 1]), **schedule), jnp.ones((4, 3))).sum()


def test_functions_of_vertices_and_what_was_compiled_for_them_are_freed() -> None:
    """Caches of JAX kept each of them, with all that it refers to: a megabyte and more for each trial of a search."""
    w, alive = jnp.eye(3), {}
    uses: dict[str, Any] = {
        "run": lambda model: model.loss(w),
        "jit": lambda model: model.step(w),
        "grad": lambda model: jax.grad(model.loss)(w),
        "segments": lambda model: jax.grad(functools.partial(model.loss, segments=2))(w),
        "vmap": lambda model: jax.vmap(jax.grad(model.loss))(jnp.stack([w, w])),
        "hessian": lambda model: jax.hessian(model.loss)(w),
        "recompute": lambda model: jax.grad(cavs.memory.recompute(model.loss, budget="min"))(w),
    }
    for how, use in uses.items():
        model = Model()
        use(model)
        alive[how] = weakref.ref(model.F)
        del model
    gc.collect()
    assert not [how for how, F in alive.items() if F() is not None]


@pytest.mark.skipif(persistent.unsupported(H200) is not None, reason=str(persistent.unsupported(H200)))
def test_functions_that_do_not_fit_the_kernels_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason was kept as an error, whose frames refer to all callers and their arrays, those of JAX among them."""
    monkeypatch.setattr(Target, "here", staticmethod(lambda: H200))
    model = Model()
    jax.jit(model.loss).trace(jnp.eye(3))
    alive = weakref.ref(model.F)
    del model
    gc.collect()
    assert alive() is None


def test_what_replaces_a_function() -> None:
    """Under `jax.vmap` and where it is differentiated, also inside loops whose rules JAX drops."""
    seen: list[str] = []

    def noted(name: str) -> Any:
        def fn(x: jax.Array, n: jax.Array) -> dict[str, jax.Array]:
            seen.append(name)
            return {"y": jnp.sin(x) * n, "n": n + 1}

        return fn

    fn, x, n = replaceable(noted("one"), noted("other")), jnp.float64(0.3), jnp.int32(2)
    assert_close(fn(x, n), {"y": jnp.sin(x) * 2, "n": jnp.int32(3)}, 1e-12)
    assert seen == ["one"]
    for transformed in (
        lambda x: jax.vmap(fn, (0, None))(jnp.stack([x, x]), n)["y"].sum() / 2,
        lambda x: jax.jvp(lambda x: fn(x, n)["y"], (x,), (jnp.ones_like(x),))[0],
    ):
        seen.clear()
        assert_close(jax.jit(transformed)(x), jnp.sin(x) * 2, 1e-12)
        assert set(seen) == {"other"}
    loop = lambda x: lax.scan(lambda c, _: (c * fn(x, n)["y"], None), x, None, length=2)[0]  # noqa: E731
    plain = lambda x: x * (jnp.sin(x) * 2) ** 2  # noqa: E731
    twice = lambda f: jax.jit(lambda x: jax.jvp(jax.grad(f), (x,), (jnp.ones_like(x),)))(x)  # noqa: E731
    assert_close(twice(loop), twice(plain), 1e-12)


def test_closed_over_schedules() -> None:
    """What `recompute` closes over becomes constants, which JAX keeps as arrays of NumPy."""
    graphs, x = cavs.from_lengths([3, 5]), jnp.arange(32, dtype=jnp.float32).reshape(8, 4) / 32
    F = cavs.vertex_programs.ElmanRNN(4, 4)
    params = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), F.init(jax.random.key(0)))
    sched = cavs.schedule(graphs)
    loss = lambda p: (cavs.run(F.vertex_function(), p, sched, x) ** 2).sum()  # noqa: E731
    each = [jax.grad(loss)(jax.tree.map(lambda x, i=i: x[i], params)) for i in (0, 1)]
    found = jax.vmap(jax.grad(cavs.memory.recompute(loss)))(params)
    assert_close(found, jax.tree.map(lambda *xs: jnp.stack(xs), *each), 1e-5)


def test_closed_over_by_parts() -> None:
    """What a loss closes over is differentiated and batched, too."""
    stacks, w = [jnp.arange(16.0).reshape(4, 2, 2) / 8], jnp.eye(2)

    def total(c: jax.Array, w: jax.Array = w) -> jax.Array:
        return cavs.memory.sub_batched(lambda w, rows: jnp.sum(jnp.tanh(rows @ w)) * c)(w, stacks)

    want = jnp.sum(jnp.tanh(stacks[0] @ w))
    for grad in (jax.grad(total), jax.jit(jax.grad(total)), jax.grad(jax.jit(total))):
        assert_close(grad(3.0), want, 1e-12)
    assert_close(jax.vmap(total)(jnp.arange(3.0)), want * jnp.arange(3.0), 1e-12)
    summed = lambda w: lax.scan(lambda t, c: (t + total(c, w), None), 0.0, jnp.arange(3.0))[0]  # noqa: E731
    assert_close(jax.grad(summed)(w), 3 * jax.grad(lambda w: total(1.0, w))(w), 1e-12)
