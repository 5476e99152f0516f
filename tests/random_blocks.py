"""Random statements with nested functions: gathers, reductions over children, control flow, transformations in F."""

from collections.abc import Callable

from tests import random_integers as integers, random_odd as odd, random_statements as plain
from tests.random_maker import ANY, NATIVE, PERSISTENT, Maker, NoFit
from tests.random_programs import Block, Var

DEEPEST = 3


def some(g: Maker, least: int, most: int) -> None:
    """Adds up to this many random statements, and fewer in nested functions."""
    most = max(least, most - max(g.depth - 1, 0))
    for _ in range(int(g.rng.integers(least, most + 1))):
        statement(g)


def returns(g: Maker, block: Block, results: list[Var], template: str = "{0}") -> None:
    block.results, block.template = [v.name for v in results], template


def latest(g: Maker, block: Block, kind: str = "f", where: Callable[[Var], bool] = lambda v: True) -> Var:
    """A variable made in this block, if there is one that fits."""
    made = {stmt.var.name for stmt in block.stmts}
    try:
        return g.pick(kind, where=lambda v: v.name in made and where(v))
    except NoFit:
        return g.pick(kind, where=where)


def gather(g: Maker) -> Var:
    if not g.arity:
        raise NoFit
    k = int(g.rng.integers(g.arity))
    of = g.emit((), f"v.gather({k})", [], kind="t", gathered=True)
    made = g.child_states(of, g.chance(0.5), missing=not (g.no_leaf and k == 0))
    if not made:
        raise NoFit
    return made[-1]


def gather_all(g: Maker) -> Var:
    """A reduction; the function reads the child, values of the vertex, parameters, and maybe the other children."""
    if not g.many or g.depth > DEEPEST:
        raise NoFit
    how = g.choose(["sum", "mean", "max", "softmax"])
    child = g.fresh("s", (), "t", gathered=True)
    edges = [g.fresh("e", (), "t")] if g.edges and g.chance(0.7) else []
    empty = not g.no_leaf
    with g.inside([child, *edges], no_leaf=True) as block:
        g.child_states(child, g.chance(0.6), missing=False)
        for edge in edges:
            g.edge_values(edge)
        some(g, 0, 3)
        if how == "softmax":
            score, value = g.want(()), latest(g, block)
            more = g.chance(0.2)
            other = latest(g, block) if more else value
            returns(g, block, [score, value, other], "({0}, ({1}, {2}))" if more else "({0}, {1})")
            results = [value, other] if more else [value]
        else:
            kind = "f"
            if not g.simple:
                kind = g.choose("fib", [8, 2, 1])
            value = latest(g, block, kind)
            more = g.chance(0.2)
            results = [value, g.want((), "f")] if more else [value]
            returns(g, block, results, "({0}, {1})" if more else "{0}")
    out = None
    tupled = len(results) > 1
    text = f'v.gather_all({{f0}}, reduce="{how}")' if how != "sum" or g.chance(0.7) else "v.gather_all({f0})"
    text = text[:-1] + ", edges=True)" if edges else text
    if tupled:
        whole = g.emit((), text, [], kind="t", blocks=[block], gathered=True)
    for i, x in enumerate(results):
        lo, hi = (20 * min(x.lo, 0), 20 * max(x.hi, 0)) if how == "sum" else (x.lo, x.hi)
        if how == "sum" and x.lo > 0:
            lo = x.lo
        if empty:
            lo, hi = min(lo, 0), max(hi, 0)
        args, blocks = ([whole], []) if tupled else ([], [block])
        read = f"{{0}}[{i}]" if tupled else text
        if x.kind == "f":
            out = g.emit(x.shape, read, args, lo, hi, blocks=blocks, gathered=True)
        elif how == "mean":
            g.coarse = max(g.coarse, 1e-7)  # it is in float32
            out = g.emit(x.shape, f"{read}.astype(D)", args, min(x.lo, 0), x.hi, blocks=blocks, gathered=True)
        else:
            limit = " & 7" if how == "sum" else ""
            out = g.emit(x.shape, f"{read}.astype(jnp.int32){limit}", args, 0, 9, "i", blocks=blocks, gathered=True)
    assert out is not None
    return out


