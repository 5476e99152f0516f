"""`cavs.explain(F)` says how F is split."""

import jax
import jax.numpy as jnp
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs.kernels import native_unavailable
from tests.odd_graphs import joined, random_binary_tree

TREES = joined([random_binary_tree(leaves, seed) for seed, leaves in enumerate([25] * 24)])


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
