"""What the backward keeps, runs again and overwrites changes its memory, never its results."""

import functools
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs._function.keep_options import KeepOptions, MemoryOptions
from cavs._function.keeping import front, reused
from cavs._run.plans import plan_of
from cavs._run.run import run_with_options
from cavs._stages import segment
from tests.odd_graphs import BATCHES
from tests.programs import CASES, IN_FORESTS, PROGRAMS
from tests.slow import few
from tests.truth import assert_close, batch_inputs, call, gradients, truth

NAMES = ["BinaryTreeLSTM", "ChildSumTreeLSTM", "lazy push", "matrix states", "twin states", "three kinds"]


def split_of(program: Any, width: int = 8) -> Any:
    params = jax.eval_shape(program.init, jax.random.key(0))
    plan = plan_of(program.vertex_function(), params, jax.ShapeDtypeStruct((width,), jnp.float32))
    return plan, plan.inner[None]


def least(name: str, batch: str, **how: Any) -> tuple[Any, Any]:
    """The gradients and pushes of a program that needs the least memory."""
    graphs, schedule = BATCHES[batch], cavs.schedule(BATCHES[batch], **how)

    least = functools.partial(run_with_options, options=MemoryOptions(least=True))

    def run(params: Any, inputs: Any) -> Any:
        return call(least, PROGRAMS[name].function, params, schedule, inputs)

    return gradients(run, PROGRAMS[name].params, batch_inputs(name, batch), graphs.num_vertices)


@pytest.mark.parametrize(("name", "batch"), few([case for case in IN_FORESTS if case[0] in NAMES], 2))
def test_gradients_if_cotangents_overwrite_what_was_kept(name: str, batch: str) -> None:
    grads, pushes = least(name, batch)
    want_pushes, want = truth(name, batch)
    assert_close(pushes, want_pushes, 1e-12)
    assert_close(grads, want, 1e-10)


def test_programs_that_overwrite_states_are_tested_in_forests() -> None:
    forests = {name for name, batch in BATCHES.items() if (shape := cavs.schedule(batch).shape).forest and shape.rooted}
    tested = {name for name, batch in CASES if batch in forests}
    found = set()
    for name, program in PROGRAMS.items():
        plan = plan_of(program.function, jax.eval_shape(lambda program=program: program.params), program.rows, 8, program.edges)
        if plan.keeping(KeepOptions(overwrite=True)).overwritten:
            found.add(name)
    assert found <= tested and len(found) > 6 and "gathered twice" not in found


def test_the_front_of_a_tree_lstm() -> None:
    _, part = split_of(vp.BinaryTreeLSTM(8, 8))
    points = front(part.joint)
    rows = [p.bytes / (8 * 4) for p in points]
    products = [p.flops / (2 * 8 * 8) for p in points]
    # i, o, u and two forget gates; the gates' product is H x 3H, those of the forget gates are H x H.
    assert rows == [5, 3, 2, 0] and products == [0, 2, 3, 5]


def test_what_overwrites_what() -> None:
    plan, part = split_of(vp.BinaryTreeLSTM(8, 8))
    kept = plan.keeping(KeepOptions(overwrite=True, share=True))
    assert kept.overwritten == {0}  # c: h is an operand of the lazy gradients, and is pushed
    joint = kept.inner[None].joint
    assert len(reused(joint, joint.reverse.cuts, joint.reverse.cut_domain)) == 2  # both cut cotangents
    assert plan.keeping(KeepOptions()) is plan and not part.forward.overwritten
    fc, _ = split_of(vp.TreeFC(8))
    assert not fc.keeping(KeepOptions(overwrite=True, share=True)).overwritten


def test_a_state_of_two_parents_is_not_overwritten() -> None:
    diamond = cavs.from_edges(4, np.array([[1, 0], [2, 0], [3, 1], [3, 2]]))
    assert not cavs.schedule(diamond).shape.forest
    assert cavs.schedule(cavs.from_lengths([3, 2])).shape.forest


def test_a_loop_in_a_function_with_a_rule_does_not_run_again() -> None:
    @jax.custom_jvp
    def doubled(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: y < 1, lambda y: 2 * y, x)

    doubled.defjvp(lambda primals, tangents: ((y := doubled(*primals)), y / primals[0] * tangents[0]))

    def fn(params: Any, v: cavs.Vertex) -> None:
        v.scatter(h := jnp.sin(doubled(jnp.exp(v.gather_all() + v.pull()))))
        v.push(h)

    F = cavs.VertexFunction(fn, state=())
    part = plan_of(F, None, jax.ShapeDtypeStruct((), jnp.float32)).inner[None]
    (result,) = (v for e in part.joint.program.eqns if e.primitive.name == "custom_jvp_call" for v in e.outvars)
    assert result in part.forward.keep


def test_explain_says_what_it_could_keep() -> None:
    program = vp.BinaryTreeLSTM(8, 8)
    text = cavs.explain(program.vertex_function(), program.init(jax.random.key(0)), jax.ShapeDtypeStruct((8,), jnp.float32))
    assert "it can keep less, if products run again in the backward: 96 B for 256 FLOPs" in text


@pytest.mark.parametrize(("name", "batch"), [case for case in IN_FORESTS if case[0] in ("BinaryTreeLSTM", "three kinds")][:4])
def test_gradients_if_large_inputs_are_gathered_again(name: str, batch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "MANY_BYTES", -1)
    monkeypatch.setattr(segment, "hold_back", mock := Mock(side_effect=segment.hold_back))
    graphs, schedule = BATCHES[batch], cavs.schedule(BATCHES[batch])

    options = MemoryOptions(names=(("of no value", "keep"),))  # not the function that another test compiled

    def run(params: Any, inputs: Any) -> Any:
        named = functools.partial(run_with_options, options=options)
        return call(named, PROGRAMS[name].function, params, schedule, inputs)

    grads, _ = gradients(run, PROGRAMS[name].params, batch_inputs(name, batch), graphs.num_vertices)
    assert_close(grads, truth(name, batch)[1], 1e-10)
    assert mock.call_count


def test_a_maximum_is_not_compared_with_what_is_computed_again():
    """If the operand of a maximum differed in the last bit when it is computed again, the gradient would go nowhere."""

    def fn(p, v):
        mean = v.gather_all(lambda s: s, reduce="mean")
        m = v.gather_all(lambda s: jnp.sin(3 * s + mean), reduce="max")
        h = jnp.tanh(m @ p["w"] + v.pull())
        v.scatter(h)
        v.push(h)

    F = cavs.VertexFunction(fn, state=(4,))
    plan = plan_of(F, {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}, jax.ShapeDtypeStruct((4,), jnp.float32))
    joint = plan.keeping(KeepOptions(masks=True)).inner[None].joint
    made = {v: e.primitive.name for e in joint.program.eqns for v in e.outvars}
    assert sorted(made[v] for v in joint.forward.keep) == ["eq", "reduce_children_max"]
