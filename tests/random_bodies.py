"""A random vertex function: its states and inputs, and a body, or one for each kind."""

import contextlib
import math
from typing import Any

import numpy as np

from tests import random_odd as odd
from tests.random_blocks import gather, gather_all, statement
from tests.random_maker import ANY, PERSISTENT, Maker, NoFit
from tests.random_programs import STORED, Block, Program, Var, cast_from, without_unread
from tests.random_states import SUMMED, carried, random_states

WIDTHS = [(3, 4), (5, 2), (4, 3), (2, 5), (1, 3), (7, 1), (1, 1), (17, 9), (3, 0), (0, 4)]
HOW_OFTEN = [5, 5, 5, 5, 1, 1, 0.5, 1, 0.3, 0.3]


def random_program(rng: np.random.Generator, level: int) -> Program:
    """F: states, inputs, one body or one for each of two or three kinds."""

    def pick(options: list[Any], weights: list[float] | None = None) -> Any:
        p = None if weights is None else np.array(weights) / sum(weights)
        return options[int(rng.choice(len(options), p=p))]

    n, m = pick(WIDTHS, HOW_OFTEN)
    if level == PERSISTENT:
        n = pick([16, 48, 10, 24, 150, 5, 1, 7, 33], [5, 1, 2, 1, 0.3, 0.1, 0.1, 0.1, 0.1])
    widths = [n] if level == PERSISTENT else [n, m]
    inputs: dict[str, Any] = {"x": ((n,), "f", -2.0, 2.0)}
    more = {"y": ((n,), "f", 0.4, 2.0), "z": ((), "f", -1.0, 1.0), "b": ((), "b", -1, 1)}
    if level != PERSISTENT:
        more |= {"m": ((n, m), "f", -1.5, 1.5), "i": ((), "i", 0, 3), "j": ((n,), "i", 0, 4), "u": ((m,), "f", 0.3, 1.2)}
        more |= {"c": ((n,), "b", 0, 1)}
    if level == ANY:
        kind = pick([*STORED])
        more |= {"k": ((), "k", 0, 0), "q": ((n,), kind, *STORED[kind][:2]), "e": ((0,), "f", -1.0, 1.0)}
    for name in more:
        if rng.random() < (0.15 if name in "qe" else 0.35):
            inputs[name] = more[name]
    bare_input = len(inputs) == 1 and rng.random() < 0.5
    arity = int(rng.integers(0, 4))
    states = random_states(rng, widths, level)
    bare_state = len(states) == 1 and rng.random() < 0.6
    edges: dict[str, Any] = {}
    if rng.random() < 0.3:
        edges = {"ea": ((n,), "f", -2.0, 2.0), "eb": ((), "f", 0.4, 2.0)}
        edges |= {} if level == PERSISTENT else {"ei": ((), "i", 0, 3)}
    params: dict[str, Any] = {}
    bodies: dict[str | None, Block] = {}
    kinds = ["a", "b", "c"][: pick([1, 2, 3], [0.93, 0.05, 0.02] if level == PERSISTENT else [0.65, 0.25, 0.1])]
    types: list[Any] = []
    templates: list[str] = []
    coarse = max((STORED[kind][2] for _, kind, *_ in states.values() if kind in STORED), default=0.0)
    for kind in kinds if len(kinds) > 1 else [None]:
        styles = ["both", "all", "positions", "nothing"]
        style = pick(styles, [4, 2, 2, 0.2] if kind is None else [2, 2, 2, 1])
        g = Maker(rng, widths, params, arity if style in ("both", "positions") else 0, level)
        g.states, g.bare_state, g.edges = states, bare_state, edges
        g.many = style in ("both", "all")
        bodies[kind], types, templates = _body(g, inputs, bare_input, types, templates)
        coarse = max(coarse, g.coarse)
    kept = {name: (shape, kind) for name, (shape, kind, *_) in states.items()}
    program = Program(bodies, kept, arity, params, inputs, templates, bare_state, bare_input, edges, coarse)
    return without_unread(program)


