"""Random states of vertices, and leaves of them that come from the children unchanged, swapped, delayed, or added to."""

import math
from typing import Any

import numpy as np

from tests.random_maker import ANY, PERSISTENT, Maker, NoFit
from tests.random_programs import STORED, Var

SUMMED = 6.0  # bounds the usual values of a running sum
SHAPES = [lambda n, m: (n,), lambda n, m: (m,), lambda n, m: (), lambda n, m: (n, m), lambda n, m: (0,), lambda n, m: (2,)]


def random_states(rng: np.random.Generator, widths: list[int], level: int) -> dict[str, Any]:
    """Draws the leaves of a state: name -> (shape, kind, lower bound, upper bound)."""

    def choose(options: list[Any], weights: list[float]) -> Any:
        return options[int(rng.choice(len(options), p=np.array(weights) / sum(weights)))]

    n, m = widths[0], widths[-1]
    alike = rng.random() < 0.6  # so that leaves can be copied into each other
    out: dict[str, Any] = {}
    for i in range(choose([1, 2, 3, 4], [4, 4, 2, 1])):
        shape, kind = (n,), "f"
        if i and not alike and level == PERSISTENT:
            shape = (n,) if rng.random() < 0.7 else ()
        elif i and not alike:
            shape, kind = choose(SHAPES, [4, 3, 2, 1.5, 0.7, 1])(n, m), choose(["f", "i", "b"], [6, 2, 1.5])
            if level == ANY and rng.random() < 0.15:
                kind = choose([*STORED], [3, 0.5, 0.5, 1, 1, 1])
        between = (-1.0, 1.0) if kind == "f" else (0, 4) if kind == "i" else STORED.get(kind, (0, 1))[:2]
        if kind == "f" and (draw := rng.random()) < 0.4:
            between = (0.5, 1.5) if draw < 0.2 else (-SUMMED, SUMMED)
        out[f"s{i}"] = (shape, kind, *between)
    return out


def carried(g: Maker, name: str, scattered: list[Var]) -> Var:
    """Returns a value for a leaf of the state that children's leaves reach without a product or a nonlinear function.

    Raises:
        NoFit: If the leaf has another range than those of the children, or this kind of vertices gathers nothing.
    """
    shape, kind, lo, hi = g.states[name]
    if lo > 0:
        return _kept(g, name)
    if hi == SUMMED and g.chance(0.7):
        old = _of_children(g, name)
        made = [v for v in scattered if v.shape == shape and v.kind == "f" and max(abs(v.lo), abs(v.hi)) <= 1.5]
        new = g.choose(made) if made and g.chance(0.7) else g.emit(shape, "jnp.tanh({0})", [g.want(shape)], -1, 1)
        g.read.add(new.name)
        form = g.choose(["{0} + {1}", "{1} + {0}", "{0} - {1}", "{0} + 0.5 * {1}"])
        return g.emit(shape, form, [old, new], -SUMMED, SUMMED)
    if g.chance(0.2):
        return _kept(g, name)
    others = [n for n, (s, k, a, b) in g.states.items() if (s, k) == (shape, kind) and lo <= min(a, 0) and b <= hi]
    old = _of_children(g, g.choose(others))
    if kind == "f" and g.chance(0.2):
        gate = g.emit(shape, "jax.nn.sigmoid({0})", [g.want(shape)], 0, 1)
        new = g.emit(shape, "jnp.tanh({0})", [g.want(shape)], -1, 1)
        return g.emit(shape, "{0} * {1} + (1 - {0}) * {2}", [gate, old, new], old.lo - 1, old.hi + 1)
    return old


def _kept(g: Maker, name: str) -> Var:
    """The leaf of the first child, unchanged; leaves of the graph have a value of their own."""
    shape, kind, lo, hi = g.states[name]
    if not g.arity or kind not in "fib":
        raise NoFit
    if kind == "f":
        own = g.emit(shape, "jnp.tanh({0})", [g.want(shape)], -1, 1)
        own = g.emit(shape, "1 + 0.5 * {0}", [own], 0.5, 1.5) if lo > 0 else own
    else:
        own = g.want(shape, kind)
        own = g.emit(shape, "{0} & 3", [own], 0, 3, "i") if kind == "i" else own
    old = _of_children(g, name, first=True)
    return g.emit(shape, "({0} if v.is_leaf() else {1})", [own, old], lo, hi, kind)


def _of_children(g: Maker, name: str, first: bool = False) -> Var:
    """A leaf of one child's state, or its mean or maximum over all children."""
    shape, kind, lo, hi = g.states[name]
    text = "{0}" if g.bare_state else f'{{0}}["{name}"]'
    if g.arity and (first or not g.many or kind != "f" or g.chance(0.7)):
        of = g.emit((), f"v.gather({0 if first else int(g.rng.integers(g.arity))})", [], kind="t", gathered=True)
        return g.emit(shape, text, [of], min(lo, 0), max(hi, 0), kind, gathered=True)
    if not g.many or kind != "f" or (how := g.choose(["mean", "max"])) == "max" and not math.prod(shape):
        raise NoFit
    child = g.fresh("s", (), "t", gathered=True)
    with g.inside([child], no_leaf=True) as block:
        x = g.emit(shape, text, [child], lo, hi, kind, gathered=True)
        block.results = [x.name]
    args = f'v.gather_all({{f0}}, reduce="{how}")'
    return g.emit(shape, args, [], min(lo, 0), max(hi, 0), blocks=[block], gathered=True)
