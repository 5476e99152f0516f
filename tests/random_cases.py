"""A random case from a seed: a vertex function, graphs, and options. A case can be printed as a script."""

import dataclasses
import pprint
from typing import Any

import jax
import numpy as np

import cavs
from tests.per_vertex import Graph
from tests.random_bodies import random_program
from tests.random_forests import random_forest
from tests.random_maker import PERSISTENT
from tests.random_programs import Program, blocks_of, function_name, source

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


# Rules that are not linear in the cotangent: they act at each vertex, before cotangents are added up.
@jax.custom_vjp
def limited(x):
    return jnp.sin(x)


limited.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.clip(ct, -0.2, 0.2) * jnp.cos(x),))


@jax.custom_vjp
def evened(x):
    return x * 1.0


evened.defvjp(lambda x: (x * 1.0, None), lambda _, ct: (ct / jnp.sqrt(0.01 + (ct * ct).sum()),))


@jax.custom_vjp
def signs(x):
    return x * 0.5


signs.defvjp(lambda x: (x * 0.5, None), lambda _, ct: (0.3 * jnp.where(jnp.abs(ct) > 0.01, jnp.sign(ct), 0),))


@jax.custom_vjp
def limited_product(x, w):
    return jnp.tanh(x @ w)


def limited_product_back(saved, ct):
    x, w, y = saved
    ct = jnp.clip(ct, -0.2, 0.2) * (1 - y * y)
    return ct @ w.T, jnp.outer(x, ct)


