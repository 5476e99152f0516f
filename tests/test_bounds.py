"""Bounds hold whatever F is given; and who has them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs._engines.persistent import bounds, chip, lower
from cavs._jaxpr.equations import bind
from cavs._jaxpr.jaxprs import is_var
from cavs._run import plans
from cavs.kernels import H200
from tests.persistent_programs import CASES, inputs_of, plan_of

# All that their products read.
BOUNDED = {"BinaryTreeLSTM", "NaryTreeLSTM", "LSTM", "GRU", "reset before the product", "ElmanRNN", "unread state"}


def planned(name: str, hidden: int) -> Any:
    make, graphs = CASES[name]
    F, params = make(hidden)
    return plan_of(F, params, inputs_of(name, graphs, hidden))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("name", CASES)
def test_bounds_hold(name: str, scale: float) -> None:
    """For every value of F, of parameters, inputs and gathered states of any size."""
    plan, rng = planned(name, 16), np.random.default_rng(1)
    for role in [*plan.leaf.values(), *(part.role for part in plan.inner.values())]:
        eqns = role.program.eqns
        known = {v: 2.0 for slot in role.slots for v in slot if v.aval.dtype == np.float32}
        found = bounds.bounds(eqns, known)
        env = dict(role.program.consts)

        def value(v: Any, env: dict[Any, Any] = env, known: dict[Any, float] = known) -> Any:
            if v not in env:
                x = rng.uniform(-2, 2, v.aval.shape) * (1 if v in known else scale)
                env[v] = jax.numpy.asarray(x, v.aval.dtype)
            return env[v]

        for e in eqns:
            try:
                outs = bind(e, [value(x) if is_var(x) else x.val for x in e.invars])
            except NotImplementedError:  # what children's values are spread or reduced by: these may be anything
                continue
            env |= dict(zip(e.outvars, outs, strict=True))
            for v, x in zip(e.outvars, outs, strict=True):
                if v in found:
                    assert (np.abs(np.asarray(x, np.float64)) <= found[v] * (1 + 1e-6)).all(), e


@pytest.mark.parametrize("name", CASES)
def test_products_of_what_is_bounded_are_in_float16(name: str) -> None:
    plan = planned(name, 32)
    for kind in plan.inner:
        assert lower.recurrence_of(plan, kind, True).precision == ("f16" if name in BOUNDED else "tf32")
        assert lower.recurrence_of(plan, kind, False).precision == "tf32"
    for asked, precision in (("highest", "fp32"), ("TF32_TF32_F32", "tf32"), ("BF16_BF16_F32", "bf16")):
        with jax.default_matmul_precision(asked):
            plan = planned(name, 32)
            assert all(lower.recurrence_of(plan, kind, True).precision == precision for kind in plan.inner)


MIXTURES = {
    "of the state and a bounded value": (lambda z, w, h, n: (1 - z) * n + z * h, True),
    "in another order": (lambda z, w, h, n: h * (1 - z) + n * z, True),
    "of three": (lambda z, w, h, n: w * ((1 - z) * n + z * h) + (1 - w) * h, True),
    "with another fraction": (lambda z, w, h, n: (1 - w) * n + z * h, False),
    "of twice the state": (lambda z, w, h, n: (1 - z) * n + z * (h + h), False),
    "with a difference": (lambda z, w, h, n: (1 - z) * n - z * h, False),
    "with two": (lambda z, w, h, n: (2 - z) * n + z * h, False),
    "with no fraction": (lambda z, w, h, n: (1 - n) * n + n * h, False),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_states(name: str) -> None:
    """Those whose weights add up to one are bounded by induction over the levels."""
    mix, bounded = MIXTURES[name]

    def fn(p: Any, v: cavs.Vertex) -> None:
        h, x = v.gather(0), v.pull()
        z, w = jnp.split(jax.nn.sigmoid(x @ p["w"] + h @ p["u"]), 2)
        h = mix(z, w, h, jnp.tanh(x @ p["v"]))
        v.scatter(h)
        v.push(h)

    F = cavs.VertexFunction(fn, state=(32,), arity=1)
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in (("w", (3, 64)), ("u", (32, 64)), ("v", (3, 32)))}
    plan = plans.plan_of(F, params, jax.ShapeDtypeStruct((3,), jnp.float32))
    assert bounds.state_bounds(plan) == [1.0 if bounded else float("inf")]
    assert lower.recurrence_of(plan, None, True).precision == ("f16" if bounded else "tf32")


def test_sums_of_more_than_two_rows_stay_in_tf32() -> None:

    def summed(p: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh((v.gather(0) + v.gather(1) + v.gather(2)) @ p["u"] + v.pull() @ p["w"])
        v.scatter(h)
        v.push(h)

    def shapes(tree: Any) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), tree)

    F = cavs.VertexFunction(summed, state=(64,), arity=3)
    params = shapes({"u": np.zeros((64, 64)), "w": np.zeros((3, 64))})
    plan = plans.plan_of(F, params, jax.ShapeDtypeStruct((3,), jnp.float32))
    assert bounds.state_bounds(plan)[-1] == 1
    assert lower.recurrence_of(plan, None, True).precision == "tf32"


def test_weights_that_stream_may_be_in_float16() -> None:
    large = vp.LSTM(2048, 16)
    plan = plans.plan_of(
        large.vertex_function(), jax.eval_shape(large.init, jax.random.key(0)), jax.ShapeDtypeStruct((16,), jnp.float32)
    )
    made = lower.recurrence_of(plan, None, True)
    assert made.precision == "f16" and not any(c.resident for c in chip.candidates(made.program, "f16", H200))


def test_powers_of_two_of_operands() -> None:
    """What a bound allows: the bound itself times the power is at most 2^15, half of the range of float16."""
    plan = planned("BinaryTreeLSTM", 32)
    (part,) = plan.inner.values()
    powers = bounds.powers_of_operands(part, bounds.state_bounds(plan))
    operands = [x for use in part.reverse.uses for x in use.operands.values()]
    slots = {v for v, (_, i) in zip(part.forward.slots, part.recurrent.slots, strict=True) if i == 1}
    assert set(operands) == powers.keys() and sorted(set(powers.values())) == [12, 14]  # the sum of two states, a state
    assert all(powers[x] == 14 for x in operands if x in slots)
    plan = planned("TreeFC", 32)
    assert not bounds.powers_of_operands(plan.inner[None], bounds.state_bounds(plan))
    assert not bounds.powers_of_operands(part, [float("inf")] * 2)
