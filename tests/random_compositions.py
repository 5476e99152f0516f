"""Random compositions of JAX's transformations, applied to `cavs.run`, `recompute` and `sub_batched`, and to a plain loop.

    python -m tests.random_compositions --seeds 0:100 --targets scan native
    python -m tests.random_compositions --seeds 7:8 --targets scan        # repeats one

A function here takes parameters and inputs, and returns a pytree of arrays. A transformation makes such a function of another.
"""

import argparse
import collections
import functools
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cavs
from tests.per_vertex import Graph, PlainVertex, _children_first
from tests.random_transformations import ALL, FORWARD, OTHERS, REVERSE, Function, scalar

WIDTH, INPUTS, WORDS = 8, 2, 4


# --- what is transformed: a tree of vertices that gather two children, and a DAG with attention over its children
def tree(p: Any, v: Any) -> None:
    x = v.pull()
    left, right = v.gather(0), v.gather(1)
    z = x["x"] @ p["w"] + p["words"][x["word"]]
    h = jnp.tanh(z + left["h"] @ p["u"] + right["h"] * p["b"]) * jax.nn.sigmoid(left["c"] + z)
    v.scatter({"h": h, "c": jnp.sin(left["c"] + right["c"] + h)})
    v.push({"h": h, "norm": (h * h).sum(), "word": x["word"] + 1})


def attention(p: Any, v: Any) -> None:
    x = v.pull()
    query = x["x"] @ p["w"]
    below = v.gather_all(lambda s: ((s["h"] @ p["u"] + query).sum(), s["h"]), reduce="softmax")
    h = jnp.tanh(query + below * p["b"] + p["words"][x["word"]] + v.gather_all(lambda s: s["c"]))
    v.scatter({"h": h, "c": jnp.cos(h)})
    v.push({"h": h @ p["u"], "norm": jnp.cos(h).mean(), "word": x["word"]})


TREES: list[Graph] = [[[], [], [0, 1], [2]], [[]]]
DAGS: list[Graph] = [[[], [0], [0, 1], [0, 1, 2]], [[]]]
CELLS = {"tree": (tree, TREES), "attention": (attention, DAGS)}


def by_vertex(cell: str) -> Function:
    """The loop over vertices, in plain JAX."""
    fn, graphs = CELLS[cell]
    rows = [(g, r) for g, graph in enumerate(graphs) for r in range(len(graph))]
    begin = [rows.index((g, 0)) for g in range(len(graphs))]

    def pushes(p: Any, x: Any) -> Any:
        zero = {"h": jnp.zeros(WIDTH, x["x"].dtype), "c": jnp.zeros(WIDTH, x["x"].dtype)}
        states, found = {}, [None] * len(rows)
        for g, graph in enumerate(graphs):
            for r in _children_first(graph):
                v = PlainVertex(jax.tree.map(lambda a, at=begin[g] + r: a[at], x), [states[g, c] for c in graph[r]], zero)
                fn(p, v)
                states[g, r], found[begin[g] + r] = v.state, v.pushed[None]
        return jax.tree.map(lambda *a: jnp.stack(a), *found)

    return pushes


def with_words(cell: str, pushes: Callable[[Any, Any], Any]) -> Function:
    """The pushes as a function of parameters and float rows."""
    words = np.arange(count(cell), dtype=np.int32) % WORDS
    return lambda p, x: pushes(p, {"x": x, "word": jnp.asarray(words)})


def count(cell: str) -> int:
    return sum(map(len, CELLS[cell][1]))


def batched(cell: str, engine: Any, traced: bool = False, **how: Any) -> Function:
    """`cavs.run`."""
    fn, graphs = CELLS[cell]
    F = cavs.VertexFunction(fn, state={"h": (WIDTH,), "c": (WIDTH,)}, arity=2)
    edges = [[(r, c) for r, children in enumerate(graph) for c in children] for graph in graphs]
    sched = cavs.schedule(cavs.from_edges([len(graph) for graph in graphs], edges), **how)
    run = functools.partial(cavs.run, F, engine=engine)
    if not traced:
        return with_words(cell, lambda p, x: run(p, sched, x))
    jitted = jax.jit(
        lambda p, sched, x: run(
            p, sched, jax.tree.map(lambda a: jnp.pad(a, ((0, sched.shape.vertices - len(a)),) + ((0, 0),) * (a.ndim - 1)), x)
        )
    )
    return with_words(cell, lambda p, x: jax.tree.map(lambda a: a[: count(cell)], jitted(p, sched, x)))


