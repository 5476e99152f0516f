"""Options change how, never what: windows of lazy batching, the serial policy, exact sizes; and cavs.explain(F) says how."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs.kernels import native_unavailable
from tests.odd_graphs import chain, joined, random_binary_tree
from tests.schedule_checks import check
from tests.truth import assert_close, loss

TREES = joined([random_binary_tree(leaves, seed) for seed, leaves in enumerate([25] * 24)])
PROGRAMS = {
    "LSTM": (vp.LSTM(4, 3, jnp.float64), joined([chain(300), chain(7), chain(120), chain(1)])),
    "BinaryTreeLSTM": (vp.BinaryTreeLSTM(4, 3, leaf_inputs_only=False, dtype=jnp.float64), TREES),
    "ChildSumTreeLSTM": (vp.ChildSumTreeLSTM(4, 3, dtype=jnp.float64), TREES),
    "RvNN": (vp.RvNN(4, 3, jnp.float64), vp.RvNN.add_kinds(TREES)),
}


def gradients(name: str, sched: cavs.Schedule) -> Any:
    program, graphs = PROGRAMS[name]
    inputs = np.random.default_rng(1).normal(size=(graphs.num_vertices, 3))

    def f(params: Any, inputs: Any) -> Any:
        return loss(cavs.run(program.vertex_function(), params, sched, inputs), graphs.num_vertices)

    return jax.value_and_grad(f, (0, 1))(program.init(jax.random.key(0)), inputs)


@pytest.mark.parametrize("name", ["ChildSumTreeLSTM", "RvNN"])
def test_windows_of_lazy_batching_change_no_gradient(name: str) -> None:
    whole, windowed = cavs.schedule(PROGRAMS[name][1]), cavs.schedule(PROGRAMS[name][1], window=256)
    assert whole.shape.windows[0] == 1 and windowed.shape.windows[0] > 1 and windowed.num_windows > 1
    assert_close(gradients(name, windowed), gradients(name, whole), 1e-10)


def test_no_task_is_wider_than_a_window() -> None:
    graphs, program = cavs.from_lengths([16] * 600), vp.ElmanRNN(1, 1, dtype=jnp.float64)  # 9,000 inner vertices
    inputs, params = np.random.default_rng(1).normal(size=(graphs.num_vertices, 1)), program.init(jax.random.key(0))

    def by_position(params: Any) -> jax.Array:
        step = lambda h, x: (jnp.tanh(h @ params["u"] + x @ params["w"] + params["b"]),) * 2  # noqa: E731
        h = jax.lax.scan(step, jnp.zeros((600, 1)), inputs.reshape(600, 16, 1).swapaxes(0, 1))[1]
        return loss(h.swapaxes(0, 1).reshape(-1, 1), graphs.num_vertices)

    expected = jax.grad(by_position)(params)
    for window, gpu in ((256, False), (1500, True)):
        sched = cavs.schedule(graphs, window=window, scripts=gpu)
        check(graphs, sched)
        assert sched.shape.windows[0] > 1 and 2 * max(width for width, _ in sched.shape.classes) <= window
        f = lambda params, sched=sched: loss(  # noqa: E731
            cavs.run(program.vertex_function(), params, sched, sched.pad(inputs), engine="scan"), graphs.num_vertices
        )
        assert_close(jax.jit(jax.grad(f))(params), expected, 1e-10)


@pytest.mark.parametrize("options", [{"policy": "serial"}, {"exact": True}])
def test_policies_change_no_result(options: dict[str, Any]) -> None:
    name = "BinaryTreeLSTM"
    assert_close(gradients(name, cavs.schedule(TREES, **options)), gradients(name, cavs.schedule(TREES)), 1e-10)


def indented(found: cavs.Schedule) -> list[str]:
    return [f"  {line}" for line in found.explain().splitlines()]


def test_explain_says_how_f_is_split() -> None:
    program = vp.BinaryTreeLSTM(8, 4)
    text = cavs.explain(program.vertex_function(), program.init(jax.random.key(0)), jax.ShapeDtypeStruct((4,), jnp.float32))
    assert "2 products share their weight" in text
    assert "eager       0 equations,       0 FLOPs" in text  # inner vertices of constituency trees read no word
    assert f"{2 * 5 * 8 * 8} FLOPs in products a vertex (between gather" in text
    found = cavs.schedule(TREES)
    with_rows = cavs.explain(
        program.vertex_function(), program.init(jax.random.key(0)), jax.ShapeDtypeStruct((4,), jnp.float32), sched=found
    )
    lines = [text, "Rows of this schedule on engine scan, computed for vertices:", *indented(found)]
    count, inner = int(found.leaf_count.sum()), int(found.inner_count.sum())
    if not native_unavailable():  # it computes no padding
        lines += [
            "Rows of this schedule on engine native, computed for vertices:",
            f"  leaves: {count} of {count} rows (0.0 % padding)",
            f"  vertices with children, in the levels and for the gradients of parameters: {inner} of {inner} rows "
            "(0.0 % padding)",
        ]
    assert with_rows == "\n".join(lines)
    with pytest.raises(ValueError, match="has not run yet"):
        cavs.explain(cavs.VertexFunction(lambda params, v: None, state=(1,)))
