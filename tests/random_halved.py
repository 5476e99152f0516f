"""Compares random cells on engines persistent and scan: `python -m tests.random_halved`.

Lazy gradients on engine persistent read some states in 16 bits, but the functions of `tests.random_functions` are too narrow
for that. Here products, sums and equations read the states of two children, of which only some may be read in 16 bits.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs._engines.persistent import engine as persistent
from tests.odd_graphs import chain, joined, random_binary_tree, random_dag
from tests.persistent_programs import INTERPRETED, E, assert_near, values

HIDDEN = 32  # float16 needs sums over multiples of 32
PRECISIONS = {None: 3e-3, "BF16_BF16_F32": 3e-2}  # and the tolerance of each
# `a` and `b` are the children's states h or g. Products read some of them as they are, others in sums, and some in equations.
TERMS = (
    "a @ p['u']",
    "b @ p['o']",
    "(a + b) @ p['u']",
    "(a + 0 * b) @ p['o']",
    "(a - b) @ p['o']",
    "jnp.concatenate([a, b]) @ p['two']",
    "jnp.concatenate([b, a + b]) @ p['two']",
    "jnp.tanh(a) @ p['u']",
    "a * p['e']",
    "0.5 * b",
    "jax.nn.sigmoid((a + b) @ p['o']) * jnp.tanh(b @ p['u'])",
)
READ_BY_PRODUCTS = (0, 1, 2, 5, 6, 10)
STATES = (
    "jnp.tanh(c)",
    "jax.nn.sigmoid((a + b) @ p['o']) * jnp.tanh(c)",
    "jnp.sin(c) * jax.nn.sigmoid(a @ p['u'])",
    "0.3 * c",  # not bounded: a product may read it in TF32 alone
)
GRAPHS = {
    "trees": joined([random_binary_tree(n, seed=n) for n in (9, 1, 4, 2)]),
    "chains": joined([chain(n) for n in (7, 1, 3)]),
    "DAGs": joined([random_dag(9, (1, 2), seed=4), random_dag(5, (2,), seed=5)]),
}


class Cell:
    """The cell of a seed. Its text describes it."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.seed, self.graphs = seed, str(rng.choice(list(GRAPHS)))
        self.precision = list(PRECISIONS)[int(rng.random() < 0.25)]
        terms = READ_BY_PRODUCTS if rng.random() < 0.6 else range(len(TERMS))
        self.terms = [TERMS[i] for i in rng.choice(terms, rng.integers(1, 4), replace=False)]
        self.children = ["h", "g"] if rng.random() < 0.4 else ["h", "h"]  # the state that is `a`, and the one that is `b`
        self.states = dict(zip("hg", rng.choice(STATES, 2, p=(0.3, 0.3, 0.3, 0.1)).tolist(), strict=True))
        self.sum = str(rng.choice(["v.gather(0)['c'] + v.gather(1)['c']", "0.5 * v.gather(0)['c']"]))
        self.push = str(rng.choice(["h", "h + 0.1 * c", "jnp.sin(h)"]))

    def __str__(self) -> str:
        a, b = (f"v.gather({k})['{name}']" for k, name in enumerate(self.children))
        return (
            f"seed {self.seed}: {self.graphs}, {self.precision}; a = {a}; b = {b}; "
            f"c = jnp.tanh({' + '.join(self.terms)} + v.pull() @ p['x']) + {self.sum}; "
            f"h = {self.states['h']}; g = {self.states['g']}; push {self.push}"
        )

    def function(self) -> cavs.VertexFunction:
        both = len(set(self.children)) > 1

        def fn(p: Any, v: cavs.Vertex) -> None:
            names = {"jax": jax, "jnp": jnp, "p": p, "v": v}
            names |= {name: v.gather(k)[state] for k, (name, state) in enumerate(zip("ab", self.children, strict=True))}
            c = jnp.tanh(sum(eval(term, names) for term in self.terms) + v.pull() @ p["x"]) + eval(self.sum, names)
            states = {name: eval(self.states[name], names | {"c": c}) for name in ("hg" if both else "h")}
            v.scatter({"c": c, **states})
            v.push(eval(self.push, names | {"c": c, **states}))

        return cavs.VertexFunction(fn, state=dict.fromkeys(["c", *self.children], (HIDDEN,)), arity=2)

    def given(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The parameters, and the rows that vertices pull."""
        rng = np.random.default_rng([self.seed, 1])
        shapes = {"x": (E, HIDDEN), "u": (HIDDEN, HIDDEN), "o": (HIDDEN, HIDDEN), "two": (2 * HIDDEN, HIDDEN), "e": (HIDDEN,)}
        params = {k: (rng.standard_normal(s) / s[0] ** 0.5).astype(np.float32) for k, s in shapes.items()}
        return params, rng.standard_normal((GRAPHS[self.graphs].num_vertices, E)).astype(np.float32)


@contextmanager
def spied_copies() -> Iterator[list[int]]:
    """A context whose list gets the states that lazy gradients read in 16 bits."""
    read: list[int] = []
    copies = persistent._copies

    def spied(*args: Any) -> Any:
        found, cuts = copies(*args)
        read.extend(found)
        return found, cuts

    with mock.patch.object(persistent, "_copies", spied):
        yield read


def check(cell: Cell) -> list[int]:
    """Raises AssertionError if pushes or gradients differ from engine scan's. Returns the states that were read in 16 bits."""
    graphs, (params, x) = GRAPHS[cell.graphs], cell.given()
    small = mock.patch.object(persistent, "COPY_BYTES", 0)
    with small, spied_copies() as read, jax.default_matmul_precision(cell.precision):
        got = values(cell.function(), params, graphs, x, INTERPRETED)
    with jax.default_matmul_precision("highest"):
        want = values(cell.function(), params, graphs, x, "scan")
    try:
        assert_near(got, want, PRECISIONS[cell.precision])
    except AssertionError as error:
        raise AssertionError(f"{cell}; states {read} in 16 bits: {error}") from None
    return read


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Returns the arguments of a script that checks random cells."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    return parser


def report(args: argparse.Namespace, check: Callable[[int], str]) -> int:
    """Checks the cell of each seed, and prints what `check` returned how often. Returns the exit status."""
    started, counts = time.time(), Counter[str]()
    for seed in range(args.first_seed, args.first_seed + args.count):
        if time.time() - started > args.seconds:
            break
        try:
            counts[f"equal, {check(seed)}"] += 1
        except AssertionError as error:
            counts["wrong"] += 1
            print(error, flush=True)
        jax.clear_caches()
    print(f"{counts.total()} cells in {time.time() - started:.0f} s: {dict(counts)}")
    return 1 if counts["wrong"] else 0


def main() -> int:
    jax.config.update("jax_enable_x64", True)
    return report(arguments(__doc__).parse_args(), lambda seed: f"{len(check(Cell(seed)))} states in 16 bits")


if __name__ == "__main__":
    sys.exit(main())