def pairs(g: Maker) -> Var:
    """Two or three nested reductions over the same children."""
    if not g.many or g.depth > DEEPEST - 1:
        raise NoFit
    outer_how, inner_how = (g.choose(["sum", "mean", "max", "softmax"]) for _ in range(2))
    empty = not g.no_leaf
    a, b = g.fresh("s", (), "t"), g.fresh("s", (), "t")
    with g.inside([a], no_leaf=True) as outer:
        mine = [v for v in g.child_states(a, True, missing=False) if v.kind == "f"]
        if not mine:
            raise NoFit
        some(g, 0, 1)
        with g.inside([b], no_leaf=True) as inner:
            other = [v for v in g.child_states(b, True, missing=False) if v.kind == "f" and v.shape == mine[0].shape]
            how = g.choose(["{0} * {1}", "jnp.tanh({0} + {1})", "({0} - {1}) ** 2", "{0} - 0.5 * {1}"])
            z = g.emit(mine[0].shape, how, [mine[0], other[0]], -4, 4, gathered=True)
            some(g, 0, 1)
            z = g.want(z.shape) if g.chance(0.3) else z
            if inner_how == "softmax":
                score = g.emit((), "({0} * {1}).sum()", [mine[0], other[0]], -2, 2, gathered=True)
                returns(g, inner, [score, z], "({0}, {1})")
            else:
                returns(g, inner, [z])
        text = f'v.gather_all({{f0}}, reduce="{inner_how}")'
        w = g.emit(z.shape, text, [], 20 * min(z.lo, 0), 20 * max(z.hi, 0), blocks=[inner], gathered=True)
        if g.chance(0.5):
            w = g.emit(w.shape, "{0} * {1}", [w, g.want(w.shape)], -4, 4, gathered=True)
        if outer_how == "softmax":
            returns(g, outer, [g.want(()), w], "({0}, {1})")
        else:
            returns(g, outer, [w])
    text = f'v.gather_all({{f0}}, reduce="{outer_how}")'
    lo, hi = 20 * min(w.lo, 0), 20 * max(w.hi, 0)
    return g.emit(w.shape, text, [], lo, hi if not empty else max(hi, 0), blocks=[outer], gathered=True)


def leaf_branch(g: Maker) -> Var:
    """A Python branch on whether there are children."""
    if g.depth:
        raise NoFit
    shape = g.shape()
    with g.inside([]) as leaf:
        some(g, 0, 2)
        returns(g, leaf, [x := g.want(shape)])
    with g.inside([], no_leaf=True) as inner:
        (gather if g.arity and (not g.many or g.chance(0.5)) else gather_all)(g)
        some(g, 0, 3)
        returns(g, inner, [y := g.want(shape)])
    text = "{f0}() if v.is_leaf() else {f1}()"
    return g.emit(shape, f"({text})", [], min(x.lo, y.lo), max(x.hi, y.hi), blocks=[leaf, inner], gathered=True)


def heads(g: Maker) -> Var:
    """`jax.vmap` over matrices of a parameter, or over the rows of a value; around or within reductions."""
    n, m, k = g.choose(g.widths), g.choose(g.widths), int(g.rng.integers(2, 4))
    over = g.chance(0.6)
    x = None if over else g.pick(shape=2, where=lambda v: v.size > 0)
    w = g.fresh("h", (n, m) if over else x.shape[1:], gathered=not over)  # type: ignore[union-attr]
    with g.inside([w]) as block:
        inner_x = g.want((n,)) if over else w
        if g.chance(0.5) and g.many and g.depth <= DEEPEST:
            out = attention(g, w) if over else gather_all(g)
        else:
            out = g.emit((m,), "jnp.tanh({0} @ {1})", [inner_x, w], -1, 1) if over else inner_x
            some(g, 1, 2)
        out = out if out.kind == "f" and g.chance(0.5) else latest(g, block)
        returns(g, block, [out])
    args = [] if x is None else [x]
    count = k if x is None else x.shape[0]
    text = f"jax.vmap({{f0}})({g.param((k, n, m)) if x is None else '{0}'})"
    if len(out.shape) > 1:
        text, shape = f"{text}.sum(0)", out.shape
    else:
        shape = (count, *out.shape)
    return g.emit(shape, text, args, out.lo * 3 - 0.01, out.hi * 3 + 0.01, blocks=[block], gathered=True)


def attention(g: Maker, w: Var) -> Var:
    """One head of attention over the children."""
    child = g.fresh("s", (), "t", gathered=True)
    query = g.want((w.shape[1],))
    with g.inside([child], no_leaf=True) as block:
        states = [v for v in g.child_states(child, True, missing=False) if v.kind == "f" and v.size]
        if not states:
            raise NoFit
        flat = states[0] if len(states[0].shape) == 1 else g.emit((states[0].size,), "{0}.reshape(-1)", [states[0]])
        key = g.emit((w.shape[0],), f"{{0}} @ {g.param((flat.size, w.shape[0]))}", [flat])
        value = g.emit((w.shape[1],), "{0} @ {1}", [key, w])
        score = g.emit((), "{0} @ {1}", [query, value])
        returns(g, block, [score, value], "({0}, {1})")
    return g.emit((w.shape[1],), 'v.gather_all({f0}, reduce="softmax")', [], -2, 2, blocks=[block], gathered=True)


