"""A random case from a seed: a vertex function, graphs, and options. A case can be printed as a script."""

import contextlib
import dataclasses
import math
import pprint
from typing import Any

import numpy as np

from tests.per_vertex import Graph
from tests.random_blocks import gather, gather_all, statement
from tests.random_forests import random_forest
from tests.random_maker import Maker, NoFit
from tests.random_programs import Block, Program, Var, blocks_of, function_name, source, without_unread

PRELUDE = """import jax, jax.numpy as jnp, numpy as np
from jax.ad_checkpoint import checkpoint_name

D = jnp.{dtype}


@jax.custom_jvp
def bend(x):
    return jnp.sin(x)


bend.defjvps(lambda t, out, x: t * jnp.cos(x) * 0.9)


@jax.custom_vjp
def clipped(x):
    return x * 1.0


clipped.defvjp(lambda x: (x, None), lambda _, ct: (0.5 * ct,))
"""


@dataclasses.dataclass
class Options:
    """The options of a case. `engine` is "scan", "persistent-interpret", or None for the engine that `cavs.run` selects.

    `fixed` has the names of parameters, inputs and edges that are not differentiated.
    """

    float32: bool = False
    engine: str | None = "scan"
    jit: bool = False
    at: bool = False
    vmap: bool = False
    checkpoint: bool = False
    nets: bool = False
    optimizations: dict[str, bool] = dataclasses.field(default_factory=dict)
    schedule: dict[str, Any] = dataclasses.field(default_factory=dict)
    precision: str = "highest"
    fixed: tuple[str, ...] = ()
    names: dict[str, str] = dataclasses.field(default_factory=dict)  # what is to become of named values: "keep", "recompute"


@dataclasses.dataclass
class Case:
    """A program, its graphs (and a kind per vertex), and options. `seed` determines parameters and inputs."""

    seed: int
    program: Program
    graphs: list[Graph]
    kinds: list[str | None]
    options: Options


def random_case(seed: int, engine: str | None = None, float32: bool = False, precision: str = "highest") -> Case:
    """Returns the case of a seed. If `engine` is not "scan", most cases may fit engine persistent."""
    rng = np.random.default_rng(seed)
    simple = bool(engine != "scan" and rng.random() < 0.93)
    program = random_program(rng, simple)
    most_children = program.arity or 3
    if "v.gather_all(" in source(program):
        most_children = 20
    forest = random_forest(rng, most_children, 24)
    while simple and rng.random() < 0.9 and not any(children for graph in forest for children in graph):
        forest = random_forest(rng, most_children, 24)
    count = sum(map(len, forest))
    names = list(program.bodies)
    kinds: list[Any] = [names[int(i)] for i in rng.integers(0, len(names), count)]
    options = Options(float32=float32, engine=engine, precision=precision)

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    options.jit, options.at, options.checkpoint, options.nets = chance(0.35), chance(0.3), chance(0.15), chance(0.15)
    options.vmap = chance(0.15) and engine != "persistent-interpret"
    options.optimizations = {name: False for name in ("fusion", "eager", "lazy") if chance(0.15)}
    if engine == "persistent-interpret":
        options.optimizations.pop("lazy", None)
        options.checkpoint = False  # JAX's interpreter of kernels has effects, which jax.checkpoint refuses
    if chance(0.15):
        options.schedule["policy"] = "serial"
    if chance(0.2):
        options.schedule["exact"] = True
    if chance(0.2):
        options.schedule["window"] = 256
    if engine == "scan" and chance(0.3):
        options.schedule["scripts"] = True  # tasks as on a GPU
    (fixed_rng,) = rng.spawn(1)
    if fixed_rng.random() < 0.35:
        options.fixed = tuple(x for x in (*program.params, *program.inputs, *program.edges) if fixed_rng.random() < 0.5)
    options.names = _named(np.random.default_rng([seed, 17]), program)
    return Case(seed, program, forest, kinds, options)