def _body(
    g: Maker, inputs: Any, bare_input: bool, types: list[Any], templates: list[str]
) -> tuple[Block, list[Any], list[str]]:
    for name, (shape, kind, lo, hi) in inputs.items():
        cast, plain = cast_from(kind)
        g.emit(shape, ("v.pull()" if bare_input else f'v.pull("{name}")') + cast, [], lo, hi, plain)
    with g.at_level(ANY if g.level == PERSISTENT or g.chance(0.3) else g.level):
        for _ in range(int(g.rng.integers(0, 3))):  # eager statements may be anything
            _without_children(g)
    for _ in range(int(g.rng.integers(1, 3))):
        with contextlib.suppress(NoFit):
            (gather if g.arity and not (g.many and g.chance(0.5)) else gather_all)(g)
    for _ in range(int(g.rng.integers(3, 8))):
        statement(g)
    scattered: list[Var] = []
    for name in g.states:
        scattered.append(_scattered(g, name, scattered))
    eager = g.level == PERSISTENT
    with g.at_level(ANY if eager or g.chance(0.3) else g.level):
        for _ in range(int(g.rng.integers(0, 3))):  # and so may lazy ones
            (_without_children if eager else statement)(g)
    if not types:
        pushed = [_pushed(g, scattered) for _ in range(g.choose([1, 2, 3, 4], [1, 3, 3, 2]))]
        types = [(v.shape, v.kind) for v in pushed]
        if len(pushed) == 1:
            templates = ["{0}"]
        elif g.chance(0.5):
            templates = ["{0}"] * len(pushed)
        else:
            rest = ", ".join(f"{{{i}}}" for i in range(1, len(pushed)))
            templates = [f'{{{{"p": {{0}}, "q": ({rest},)}}}}']
    else:
        pushed = [g.want(shape, kind) for shape, kind in types]
    g.body.results = [v.name for v in (*scattered, *pushed)]
    return g.body, types, templates


def _without_children(g: Maker) -> None:
    many, arity = g.many, g.arity
    g.many, g.arity = False, 0
    statement(g)
    g.many, g.arity = many, arity


def _scattered(g: Maker, name: str, scattered: list[Var]) -> Var:
    """Returns the value of a state leaf: often a bounded value, or one of the children's leaves, or what no child changes."""
    shape, kind, lo, hi = g.states[name]
    if g.chance(0.8 if hi == SUMMED else 0.25):
        with contextlib.suppress(NoFit):
            return carried(g, name, scattered)
    if kind == "b":
        return g.want(shape, "b")
    if kind == "i":
        return g.emit(shape, "{0} & 3", [g.want(shape, "i")], 0, 3, "i")
    if cast_from(kind)[1] == "i":
        return g.emit(shape, f"({{0}} & 7).astype(jnp.{kind})", [g.want(shape, "i")], 0, 7, kind)
    if g.chance(0.06):
        return g.emit(shape, f"jnp.full({shape}, 0.75, {'D' if kind == 'f' else f'jnp.{kind}'})", [], 0.75, 0.75, kind)
    if g.chance(0.06) and kind == "f":
        return g.emit(shape, g.param(shape, 0.5, 1.0), [], 0.5, 1.0)
    x = _gathered(g, shape)
    for _ in range(int(g.rng.integers(0, 3)) if math.prod(shape) else 0):  # what nothing has read yet comes in
        try:
            y = g.pick(where=lambda v: v.gathered and v.name not in g.read and v.size > 0 and v.shape != ())
        except NoFit:
            break
        if y.shape != shape:
            if g.simple:
                continue
            text = f"({{0}}.reshape(-1) @ {g.param((y.size, math.prod(shape)))}).reshape({shape})"
            y = g.emit(shape, text, [y], y.lo, y.hi)
        x = g.emit(shape, "{0} + {1}" if g.chance(0.8) else "{0} * {1}", [x, y], -9, 9)
    if kind != "f":
        return g.emit(shape, f"jnp.tanh({{0}}).astype(jnp.{kind})", [x], -1, 1, kind)
    if lo > 0:
        return g.emit(shape, "1 + 0.5 * jnp.tanh({0})", [x], 0.5, 1.5)
    return x if -1 <= x.lo and x.hi <= 1 else g.emit(shape, "jnp.tanh({0})", [x], -1, 1)


def _gathered(g: Maker, shape: Any) -> Var:
    for fits in (lambda v: v.gathered and v.name not in g.read, lambda v: v.gathered):
        with contextlib.suppress(NoFit):
            return g.pick("f", shape, fits)
    with contextlib.suppress(NoFit):
        gather(g) if g.arity and not g.many else gather_all(g)
    return g.want(shape)


def _pushed(g: Maker, scattered: list[Var]) -> Var:
    """Returns a value to push: sometimes a state, otherwise preferably an unread value, so that little of F is dead code."""
    if g.chance(0.05):
        with contextlib.suppress(NoFit):
            return odd.not_finite(g)
    if not g.chance(0.3):
        kind = g.choose("fib", [8, 1, 0.5])
        with contextlib.suppress(NoFit):
            return g.pick(kind, where=lambda v: v.name not in g.read) if g.chance(0.8) else g.pick(kind)
    x = g.choose(scattered)
    return x if x.kind in "fib" else g.emit(x.shape, "{0}.astype(D)", [x])