def loop(g: Maker) -> Var:
    """`lax.scan` over parameters, `lax.fori_loop`, `lax.while_loop` on integers."""
    if g.depth > 1:
        raise NoFit
    x = g.pick(shape=1, where=lambda v: v.size > 0)
    n = x.shape[0]
    how = g.choose(["scan", "fori", "map", "while"])
    if how == "while":
        i = g.pick("i", ())
        text = "jax.lax.while_loop(lambda i: i < 9, lambda i: 2 * i + 1, {0})"
        return g.emit((), f"({text} % 4)", [i], 0, 3, "i")
    c = g.fresh("c", x.shape, "f", -1, 1, x.gathered)
    second = g.fresh("i", (), "i", 0, 2) if how == "fori" else g.fresh("w", (n, n), "f", -1, 1)
    with g.inside([second, c] if how == "fori" else [c, second]) as block:
        if how != "fori":
            g.emit((n,), "{0} @ {1}", [c, second], -2, 2)
        some(g, 1, 2)
        y = g.want(x.shape)
        out = g.emit(x.shape, "jnp.tanh({0} + {1})", [c, y], -1, 1)
        returns(g, block, [out, y], "({0}, {1})" if how != "fori" else "{0}")
    start = g.emit(x.shape, "jnp.tanh({0})", [x], -1, 1)
    if how == "fori":
        return g.emit(x.shape, "jax.lax.fori_loop(0, 3, {f0}, {0})", [start], -1, 1, blocks=[block], gathered=True)
    text = f"jax.lax.scan({{f0}}, {{0}}, {g.param((2, n, n))})"
    if how == "scan":
        return g.emit(x.shape, f"{text}[0]", [start], -1, 1, blocks=[block], gathered=True)
    return g.emit((2, n), f"{text}[1]", [start], -6, 6, blocks=[block], gathered=True)


def over_rows(g: Maker) -> Var:
    """`lax.scan` over the rows of a matrix of the vertex: often a maximum over the children, which may not depend on them."""
    if g.depth > 1:
        raise NoFit
    xs = reduced_matrix(g) if g.many and g.chance(0.6) else g.pick(shape=2, where=lambda v: v.size > 0)
    n = xs.shape[1]
    c, x = g.fresh("c", (n,), gathered=xs.gathered), g.fresh("r", (n,), "f", xs.lo, xs.hi, xs.gathered)
    with g.inside([c, x]) as block:
        out = g.emit((n,), f"jnp.tanh({{0}} @ {g.param((n, n))} + {{1}})", [c, x], -1, 1)
        some(g, 0, 1)
        y = g.emit((), "{0}.sum()", [c], -n, n) if g.chance(0.4) else out
        returns(g, block, [out, y], "({0}, {1})")
    text = f"jax.lax.scan({{f0}}, jnp.zeros({n}, D), {{0}})"
    which, shape = (0, (n,)) if g.chance(0.4) else (1, (xs.shape[0], *y.shape))
    return g.emit(shape, f"{text}[{which}]", [xs], -n, n, blocks=[block], gathered=True)


def reduced_matrix(g: Maker) -> Var:
    """The maximum of matrices over the children: of their states, or of what is the same for all of them."""
    r, n = 2, g.choose([w for w in g.widths if w] or [1])
    child = g.fresh("s", (), "t", gathered=True)
    with g.inside([child], no_leaf=True) as block:
        states = [v for v in g.child_states(child, True, missing=False) if v.kind == "f" and len(v.shape) == 1 and v.size]
        if states and g.chance(0.7):
            of = g.choose(states)
            out = g.emit((r, n), f"({{0}} @ {g.param((of.size, r * n))}).reshape({r}, {n})", [of], -3, 3)
            out = g.emit((r, n), f"{{0}} + {g.param((r, n))}", [out], -4, 4) if g.chance(0.5) else out
        else:
            out = g.want((r, n))
        if g.chance(0.6):
            out = g.emit((r, n), g.choose(["jnp.minimum({0}, 0.3)", "jax.nn.relu({0})", "jnp.clip({0}, -0.1, 0.1)"]), [out])
        returns(g, block, [out])
    return g.emit((r, n), 'v.gather_all({f0}, reduce="max")', [], -4, 4, blocks=[block], gathered=True)


