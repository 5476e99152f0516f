"""Compares random gated cells on engines persistent and scan: `python -m tests.random_gated`.

Forward launches multiply in float16 if F bounds what vertices with children scatter: by functions such as tanh, or as a mixture
z a + (1 - z) b by a sigmoid. If the leaves have no bound, the largest of them scales what products read.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs._engines.persistent import engine, lower
from tests.odd_graphs import chain, joined, random_binary_tree
from tests.persistent_programs import INTERPRETED, values
from tests.random_halved import arguments, report

HIDDEN = 32  # float16 needs sums over multiples of 32
# `a` and `b` are the states of the children; in chains `b` is made of the input.
OF_CHAINS = ("a @ p['u']", "a @ p['o']", "a @ p['u'] + b @ p['o']")
OF_TREES = ("a @ p['u']", "b @ p['o']", "(a + b) @ p['u']", "jnp.concatenate([a, b]) @ p['two']")
BOUNDED = ("jnp.tanh({})", "jnp.sin({})", "jnp.tanh(r * ({}))")
SIDES = ("a", "b", *BOUNDED, "0.5 * a", "jnp.maximum(a, jnp.tanh({}))", "jnp.tanh((r * a) @ p['o'])")
MIXTURES = (
    "z * ({}) + (1 - z) * ({})",
    "(1.0 - z) * ({}) + z * ({})",
    "({}) * z + ({}) * (1 - z)",
    "z * ({}) - (1 - z) * ({})",  # no mixture, but bounded if both sides are
    "(z * r) * ({}) + (1 - z) * ({})",  # not the same fraction
)
OPEN = ("x", "x * p['b']", "x @ p['v']")  # leaves without a bound
LEAVES = ("jnp.tanh(x)", "jnp.tanh(x @ p['v'])", "jax.nn.sigmoid(x) * jnp.tanh(x @ p['v'])", "x")


class Cell:
    """The cell of a seed. Its text describes it."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 2])
        pick = lambda texts: str(rng.choice(texts))  # noqa: E731
        self.seed, self.chains = seed, bool(rng.random() < 0.4)
        products = OF_CHAINS if self.chains else OF_TREES
        sides, leaves = (BOUNDED, OPEN) if rng.random() < 0.4 else (SIDES, LEAVES)
        self.gates = [f"jax.nn.sigmoid({pick(products)} + p['{w}'])" for w in "bc"]
        of_both = [pick(sides).format(f"{pick(products)} + p['c']") for _ in range(2)]
        self.state, self.leaf = pick(MIXTURES).format(*of_both), pick(leaves)
        self.scale, self.weights = float(rng.choice([1e-3, 1, 1, 30])), float(rng.choice([0.5, 1, 2]))
        sizes = [2, *rng.integers(1, 13, rng.integers(0, 5)).tolist()]
        some = [chain(3 * n) if self.chains else random_binary_tree(n, seed=seed + n) for n in sizes]
        self.graphs = joined(some)

    def __str__(self) -> str:
        b = "jnp.tanh(v.pull())" if self.chains else "v.gather(1)"
        return (
            f"seed {self.seed}: {len(self.graphs)} graphs, inputs times {self.scale}, weights times {self.weights}; "
            f"leaves: {self.leaf}; a = v.gather(0); b = {b}; r, z = {', '.join(self.gates)}; state: {self.state}"
        )

    def function(self) -> cavs.VertexFunction:
        def fn(p: Any, v: cavs.Vertex) -> None:
            names: dict[str, Any] = {"jax": jax, "jnp": jnp, "p": p}
            if v.is_leaf():
                h = eval(self.leaf, names | {"x": v.pull()})
            else:
                names |= {"a": v.gather(0), "b": jnp.tanh(v.pull()) if self.chains else v.gather(1)}
                for name, gate in zip("rz", self.gates, strict=True):
                    names[name] = eval(gate, names)
                h = eval(self.state, names)
            v.scatter(h)
            v.push(h)

        return cavs.VertexFunction(fn, state=(HIDDEN,), arity=1 if self.chains else 2)

    def given(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The parameters, and the rows that vertices pull."""
        rng = np.random.default_rng([self.seed, 1])
        shapes = dict.fromkeys("uov", (HIDDEN, HIDDEN)) | {"two": (2 * HIDDEN, HIDDEN), "b": (HIDDEN,), "c": (HIDDEN,)}
        params = {k: self.weights * rng.standard_normal(s) / s[0] ** 0.5 for k, s in shapes.items()}
        x = self.scale * rng.standard_normal((self.graphs.num_vertices, HIDDEN))
        return {k: w.astype(np.float32) for k, w in params.items()}, x.astype(np.float32)


@contextmanager
def long_launches() -> Iterator[list[str]]:
    """A context in which every launch counts as long. Its list gets the precision of each forward."""
    how: list[str] = []
    forward_of = engine.forward_of

    def spied(*args: Any) -> Any:
        made = forward_of(*args)
        how.append(f"{'scaled ' * bool(made.scaled)}{made.precision}")
        return made

    with mock.patch.object(lower, "is_long", lambda *args: True), mock.patch.object(engine, "forward_of", spied):
        yield how


def precision_of(cell: Cell) -> str:
    """Returns the precision of the forward of a cell, without running it."""
    with long_launches() as how, jax.default_matmul_precision("tensorfloat32"):
        jax.eval_shape(lambda *given: values(cell.function(), given[0], cell.graphs, given[1], INTERPRETED), *cell.given())
    return how[0]


def check(cell: Cell, on: Any = INTERPRETED) -> str:
    """Raises AssertionError if pushes or gradients differ from engine scan's more than rounding does, or from a second run.

    Returns how the forward multiplies.
    """
    graphs, (params, x) = cell.graphs, cell.given()
    with long_launches() as how, jax.default_matmul_precision("tensorfloat32"):
        got, again = (values(cell.function(), params, graphs, x, on) for _ in range(2))
    rng, moved = np.random.default_rng(cell.seed), []
    with jax.default_matmul_precision("highest"):
        want = values(cell.function(), params, graphs, x, "scan")
        for _ in range(4):
            given = {k: rounded(w, rng) for k, w in params.items()}, rounded(x, rng)
            moved.append(values(cell.function(), given[0], graphs, given[1], "scan"))
    for a, b, d, *c in zip(*map(jax.tree.leaves, (got, want, again, *moved)), strict=True):
        a, b, *c = (np.asarray(x, np.float64) for x in (a, b, *c))
        size, moves = np.linalg.norm(b), max(np.linalg.norm(x - b) for x in c)
        # 1e-6: where gates have equal sides, a gradient is zero but for rounding.
        off, allowed = np.linalg.norm(a - b), 10 * moves + 2e-3 * size + 1e-6
        assert off <= allowed, f"{cell}; {how}: off by {off:.2e}, of {size:.2e}; allowed {allowed:.2e}"
        assert (a == np.asarray(d)).all(), f"{cell}; {how}: two runs differ"
    return how[0]


def rounded(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Changes float32 numbers at random by as much as rounding to eleven significant bits may, as operands of products are."""
    return (x * (1 + rng.uniform(-1, 1, x.shape) * 2.0**-11)).astype(np.float32)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--on-the-card", action="store_true", help="on a GPU instead of in Pallas' interpreter")
    args = parser.parse_args()
    return report(args, lambda seed: check(Cell(seed), "persistent" if args.on_the_card else INTERPRETED))


if __name__ == "__main__":
    sys.exit(main())
