"""What users expect of a library: splits of a data set, and short texts of functions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_split_deals_each_graph_to_one_part(seed: int | None) -> None:
    graphs = cavs.from_lengths(np.arange(1, 102), label=np.arange(101 * 51), graph_label=np.arange(101.0))
    parts = graphs.split([0.8, 0.1, 0.1], seed)
    numbers = [part.graph_label.astype(int).tolist() for part in parts if part.graph_label is not None]
    assert sorted(n for some in numbers for n in some) == [*range(101)]
    assert [len(part) for part in parts] == [81, 10, 10]
    assert ([n for some in numbers for n in some] == [*range(101)]) == (seed is None)
    for part, some in zip(parts, numbers, strict=True):
        assert part.equals(graphs[np.array(some)])
    assert all(a.equals(b) for a, b in zip(parts, graphs.split((0.8, 0.1, 0.1), seed), strict=True))


def test_wrong_fractions_are_refused() -> None:
    graphs = cavs.from_lengths([1, 2, 3])
    for wrong in ([0.8, 0.1], [80, 20], [1.5, -0.5], [], [np.nan, 1]):
        with pytest.raises(ValueError, match=r"Graphs\.split: fractions: got .*; expected positive numbers that add up to 1"):
            graphs.split(wrong)
    with pytest.raises(ValueError, match=r"which makes parts of \[3, 0\] graphs; expected at least one graph in each"):
        graphs.split([0.9, 0.1])


def test_a_vertex_function_has_a_short_text() -> None:
    def cell(params, v):
        raise AssertionError

    assert repr(cavs.VertexFunction(cell, state={"c": (4,), "h": ()}, arity=2)) == (
        "VertexFunction(cell, state={'c': (4,), 'h': ()}, arity=2)"
    )
    several = cavs.VertexFunction({"and": cell, "or": print}, state=jax.ShapeDtypeStruct((3, 2), jnp.bfloat16))
    assert repr(several) == "VertexFunction({'and': cell, 'or': print}, state=bfloat16[3, 2], arity=0)"
    program = cavs.vertex_programs.BinaryTreeLSTM(hidden=4, inputs=3)
    assert repr(program.vertex_function()) == "VertexFunction(BinaryTreeLSTM, state={'c': (4,), 'h': (4,)}, arity=2)"