def condition(g: Maker) -> Var:
    """`lax.cond` and `lax.switch` on integers and truth values; the branches close over values of the vertex."""
    if g.depth > 1:
        raise NoFit
    x = g.pick()
    by = g.want((), "b" if g.chance(0.5) else "i")
    blocks, results = [], []
    for _ in range(2):
        y = g.fresh("y", x.shape, "f", x.lo, x.hi, x.gathered)
        with g.inside([y]) as block:
            some(g, 0, 2)
            returns(g, block, [z := g.want(x.shape)])
        blocks.append(block)
        results.append(z)
    lo, hi = min(z.lo for z in results), max(z.hi for z in results)
    text = "jax.lax.cond({0}, {f0}, {f1}, {1})" if by.kind == "b" else "jax.lax.switch({0} % 2, [{f0}, {f1}], {1})"
    return g.emit(x.shape, text, [by, x], lo, hi, blocks=blocks, gathered=True)


def transformed(g: Maker) -> Var:
    """`jax.jit`, `jax.checkpoint`, `jax.grad`, `jax.jvp` of a function that closes over things."""
    if g.depth > 1:
        raise NoFit
    x = g.pick(where=lambda v: v.size > 0)
    how = (
        g.choose(["jit", "checkpoint", "grad", "grad", "value_and_grad", "jvp"]) if not g.simple else g.choose(["jit", "grad"])
    )
    y = g.fresh("y", x.shape, "f", x.lo, x.hi, x.gathered)
    with g.inside([y]) as block:
        some(g, 1, 3)
        z = latest(g, block)
        if "grad" in how:
            bound = max(abs(z.lo), abs(z.hi)) * max(z.size, 1)
            z = g.emit((), "jnp.sin({0}).sum()", [z], -bound, bound)
        returns(g, block, [z])
    if "grad" in how:
        text = "jax.grad({f0})({0})" if how == "grad" else "jax.value_and_grad({f0})({0})[1]"
        return g.emit(x.shape, f"jnp.tanh({text})", [x], -1, 1, blocks=[block], gathered=True)
    if how == "jvp":
        return g.emit(z.shape, "jnp.tanh(jax.jvp({f0}, ({0},), (jnp.cos({0}),))[1])", [x], -1, 1, blocks=[block], gathered=True)
    return g.emit(z.shape, f"jax.{how}({{f0}})({{0}})", [x], z.lo, z.hi, blocks=[block], gathered=True)


STATEMENTS: list[tuple[Callable[[Maker], Var], float]] = [
    (plain.unary, 5),
    (plain.binary, 5),
    (plain.positive, 1.5),
    (plain.divided, 0.7),
    (plain.vector, 2),
    (plain.scalar, 1.5),
    (plain.product, 7),
    (plain.shared, 1),
    (plain.between_rows, 1.5),
    (plain.shaped, 2),
    (integers.integer, 4),
    (integers.arithmetic, 1.5),
    (integers.reduced, 1.5),
    (integers.random_bits, 2),
    (plain.constant, 0.7),
    (odd.literal, 1.2),
    (odd.saturated, 0.8),
    (odd.ruled, 1.5),
    (odd.empty, 0.3),
    (gather, 3),
    (gather_all, 4),
    (pairs, 1.2),
    (leaf_branch, 1),
    (heads, 1.2),
    (loop, 1),
    (over_rows, 0.8),
    (condition, 1),
    (transformed, 1.5),
]
TABLES: dict[int, list[tuple[Callable[[Maker], Var], float]]] = {
    ANY: STATEMENTS,
    NATIVE: [
        (plain.unary, 6),
        (plain.binary, 5),
        (plain.positive, 1.5),
        (plain.divided, 0.7),
        (plain.scalar, 1.5),
        (plain.product, 7),
        (plain.shared, 1.5),
        (plain.between_rows, 1.5),
        (plain.shaped, 1.5),
        (integers.simple_integer, 1.5),
        (integers.arithmetic, 3),
        (integers.reduced, 2),
        (plain.constant, 0.5),
        (odd.literal, 1),
        (odd.saturated, 0.7),
        (odd.ruled, 1.5),
        (gather, 3),
        (gather_all, 3),
        (heads, 0.4),
        (leaf_branch, 1),
        (transformed, 0.3),
    ],
    PERSISTENT: [
        (plain.unary, 6),
        (plain.binary, 5),
        (plain.positive, 1.5),
        (plain.divided, 0.7),
        (plain.scalar, 1),
        (plain.product, 6),
        (plain.shared, 1),
        (integers.simple_integer, 1.5),
        (plain.constant, 0.5),
        (odd.literal, 0.7),
        (odd.saturated, 0.5),
        (odd.ruled, 0.2),
        (gather, 3),
        (gather_all, 3),
        (leaf_branch, 1),
        (transformed, 0.3),
    ],
}


def statement(g: Maker) -> Var | None:
    """Adds one random statement, or none if no variable in scope fits it."""
    table = TABLES[g.level]
    make = g.choose([s for s, _ in table], [w for _, w in table])
    try:
        return make(g)
    except NoFit:
        return None
