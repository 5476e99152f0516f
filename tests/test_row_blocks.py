"""Vertices that read far more than they scatter run a block at a time: leaves, and lazy gradients."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs._engines.scan import reverse as scan_reverse
from cavs._run import forward
from cavs._stages import blocks
from tests.odd_graphs import joined, random_binary_tree
from tests.persistent_programs import CASES, INTERPRETER, assert_near, inputs_of, values
from tests.programs import PROGRAMS
from tests.random_cases import random_case, script
from tests.random_check import INTERPRET, check
from tests.slow import few
from tests.truth import assert_close, batch_inputs, call, gradients, sched, truth

NAMES = ["EncoderDecoder", "lazy push", "three kinds", "matrix states"]


@contextlib.contextmanager
def in_blocks_of(size: int) -> Iterator[set[str]]:
    """A context in which at most `size` rows run at a time. Yields what did: "leaves", "lazy"."""
    used: set[str] = set()

    def leaf_block(role: Any, count: int) -> int:
        used.update(["leaves"] if count > size else [])
        return size if count > size else 0

    def lazy_block(part: Any, count: int) -> int:
        used.update(["lazy"] if count > size and not part.gathers_all else [])
        return size if count > size and not part.gathers_all else 0

    with mock.patch.object(forward, "leaf_block", leaf_block), mock.patch.object(scan_reverse, "lazy_block", lazy_block):
        yield used


@pytest.mark.parametrize("name", few(NAMES, 1))
def test_blocks_equal_the_loop_over_vertices(name: str) -> None:
    program = PROGRAMS[name]
    batch = program.batches[0]
    schedule, function = sched(batch), program.function

    def run(params: Any, inputs: Any) -> Any:
        return call(lambda *args, **kwargs: cavs.run(*args, engine="scan", **kwargs), function, params, schedule, inputs)

    def both(params: Any, inputs: Any) -> Any:
        grads, pushes = gradients(run, params, inputs, int(schedule.num_vertices))
        return pushes, grads

    with (
        mock.patch.dict(vars(function).setdefault("_memo", {}), clear=True),
        in_blocks_of(3) as used,
    ):  # a cached plan is compiled without blocks
        got = jax.jit(both)(program.params, batch_inputs(name, batch))
        alone = run(program.params, batch_inputs(name, batch))
    assert used == ({"leaves"} if name == "EncoderDecoder" else {"leaves", "lazy"})  # the edges of a block are not known
    assert_close(got, truth(name, batch), 1e-10 * program.tolerance)
    assert_close(alone, truth(name, batch)[0], 1e-10 * program.tolerance)


def test_gradients_of_many_blocks_add_up_in_32_bits() -> None:
    """bfloat16 cannot count to 257."""

    def fn(params: Any, v: Any) -> None:
        v.scatter(v.pull() * params)
        v.push(v.pull() * params)

    F, schedule, x = cavs.VertexFunction(fn, state=()), cavs.schedule(cavs.from_lengths([1] * 600)), jnp.ones(600, jnp.bfloat16)
    with in_blocks_of(1) as used:
        got = jax.grad(lambda p: cavs.run(F, p, schedule, x, engine="scan").astype(jnp.float32).sum())(jnp.bfloat16(1))
    assert "leaves" in used and got == 600


@pytest.mark.parametrize(
    ("engine", "seed"), few([*(("scan", seed) for seed in (0, 2)), pytest.param(INTERPRET, 0, marks=INTERPRETER)], 1)
)
def test_random_functions_in_blocks(engine: str, seed: int) -> None:
    case = random_case(seed, engine, float32=engine != "scan")
    found = check(case, setting=lambda: in_blocks_of(2))
    assert not found.failed, f"{found.what}\n{found.text}\n{script(case)}"


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["scan", "persistent"])
@pytest.mark.parametrize("name", ["BinaryTreeLSTM", "TreeFC", "GRU"])
def test_blocks_on_the_card(name: str, engine: str) -> None:
    make, graphs = CASES[name]
    F, params = make(64)
    x = inputs_of(name, graphs, 64)
    with jax.default_matmul_precision("highest"):
        want = values(F, params, graphs, x, engine)
        with mock.patch.dict(vars(F).setdefault("_memo", {}), clear=True), in_blocks_of(2) as used:
            got = values(F, params, graphs, x, engine)
    assert "leaves" in used and ("lazy" in used) == (engine == "scan")
    assert_near(got, want, 1e-5)


def test_memory_of_vertices_that_pull_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention to a matrix per vertex takes the memory of a few blocks, and not that of a copy of all matrices."""
    hidden, keys = 8, 64
    monkeypatch.setattr(blocks, "MANY_BYTES", 1 << 16)
    schedule = cavs.schedule(joined([random_binary_tree(64, seed=n) for n in range(16)]))

    def attention(p: Any, v: cavs.Vertex) -> None:
        matrix, below = v.pull(), v.gather(0) + v.gather(1)
        h = jnp.tanh(jax.nn.softmax(jnp.tanh(matrix + below @ p) @ p[0]) @ matrix)
        v.scatter(h)
        v.push(h)

    def loss(p: jax.Array, x: jax.Array) -> jax.Array:
        function = cavs.VertexFunction(attention, state=(hidden,), arity=2)
        return jnp.sum(cavs.run(function, p, schedule, x, engine="scan") ** 2)

    def measured() -> tuple[Any, int]:
        step = jax.jit(jax.grad(loss)).lower(p, x).compile()
        analysis = step.memory_analysis()
        assert analysis is not None
        return step(p, x), analysis.temp_size_in_bytes

    p = jnp.asarray(np.random.default_rng(0).normal(size=(hidden, hidden)) / 4, jnp.float32)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(schedule.shape.vertices, keys, hidden)), jnp.float32)
    got, memory = measured()
    with in_blocks_of(1 << 30):
        want, whole = measured()
    assert_close(got, want, 1e-5)
    copy = sum(schedule.shape.leaves) * keys * hidden * 4
    assert whole > copy > memory and whole > 4 * memory, (whole, copy, memory)