def _named(rng: np.random.Generator, program: Program) -> dict[str, str]:
    """Names some values of half of the programs, in place. Returns what a memory plan is to do with them."""
    ways: dict[str, str] = {}
    if rng.random() < 0.5:
        return ways
    for stmt in (stmt for block in blocks_of(program) for stmt in block.stmts):
        if stmt.var.kind in "fib" and stmt.args and rng.random() < 0.4:
            stmt.template = f'checkpoint_name({stmt.template}, "{stmt.var.name}")'
            ways[stmt.var.name] = "keep" if rng.random() < 0.8 else "recompute"
    return ways


STATE_SHAPES = [
    lambda n, m: (n,),
    lambda n, m: (m,),
    lambda n, m: (),
    lambda n, m: (n, m),
    lambda n, m: (0,),
    lambda n, m: (2,),
]


def random_program(rng: np.random.Generator, simple: bool) -> Program:
    """F: states, inputs, one body or one for each of two kinds."""

    def pick(options: list[Any], weights: list[float] | None = None) -> Any:
        p = None if weights is None else np.array(weights) / sum(weights)
        return options[int(rng.choice(len(options), p=p))]

    n, m = (pick([16, 48, 10, 24, 150, 5], [5, 1, 2, 1, 0.3, 0.1]), 3) if simple else pick([(3, 4), (5, 2), (4, 3), (2, 5)])
    widths = [n] if simple else [n, m]
    inputs: dict[str, Any] = {"x": ((n,), "f", -2.0, 2.0)}
    more = {"y": ((n,), "f", 0.4, 2.0), "z": ((), "f", -1.0, 1.0), "b": ((), "b", -1, 1)}
    if not simple:
        more |= {
            "m": ((n, m), "f", -1.5, 1.5),
            "i": ((), "i", 0, 3),
            "j": ((n,), "i", 0, 4),
            "u": ((m,), "f", 0.3, 1.2),
            "k": ((), "k", 0, 0),
        }
    for name in more:
        if rng.random() < 0.35:
            inputs[name] = more[name]
    bare_input = len(inputs) == 1 and rng.random() < 0.5
    arity = int(rng.integers(0, 4))
    states: dict[str, Any] = {}
    for i in range(pick([1, 2, 3], [4, 3, 2])):
        if simple or i == 0:
            shape, kind = ((n,), "f") if i == 0 or rng.random() < 0.7 else ((), "f")
        else:
            shape, kind = pick(STATE_SHAPES, [4, 3, 2, 1.5, 0.5, 1])(n, m), pick(["f", "i", "b", "float32"], [6, 2, 1.5, 0.7])
        between = (0.5, 1.5) if kind == "f" and rng.random() < 0.25 else (0, 4) if kind == "i" else (-1.0, 1.0)
        states[f"s{i}"] = (shape, kind, *between)
    bare_state = len(states) == 1 and rng.random() < 0.6
    (edge_rng,) = rng.spawn(1)  # without edges, programs are what they would be if there were none
    edges: dict[str, Any] = {}
    if edge_rng.random() < 0.3:
        edges = {"ea": ((n,), "f", -2.0, 2.0), "eb": ((), "f", 0.4, 2.0)} | ({} if simple else {"ei": ((), "i", 0, 3)})
    params: dict[str, Any] = {}
    bodies: dict[str | None, Block] = {}
    kinds = [None] if rng.random() < (0.97 if simple else 0.85) else ["a", "b"]
    types: list[Any] = []
    templates: list[str] = []
    coarse = 1e-7 if any(s[1] == "float32" for s in states.values()) else 0.0
    for kind in kinds:
        g = Maker(rng, widths, params, arity, simple)
        g.edges, g.edge_rng = edges, edge_rng
        g.states, g.bare_state = states, bare_state
        g.many = arity == 0 or g.chance(0.65)
        bodies[kind], types, templates = _body(g, inputs, bare_input, types, templates)
        coarse = max(coarse, g.coarse)
    kept = {name: (shape, kind) for name, (shape, kind, *_) in states.items()}
    program = Program(bodies, kept, arity, params, inputs, templates, bare_state, bare_input, edges, coarse)
    return without_unread(program)


