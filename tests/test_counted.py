"""Counts in messages have nouns that fit them."""

import jax
import jax.numpy as jnp

import cavs
from cavs._graphs.counted import counted
from tests.persistent_programs import CASES, E


def test_counts_have_a_singular_and_a_plural() -> None:
    assert [counted(n, "vertex") for n in (0, 1, 2)] == ["0 vertices", "1 vertex", "2 vertices"]
    assert [counted(n, "batch") for n in ("1", "1,000")] == ["1 batch", "1,000 batches"]
    assert [counted(2, noun) for noun in ("child", "process", "graph", "inner vertex")] == [
        *("2 children", "2 processes", "2 graphs", "2 inner vertices")
    ]


def test_descriptions_of_one_thing_are_singular() -> None:
    one = cavs.from_lengths([1])
    assert repr(one) == "Graphs(1 graph, 1 vertex, 0 edges, 1 level)"
    assert repr(cavs.schedule(one)).startswith("Schedule(1 graph, 1 vertex, 1 level of widths [1], 0 tasks; ")
    text = repr(cavs.data.Loader(one, 1, steps=1))
    assert text.startswith("Loader of 1 graph, ") and "\n  1 step per dispatch, " in text and "; 1 device\n" in text
    F, params = CASES["unread state"][0]()
    text = cavs.explain(F, params, jax.ShapeDtypeStruct((E,), jnp.float32))
    assert "gathers 1 child by number" in text and " 1 equation with parameters" in text and ": 1 phase and " in text