def layers(p: Any, x: Any) -> Any:
    """A function without vertices: a loop, and what follows."""
    h, ys = lax.scan(lambda h, b: (jnp.tanh(h @ p["u"] + b), jnp.sum(h * h)), x @ p["w"], jnp.stack([p["b"], 2 * p["b"]]))
    return {"h": jnp.sin(h) @ p["words"].T, "ys": ys}


def in_parts(loss: Function, total: Callable[[Function], Any]) -> Function:
    """A sum of two losses, as `total` sums those of stacked batches. The loss also reads what it closes over."""

    def both(p: Any, x: Any) -> Any:
        given = {name: a for name, a in p.items() if name != "b"}
        return total(lambda q, rows: jnp.sum(scalar(loss(q | {"b": p["b"]}, rows))[None]))(  # a mean is refused
            given, [jnp.stack([x, 0.5 * x]), jnp.stack([x + 1, -x])]
        )

    return both


def plain_sum(loss: Function) -> Any:
    return lambda p, stacks: sum(loss(p, rows) for stack in stacks for rows in stack)


class Target(NamedTuple):
    """What is transformed, and the same in plain JAX. `once`: whether second derivatives in reverse mode are refused."""

    make: Callable[[str], Function]
    plain: Callable[[str], Function]
    once: bool
    dtype: Any


def persistent(cell: str) -> Function:
    from tests.persistent_programs import INTERPRETED

    return batched(cell, INTERPRETED, scripts=True)


def plain_vertices(cell: str) -> Function:
    return with_words(cell, by_vertex(cell))


def plain_layers(cell: str) -> Function:
    return layers


def rerun(make: Callable[[str], Function], budget: Any = None) -> Callable[[str], Function]:
    return lambda cell: cavs.memory.recompute(make(cell), budget)


def parts(make: Callable[[str], Function], total: Callable[[Function], Any]) -> Callable[[str], Function]:
    return lambda cell: in_parts(make(cell), total)


def on(engine: Any, **how: Any) -> Callable[[str], Function]:
    return lambda cell: batched(cell, engine, **how)


f32, f64 = np.float32, np.float64
SUBS = cavs.memory.sub_batched
TARGETS = {
    "scan": Target(on("scan"), plain_vertices, True, f64),
    "traced schedule": Target(on("scan", traced=True), plain_vertices, True, f64),
    "segments": Target(on("scan", segments=2), plain_vertices, True, f64),
    "native": Target(on("native"), plain_vertices, True, f32),
    "native segments": Target(on("native", segments=2), plain_vertices, True, f32),
    "persistent": Target(persistent, plain_vertices, True, f32),
    "recompute": Target(rerun(plain_layers), plain_layers, False, f64),
    "recompute min": Target(rerun(plain_layers, "min"), plain_layers, False, f64),
    "recompute run": Target(rerun(on("scan")), plain_vertices, True, f64),
    "parts": Target(parts(plain_layers, SUBS), parts(plain_layers, plain_sum), False, f64),
    "parts run": Target(parts(on("native"), SUBS), parts(plain_vertices, plain_sum), True, f32),
}


class Case(NamedTuple):
    """`names`: the transformations, the innermost first. `compiled`: whether `jax.jit` is around all of them."""

    cell: str
    names: tuple[str, ...]
    compiled: bool

    def of(self, f: Function) -> Function:
        found = functools.reduce(lambda f, name: ALL[name](f), self.names, f)
        return jax.jit(found) if self.compiled else found

    def again_in_reverse(self) -> bool:
        """Whether reverse mode is applied to what is differentiated already."""
        kinds = [name for name in self.names if name in REVERSE or name in FORWARD]
        return any(name in REVERSE for name in kinds[1:])


def case_of(seed: int) -> Case:
    """Draws a case. Half of the transformations are derivatives, so that most cases have one, at any depth."""
    rng = np.random.default_rng(seed)
    kinds = [list(REVERSE), list(FORWARD), list(OTHERS)]
    groups = rng.choice(3, int(rng.integers(1, 4)), p=[0.35, 0.1, 0.55])
    names = tuple(str(rng.choice(kinds[g])) for g in groups)
    return Case(str(rng.choice(list(CELLS))), names, bool(rng.random() < 0.8))


