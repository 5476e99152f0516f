"""States that lazy gradients read in 16 bits: which, and that gradients stay as exact; and gradients that wait for others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs._engines.persistent import engine as persistent
from cavs._engines.persistent.lower import recurrence_of
from tests.odd_graphs import chain, joined, random_binary_tree
from tests.persistent_programs import CASES, INTERPRETED, INTERPRETER, TREES, E, assert_near, inputs_of, plan_of, values
from tests.random_halved import HIDDEN, Cell, check, spied_copies
from tests.slow import few

HALVED = {"BinaryTreeLSTM": [1], "NaryTreeLSTM": [1], "LSTM": [1]}  # the leaf h; c is read by equations, too


def halved(F: Any, params: Any, x: Any) -> list[int]:
    plan = plan_of(F, params, x)
    return recurrence_of(plan, None, True).halved


@pytest.mark.parametrize("name", [name for name in CASES if name != "EncoderDecoder"])
def test_which_states(name: str) -> None:
    make, graphs = CASES[name]
    assert halved(*make(HIDDEN), inputs_of(name, graphs, HIDDEN)) == HALVED.get(name, [])
    with jax.default_matmul_precision("highest"):
        assert halved(*make(HIDDEN), inputs_of(name, graphs, HIDDEN)) == []


def cell(product: Any) -> Any:
    """A Tree-LSTM without gates but for the output: its backward reads c, and h for nothing but gradients of parameters."""

    def fn(p: Any, v: cavs.Vertex) -> None:
        a, b = v.gather(0), v.gather(1)
        c = jnp.tanh(product(p, a["h"], b["h"]) + v.pull() @ p["x"]) + a["c"] + b["c"]
        h = jax.nn.sigmoid((a["h"] + b["h"]) @ p["o"]) * jnp.tanh(c)
        v.scatter({"c": c, "h": h})
        v.push(h)

    return cavs.VertexFunction(fn, state={"c": (HIDDEN,), "h": (HIDDEN,)}, arity=2)


CELLS = {
    "sum": (lambda p, a, b: (a + b) @ p["u"], [1]),
    "both": (lambda p, a, b: jnp.concatenate([a, b]) @ p["two"], [1]),
    "one of them": (lambda p, a, b: a @ p["u"] - b @ p["o"], [1]),
    "a parameter of elements": (lambda p, a, b: (a + b) @ p["u"] + a * p["e"], []),
    "a function before the product": (lambda p, a, b: jnp.sin(a) @ p["u"], []),
    "a difference": (lambda p, a, b: (a - b) @ p["u"], []),
}


def given() -> tuple[dict[str, Any], Any]:
    rng, h = np.random.default_rng(2), HIDDEN
    shapes = {"x": (E, h), "u": (h, h), "o": (h, h), "two": (2 * h, h), "e": (h,)}
    params = {k: (rng.standard_normal(s) / s[0] ** 0.5).astype(np.float32) for k, s in shapes.items()}
    return params, inputs_of("BinaryTreeLSTM", TREES)


@pytest.mark.parametrize("name", CELLS)
def test_what_reads_a_state_exactly_needs_it_in_float32(name: str) -> None:
    product, states = CELLS[name]
    assert halved(cell(product), *given()) == states


@INTERPRETER
@pytest.mark.parametrize("name", few(["BinaryTreeLSTM", "both", "a difference"], 1))
def test_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exact as products in float16 are; the same if gradients at the leaves wait for the others, as those of many do."""

    def make() -> tuple[Any, Any]:
        return CASES[name][0](HIDDEN) if name in CASES else (cell(CELLS[name][0]), given()[0])

    F, params = make()
    graphs = CASES[name][1] if name in CASES else TREES
    x = inputs_of(name, graphs, HIDDEN)
    monkeypatch.setattr(persistent, "COPY_BYTES", 0)
    got = values(F, params, graphs, x, INTERPRETED)
    with jax.default_matmul_precision("highest"):
        assert_near(got, values(F, params, graphs, x, "scan"), 2e-3)
    monkeypatch.setattr(persistent, "MANY_BYTES", 0)
    late = values(make()[0], params, graphs, x, INTERPRETED)
    for a, b in zip(jax.tree.leaves(late), jax.tree.leaves(got), strict=True):
        assert np.array_equal(a, b)


def test_random_cells_have_states_in_16_bits() -> None:
    def of(cell: Cell) -> list[int]:
        with jax.default_matmul_precision(cell.precision):
            return halved(cell.function(), *cell.given())

    counts = [len(of(Cell(seed))) for seed in range(10)]
    assert sum(n > 0 for n in counts) >= 4 and max(counts) == 2


@INTERPRETER
@pytest.mark.parametrize("seed", [3])
@pytest.mark.slow
def test_random_cells(seed: int) -> None:
    """Longer: `python -m tests.random_halved`."""
    cell = Cell(seed)
    with jax.default_matmul_precision(cell.precision):
        wanted = halved(cell.function(), *cell.given())
    assert wanted and sorted(check(cell)) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["BinaryTreeLSTM", "LSTM"])
def test_a_large_batch_on_the_card(name: str) -> None:
    """Copies as large as they must be for lazy gradients to read them."""
    hidden = 512
    sizes = np.random.default_rng(3).integers(10, 61, 512).tolist()
    graphs = joined([chain(n) if name == "LSTM" else random_binary_tree(n, seed=g) for g, n in enumerate(sizes)])
    F, params = CASES[name][0](hidden)
    x = inputs_of(name, graphs, hidden)
    with spied_copies() as read:
        got = values(F, params, graphs, x, "persistent")
    assert read == HALVED[name]
    with jax.default_matmul_precision("highest"):
        assert_near(got, values(F, params, graphs, x, "scan"), 2e-3)