def _body(
    g: Maker, inputs: Any, bare_input: bool, types: list[Any], templates: list[str]
) -> tuple[Block, list[Any], list[str]]:
    for name, (shape, kind, lo, hi) in inputs.items():
        g.emit(shape, "v.pull()" if bare_input else f'v.pull("{name}")', [], lo, hi, kind)
    simple, g.simple = g.simple, False
    for _ in range(int(g.rng.integers(0, 3))):  # eager statements may be anything
        _without_children(g)
    g.simple = simple
    for _ in range(int(g.rng.integers(1, 3))):
        try:
            (gather if g.arity and not (g.many and g.chance(0.5)) else gather_all)(g)
        except NoFit:
            pass
    for _ in range(int(g.rng.integers(3, 8))):
        statement(g)
    scattered = [_scattered(g, *spec) for spec in g.states.values()]
    g.simple = False
    for _ in range(int(g.rng.integers(0, 3))):  # and so may lazy ones
        (_without_children if simple else statement)(g)
    g.simple = simple
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
    states, many, arity = g.states, g.many, g.arity
    g.many, g.arity = False, 0
    statement(g)
    g.states, g.many, g.arity = states, many, arity


def _scattered(g: Maker, shape: Any, kind: str, lo: float, hi: float) -> Var:
    """Returns the value of a state leaf: a bounded value, or sometimes a parameter, a constant or an unchanged input."""
    if kind == "b":
        return g.want(shape, "b")
    if kind == "i":
        return g.emit(shape, "{0} % 5", [g.want(shape, "i")], 0, 4, "i")
    if g.chance(0.06):
        return g.emit(shape, f"jnp.full({shape}, 0.75, {'jnp.float32' if kind == 'float32' else 'D'})", [], 0.75, 0.75)
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
    if kind == "float32":
        return g.emit(shape, "jnp.tanh({0}).astype(jnp.float32)", [x], -1, 1, "single")
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
    if not g.chance(0.3):
        kind = g.choose("fib", [8, 1, 0.5])
        with contextlib.suppress(NoFit):
            return g.pick(kind, where=lambda v: v.name not in g.read) if g.chance(0.8) else g.pick(kind)
    x = g.choose(scattered)
    return x if x.kind in "fib" else g.emit(x.shape, "{0}.astype(D)", [x])


def namespace(program: Program, dtype: str) -> dict[str, Any]:
    """Executes the source of F with floats of a dtype, and returns its namespace."""
    out: dict[str, Any] = {}
    exec(compile(PRELUDE.format(dtype=dtype) + "\n\n" + source(program), "<random F>", "exec"), out)
    return out


def functions(program: Program, dtype: str) -> dict[str | None, Any]:
    """Returns the function of each kind, with the key None for F without kinds."""
    names = namespace(program, dtype)
    return {kind: names[function_name(kind)] for kind in program.bodies}


def script(case: Case, found: str = "") -> str:
    """Returns a script that repeats a case."""
    p, dtype = case.program, "float32" if case.options.float32 else "float64"
    comment = "".join(f"# {line}\n" for line in found.splitlines())
    pretty = pprint.pformat(
        {f.name: getattr(p, f.name) for f in dataclasses.fields(p) if f.name != "bodies"}, width=110, sort_dicts=False
    )
    names = ", ".join(f"{kind!r}: {function_name(kind)}" for kind in p.bodies)
    return (
        f"{comment}{PRELUDE.format(dtype=dtype)}\n\n{source(p)}\n\n\n"
        f"spec = {pretty}\n"
        f"graphs = {case.graphs}  # the children of each vertex\n"
        f"kinds = {case.kinds}\n"
        f"options = {dataclasses.asdict(case.options)}\n\n"
        "from tests.random_check import rerun\n\n"
        f"print(rerun({{{names}}}, spec, graphs, kinds, options, seed={case.seed}))\n"
    )