def arguments(cell: str, dtype: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    shapes = {"w": (INPUTS, WIDTH), "u": (WIDTH, WIDTH), "b": (WIDTH,), "words": (WORDS, WIDTH)}
    draw = lambda shape: jnp.asarray(rng.uniform(-0.7, 0.7, shape).astype(np.float32), dtype)  # noqa: E731
    return {name: draw(shape) for name, shape in shapes.items()}, draw((count(cell), INPUTS))


@functools.cache  # several targets have the same
def wanted(plain: Callable[[str], Function], case: Case) -> Any:
    """What a case gives in plain JAX."""
    return jax.jit(case.of(plain(case.cell)))(*arguments(case.cell, f64))


MSG_REFUSED = "got a second derivative in reverse mode"
MSG_INTERPRETED = "OrderedIOEffect"  # `jax.checkpoint` refuses Pallas' interpreter, whose kernels call Python, before Cavs can


def check(case: Case, name: str) -> str:
    """Runs a case on a target. Returns "ok", "refused" as it must be, "ill" if plain JAX refuses it, or what is wrong."""
    target = TARGETS[name]
    if case.again_in_reverse() and target.once:
        try:
            case.of(target.make(case.cell))(*arguments(case.cell, target.dtype))
        except Exception as e:
            right = isinstance(e, TypeError) and MSG_REFUSED in str(e) or name == "persistent" and MSG_INTERPRETED in str(e)
            return "refused" if right or of_checked_axes(case, e) else f"wrong refusal: {type(e).__name__}: {e}"
        return "not refused"
    try:
        want = wanted(target.plain, case)
    except Exception as e:
        return f"ill: {type(e).__name__}: {str(e)[:200]}"
    try:
        got = case.of(target.make(case.cell))(*arguments(case.cell, target.dtype))
    except Exception as e:
        if of_checked_axes(case, e):
            return "refused"
        if name == "persistent" and re.search("[Ee]ffects? not supported", str(e)):  # callbacks of Pallas' interpreter
            return "refused"
        return "error: " + traceback.format_exc(limit=-3)
    return compared(got, want, 1e-7 if target.dtype == f64 else 2e-3)


def of_checked_axes(case: Case, e: Exception) -> bool:
    """Whether an error refuses what a loss closes over inside of a `jax.shard_map` that checks its axes."""
    return "shard_map checked" in case.names and isinstance(e, ValueError) and "check_vma" in str(e)


def compared(got: Any, want: Any, tolerance: float) -> str:
    if jax.tree.structure(got) != jax.tree.structure(want):
        return f"structure: {jax.tree.structure(got)}; want {jax.tree.structure(want)}"
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        if a.shape != b.shape:
            return f"{jax.tree_util.keystr(path)}: shape {a.shape}; want {b.shape}"
        if b.dtype == jax.dtypes.float0:
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if not np.isfinite(b).all():
            return "ill: not finite"
        off = np.abs(a - b).max(initial=0)
        if not off <= tolerance * (1 + np.abs(b).max(initial=0)):
            return f"{jax.tree_util.keystr(path)}: off by {off:.2e}, of {np.abs(b).max():.2e}"
    return "ok"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:20", help="FIRST:END")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS), metavar="TARGET")
    args = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    first, end = map(int, args.seeds.split(":"))
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failures = 0
    for seed in range(first, end):
        case = case_of(seed)
        for name in args.targets:
            with jax.default_matmul_precision("highest"):
                found = check(case, name)
            verdict = found.split(":")[0] if found.split(":")[0] in ("ok", "refused", "ill") else "wrong"
            for key in (*case.names, f"target {name}", f"depth {len(case.names)}"):
                counts[key][verdict] += 1
            if verdict in ("wrong", "ill"):
                failures += verdict == "wrong"
                print(f"seed {seed} {name}: {case}: {found}", flush=True)
        jax.clear_caches()
    for key, found in sorted(counts.items()):
        print(f"{key:24s}", ", ".join(f"{n} {verdict}" for verdict, n in sorted(found.items())))
    return min(failures, 1)


if __name__ == "__main__":
    raise SystemExit(main())
