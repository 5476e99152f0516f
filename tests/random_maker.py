"""`Maker` provides variables, parameters and nested blocks for random statements."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.random_programs import Block, Shape, Stmt, Var, cast_from

WIDE = 6.0  # larger values are squashed by tanh
PERSISTENT, NATIVE, ANY = range(3)  # what may be drawn: what has device code, what engine native computes, any JAX


class NoFit(Exception):
    """Raised if no variable in scope fits a statement."""


class Maker:
    """Grows the body of one function. `widths` are its vectors' widths; `level` says which statements it may have."""

    def __init__(self, rng: np.random.Generator, widths: list[int], params: dict[str, Any], arity: int, level: int):
        self.rng, self.widths, self.params, self.arity, self.level = rng, widths, params, arity, level
        self.scope: list[Var] = []
        self.body = Block([], [], [])
        self.states: dict[str, Any] = {}
        self.bare_state = False
        self.many = True  # whether gather_all is allowed
        self.edges: dict[str, Any] = {}  # the leaves of an edge's row, as those of inputs
        self.no_leaf = False  # inside a branch with at least one child
        self.depth = 0
        self.count = 0
        self.coarse = 0.0
        self.read: set[str] = set()

    @property
    def simple(self) -> bool:
        """Whether only statements with device code may be drawn."""
        return self.level == PERSISTENT

    @contextlib.contextmanager
    def at_level(self, level: int) -> Iterator[None]:
        """A context in which other statements may be drawn."""
        before, self.level = self.level, level
        try:
            yield
        finally:
            self.level = before

    # --- random choices
    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def choose(self, options: Any, weights: Any = None) -> Any:
        options = list(options)
        p = None if weights is None else np.array(weights, float) / np.sum(weights)
        return options[int(self.rng.choice(len(options), p=p))]

    def shape(self) -> Shape:
        n = self.choose(self.widths)
        if self.simple:
            return () if self.chance(0.15) else (self.widths[0],)
        return self.choose([(), (n,), (n, self.choose(self.widths))], [1, 4, 1])

    def pick(self, kind: str = "f", shape: Any = None, where: Callable[[Var], bool] = lambda v: True) -> Var:
        """A variable in scope, preferably a late and unread one. `shape`: a shape, a number of axes, or any."""
        fits = [
            v
            for v in self.scope
            if v.kind == kind and (shape is None or v.shape == shape or len(v.shape) == shape) and where(v)
        ]
        if not fits:
            raise NoFit
        weights = [(1 + 4 * (v.name not in self.read)) * (1 + 2 * i / len(fits)) for i, v in enumerate(fits)]
        found = self.choose(fits, weights)
        self.read.add(found.name)
        return found

    # --- statements
    def emit(
        self,
        shape: Shape,
        template: str,
        args: list[Var],
        lo: float = -WIDE,
        hi: float = WIDE,
        kind: str = "f",
        blocks: list[Block] | None = None,
        gathered: bool = False,
    ) -> Var:
        """Adds a statement. A float result that could grow is squashed."""
        if kind == "f" and max(abs(lo), abs(hi)) > WIDE:
            template, lo, hi = f"jnp.tanh({template})", math.tanh(max(lo, -20)), math.tanh(min(hi, 20))
        self.count += 1
        gathered = gathered or any(v.gathered for v in args)
        var = Var(f"x{self.count}", shape, kind, lo, hi, gathered)
        self.body.stmts.append(Stmt(var, template, [v.name for v in args], blocks or []))
        self.scope.append(var)
        return var

    def param(self, shape: Shape, lo: float | None = None, hi: float | None = None) -> str:
        """A parameter, as text; often an existing one, so that weights are shared."""
        if lo is None or hi is None:
            hi = 1.5 / math.sqrt(max(1, shape[-2] if len(shape) > 1 else 2))
            lo = -hi
        same = [name for name, spec in self.params.items() if spec == (shape, lo, hi)]
        if same and self.chance(0.6):
            return f'p["{self.choose(same)}"]'
        name = f"w{len(self.params)}"
        self.params[name] = (shape, lo, hi)
        return f'p["{name}"]'

    def want(self, shape: Shape, kind: str = "f") -> Var:
        """A variable of this type: an existing one, or one computed from another."""
        if self.chance(0.8):
            with contextlib.suppress(NoFit):
                return self.pick(kind, shape)
        if kind == "b":
            x = self.want(shape)
            return self.emit(shape, f"{{0}} > {self.rng.uniform(-0.5, 0.5):.2f}", [x], kind="b")
        if kind == "i":
            if self.chance(0.5):
                b = self.want(shape, "b")
                return self.emit(shape, "{0}.astype(jnp.int32)", [b], 0, 1, "i")
            return self.emit(shape, f"jnp.full({shape}, {int(self.rng.integers(3))}, jnp.int32)", [], 0, 2, "i")
        try:
            x = self.pick(where=lambda v: v.size > 0 and (not self.simple or v.shape == (self.widths[0],)))
        except NoFit:
            p = self.param(shape)
            return self.emit(shape, p, [], -1.5, 1.5)
        bound = 2 * max(abs(x.lo), abs(x.hi))
        if self.simple:
            if shape == ():
                return self.emit((), "{0}.sum()", [x], -bound, bound)
            if shape == x.shape:
                return self.emit(shape, f"{{0}} @ {self.param((x.size, x.size))}", [x], -bound, bound)
        size = math.prod(shape)
        if shape == ():
            return self.emit((), f"{{0}}.reshape(-1) @ {self.param((x.size,))}", [x], -bound, bound)
        if size == 0:
            return self.emit(shape, f"jnp.zeros({shape}, D)", [], 0, 0)
        flat = "{0}" if len(x.shape) == 1 else "{0}.reshape(-1)"
        text = f"{flat} @ {self.param((x.size, size))}"
        return self.emit(shape, text if len(shape) == 1 else f"({text}).reshape({shape})", [x], -bound, bound)

    # --- functions within F
    @contextlib.contextmanager
    def inside(self, params: list[Var], no_leaf: bool | None = None) -> Iterator[Block]:
        """A context in which statements go to a new block with these parameters. The block sees the variables in scope."""
        body, size, leaf = self.body, len(self.scope), self.no_leaf
        self.body = Block([v.name for v in params], [], [])
        self.scope += params
        self.depth += 1
        self.no_leaf = leaf if no_leaf is None else no_leaf
        try:
            yield self.body
        finally:
            self.body, self.depth, self.no_leaf = body, self.depth - 1, leaf
            del self.scope[size:]

    def fresh(
        self, prefix: str, shape: Shape, kind: str = "f", lo: float = -1.0, hi: float = 1.0, gathered: bool = False
    ) -> Var:
        """Returns a variable that is a parameter of a block."""
        self.count += 1
        return Var(f"{prefix}{self.count}", shape, kind, lo, hi, gathered)

    def edge_values(self, of: Var) -> list[Var]:
        """Reads the leaves of an edge's row `of`."""
        return [self.emit(shape, f'{{0}}["{name}"]', [of], lo, hi, kind) for name, (shape, kind, lo, hi) in self.edges.items()]

    def child_states(self, of: Var, whole: bool, missing: bool) -> list[Var]:
        """Reads leaves of a gathered state `of`: all (`whole`) or some; `missing`: it may be the zeros of no child."""
        out = []
        for name, (shape, kind, lo, hi) in self.states.items():
            if not whole and len(self.states) > 1 and self.chance(0.4):
                continue
            text = "{0}" if self.bare_state else f'{{0}}["{name}"]'
            cast, kind = cast_from(kind)
            lo, hi = (min(lo, 0.0), max(hi, 0.0)) if missing else (lo, hi)
            out.append(self.emit(shape, text + cast, [of], lo, hi, kind, gathered=True))
        return out
