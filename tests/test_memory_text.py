"""Dynamic tensors are updated in place: no loop of the compiled gradient copies one.

XLA copies a whole tensor in every iteration where a loop's body reads and writes it and the read is fused into a late
consumer (openxla/xla#45912).
"""

import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from tests.odd_graphs import chain, from_children, joined, random_binary_tree
from tests.slow import few

HIDDEN, INPUTS = 16, 8


def _random_tree(vertices: int, seed: int) -> cavs.Graphs:
    rng = np.random.default_rng(seed)
    children: list[list[int]] = [[] for _ in range(vertices)]
    for v in range(1, vertices):
        children[int(rng.integers(max(0, v - 12), v))].append(v)
    return from_children(children)


CASES = {
    "BinaryTreeLSTM": (vp.BinaryTreeLSTM, joined([random_binary_tree(32, seed) for seed in range(32)])),
    "LSTM": (vp.LSTM, joined([chain(n) for n in range(30, 70)])),
    "ChildSumTreeLSTM": (vp.ChildSumTreeLSTM, joined([_random_tree(50, seed) for seed in range(40)])),
}


def copies_in_loops(hlo: str, rows: int) -> Iterator[str]:
    """Instructions within while bodies that copy an array with an axis of `rows` or more."""
    computations = {}
    for block in re.split(r"\n(?=(?:ENTRY )?%?[\w.\-]+ .*\{\n)", hlo):
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) ", block)
        if head:
            computations[head.group(1)] = block
    called = {
        name: set(re.findall(r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", block))
        for name, block in computations.items()
    }
    inside = [body for block in computations.values() for body in re.findall(r"body=%?([\w.\-]+)", block)]
    assert inside, "no while loop in the compiled text"
    seen: set[str] = set()
    while inside:
        name = inside.pop()
        if name not in seen:
            seen.add(name)
            inside += called.get(name, set())
    for name in sorted(seen):
        for line in computations.get(name, "").splitlines():
            copy = re.search(r"= \(?\w+\[([\d,]+)\]\S* copy(?:-start)?\(", line)
            if copy and max(map(int, copy.group(1).split(","))) >= rows:
                yield f"{name}: {line.strip()}"


@pytest.mark.parametrize(("name", "what"), few([("BinaryTreeLSTM", "forward"), *((name, "backward") for name in CASES)], 2))
def test_no_loop_copies_a_dynamic_tensor(name: str, what: str) -> None:
    make, graphs = CASES[name]
    program, schedule = make(HIDDEN, INPUTS), cavs.schedule(graphs)
    assert 1900 <= graphs.num_vertices <= 2200

    def loss(params: dict[str, jax.Array], inputs: jax.Array, schedule: cavs.Schedule) -> jax.Array:
        return (cavs.run(program.vertex_function(), params, schedule, inputs, engine="scan") ** 2).sum()

    fn = loss if what == "forward" else jax.grad(loss, argnums=(0, 1))
    inputs = jnp.zeros((schedule.shape.vertices, INPUTS), jnp.float32)
    hlo = jax.jit(fn).lower(program.init(jax.random.key(0)), inputs, schedule).compile().as_text()
    assert not list(copies_in_loops(hlo, schedule.shape.inner[0]))


LOOP = """
%fused (p: f32[2000,3]) -> f32[2000,3] {
  %p = f32[2000,3]{1,0} parameter(0)
  ROOT %copy.1 = f32[2000,3]{1,0} copy(%p)
}

%body (s: (s32[], f32[2000,3])) -> (s32[], f32[2000,3]) {
  %small = f32[16,3]{1,0} copy(%rows)
  %new = f32[2000,3]{1,0} fusion(%old), kind=kLoop, calls=%fused
}

ENTRY %main (x: f32[2000,3]) -> f32[2000,3] {
  %copy.2 = f32[2000,3]{1,0} copy(%x)
  %while.1 = (s32[], f32[2000,3]) while(%init), condition=%cond, body=%body
}
"""


def test_the_search_finds_copies_in_loops_alone() -> None:
    assert list(copies_in_loops(LOOP, 1000)) == ["fused: ROOT %copy.1 = f32[2000,3]{1,0} copy(%p)"]