limited_product.defvjp(lambda x, w: ((y := jnp.tanh(x @ w)), (x, w, y)), limited_product_back)
"""


WAYS: dict[str, Any] = {"eager": lambda fn: fn, "jit": jax.jit, "concurrent_jit": cavs.concurrent_jit}
LOSSES = ("sum", "total", "mean of graphs", "mean of vertices", "mean of some", "ratio of totals")


@dataclasses.dataclass
class Options:
    """The options of a case. `engine` is "scan", "native", "persistent-interpret", or None for the one that `cavs.run` selects.

    `way` is one of `WAYS`; with `closed` what is compiled closes over the schedule. `fixed` has the names of parameters, inputs
    and edges that are not differentiated. With `parts`, the case is one of `LOSSES` over the batch in so many parts, by
    `cavs.memory.plan` or `sub_batched`.
    """

    float32: bool = False
    engine: str | None = "scan"
    way: str = "eager"
    closed: bool = False
    at: bool = False
    vmap: bool = False
    checkpoint: bool = False
    nets: bool = False
    optimizations: dict[str, bool] = dataclasses.field(default_factory=dict)
    schedule: dict[str, Any] = dataclasses.field(default_factory=dict)
    precision: str = "highest"
    fixed: tuple[str, ...] = ()
    names: dict[str, str] = dataclasses.field(default_factory=dict)  # what is to become of named values: "keep", "recompute"
    parts: int = 0
    loss: str = "sum"
    sub_batched: bool = False
    spread: bool = False  # whether groups of a launch share rows, which the engine chooses for larger graphs

    @property
    def traced(self) -> bool:
        """Whether the schedule is an argument of what is compiled."""
        return self.way != "eager" and not self.closed

    @property
    def how(self) -> str:
        """The transformations that `cavs.run` runs under."""
        return self.way + (" of parts" if self.parts else " of vmap" * self.vmap)


@dataclasses.dataclass
class Case:
    """A program, its graphs (and a kind per vertex), and options. `seed` determines parameters and inputs."""

    seed: int
    program: Program
    graphs: list[Graph]
    kinds: list[str | None]
    options: Options


# How often a program has statements for PERSISTENT alone, for NATIVE and for ANY, by the engine that is asked for.
LEVELS = {"scan": (0.0, 0.15, 0.85), "native": (0.1, 0.8, 0.1), None: (0.4, 0.35, 0.25)}
ON_DEVICE = (0.93, 0.03, 0.04)


def random_case(seed: int, engine: str | None = None, float32: bool = False, precision: str = "highest") -> Case:
    """Returns the case of a seed, which most often fits the engine."""
    rng = np.random.default_rng(seed)
    level = int(rng.choice(3, p=LEVELS.get(engine, ON_DEVICE)))
    program = random_program(rng, level)
    most_children = program.arity or 3
    if "v.gather_all(" in source(program):
        most_children = 20
    forest = random_forest(rng, most_children, 24)
    while level == PERSISTENT and rng.random() < 0.9 and not any(children for graph in forest for children in graph):
        forest = random_forest(rng, most_children, 24)
    kinds = random_kinds(rng, list(program.bodies), forest)
    forest = _with_few_children(program, forest, kinds)
    options = Options(float32=float32, engine=engine, precision=precision)

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    options.way = str(rng.choice([*WAYS], p=[0.4, 0.35, 0.25]))
    options.closed = options.way != "eager" and chance(0.3)
    options.at, options.checkpoint, options.nets = chance(0.3), chance(0.15), chance(0.15)
    options.vmap = chance(0.15) and engine != "persistent-interpret"
    off = 0.04 if engine == "native" else 0.15
    options.optimizations = {name: False for name in ("fusion", "eager", "lazy") if chance(off)}
    if engine == "persistent-interpret":
        options.optimizations.pop("lazy", None)
        options.checkpoint = False  # JAX's interpreter of kernels has effects, which jax.checkpoint refuses
    if chance(0.03 if engine == "native" else 0.15):
        options.schedule["policy"] = "serial"
    if chance(0.2):
        options.schedule["exact"] = True
    chance(0.2)  # drew an option that is gone: those of a seed stay the same
    if engine == "scan" and chance(0.3):
        options.schedule["scripts"] = True  # tasks as on a GPU
    leaves = program.inputs | program.edges
    if chance(0.35):
        options.fixed = tuple(x for x in (*program.params, *leaves) if chance(0.5))
    options.names = _named(rng, program)
    parts = [n for n in (2, 3, 4, len(forest)) if len(forest) > 1 and len(forest) % n == 0 and (n != 3 or len(forest) % 2)]
    if chance(0.1) and parts and engine != "persistent-interpret" and "k" not in program.inputs:
        # Of all options, these fit a loss over parts of a batch.
        options = Options(float32, engine, options.way, optimizations=options.optimizations, precision=precision)
        options.parts, options.loss, options.sub_batched = int(rng.choice(parts)), str(rng.choice(LOSSES)), chance(0.4)
    if engine in ("persistent", "persistent-interpret"):
        options.spread = bool(np.random.default_rng([seed, 1]).random() < 0.25)  # drawn apart: others stay those of the seed
    if len(program.bodies) > 1 and np.random.default_rng([seed, 2]).random() < 0.5:
        options.schedule["kinds"] = "mixed"
    return Case(seed, program, forest, kinds, options)


def random_kinds(rng: np.random.Generator, names: list[str | None], forest: list[Graph]) -> list[str | None]:
    """Draws the kind of each vertex. Kinds may be missing, have no leaves, or no vertices with children."""
    inner = [bool(children) for graph in forest for children in graph]
    if len(names) == 1:
        return names * len(inner)
    some = names[: int(rng.integers(1, len(names) + 1))]
    of_leaves, of_inner = names[-1:], names[:-1]
    match rng.choice(["any", "some", "apart", "leaves", "inner", "graphs"], p=[0.35, 0.15, 0.2, 0.1, 0.1, 0.1]):
        case "some":
            of_leaves = of_inner = some
        case "leaves":  # the last kind has leaves alone, and others have some, too
            of_leaves = names
        case "inner":  # no leaf is of the first kind
            of_leaves, of_inner = names[1:], names
        case "graphs":
            return [name for graph in forest for name in [names[int(rng.integers(len(names)))]] * len(graph)]
        case "any":
            of_leaves = of_inner = names
    return [of[int(rng.integers(len(of)))] for of in (of_inner if has else of_leaves for has in inner)]


def _with_few_children(program: Program, forest: list[Graph], kinds: list[str | None]) -> list[Graph]:
    """Returns graphs in which no vertex has more children than `cavs.run` allows to a kind that does not call `gather_all`."""
    all_of = {kind for kind in program.bodies if "v.gather_all(" in source(program, kind)}
    most = iter([None if kind in all_of or not program.arity else program.arity for kind in kinds])
    return [[children[: next(most)] for children in graph] for graph in forest]


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
