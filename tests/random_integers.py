"""Random statements on integers, booleans and random keys."""

from tests.random_maker import ANY, Maker, NoFit
from tests.random_programs import Var


def integer(g: Maker) -> Var:
    how = g.choose(["arith", "compare", "float", "table", "argmax", "count", "has", "bool", "where", "hot", "power"])
    if how == "count":
        if g.chance(0.6):
            return g.emit((), "0.1 * v.num_children().astype(D)", [], 0, 2)
        return g.emit((), "v.num_children()", [], 0 if not g.no_leaf else 1, 20, "i")
    if how == "has":
        k = g.choose(range(4))
        if g.chance(0.6):
            x, y = g.pick(), g.pick(shape=())
            return g.emit(x.shape, f"jnp.where(v.has_child({k}), {{0}}, {{1}})", [x, y], min(x.lo, y.lo), max(x.hi, y.hi))
        return g.emit((), f"v.has_child({k})", [], kind="b")
    if how == "argmax":
        x = g.pick(shape=1, where=lambda v: v.size > 0)
        return g.emit((), "jnp.argmax({0}).astype(jnp.int32)", [x], 0, x.size - 1, "i")
    if how in ("bool", "where"):
        b = g.pick("b")
        if how == "bool":
            other = g.want(b.shape, "b")
            return g.emit(b.shape, g.choose(["{0} & {1}", "{0} | ~{1}", "{0} ^ {1}", "~({0} & {1})"]), [b, other], kind="b")
        x, y = g.want(b.shape), g.want(b.shape)
        return g.emit(b.shape, "jnp.where({0}, {1}, {2})", [b, x, y], min(x.lo, y.lo), max(x.hi, y.hi))
    i = g.pick("i")
    if how == "compare":
        return g.emit(i.shape, g.choose(["{0} > 1", "{0} % 2 == 0", "({0} & 1) == 1", "{0} == 0"]), [i], kind="b")
    if how == "float":
        return g.emit(i.shape, "0.1 * {0}.astype(D)", [i], 0.1 * i.lo, 0.1 * i.hi)
    if how == "table":
        n = g.choose(g.widths)
        if i.shape:
            raise NoFit
        return g.emit((n,), f"{g.param((4, n))}[{{0}} % 4]", [i], -1.5, 1.5)
    if how == "hot":
        n = g.choose(g.widths)
        if i.shape:
            raise NoFit
        return g.emit((n,), f"jax.nn.one_hot({{0}} % {n}, {n}, dtype=D)", [i], 0, 1)
    if how == "power":
        x = g.pick(shape=i.shape)
        return g.emit(x.shape, "jnp.sin({0} * {1})", [x, i], -1, 1)
    j = g.want(i.shape, "i")
    return g.emit(
        i.shape,
        g.choose(
            [
                "({0} + {1}) % 5",
                "({0} * {1}) % 7",
                "jnp.maximum({0}, {1})",
                "({0} ^ {1}) & 3",
                "jnp.where({0} > {1}, {0}, 1)",
                "({0} << 1) % 5",
            ]
        ),
        [i, j],
        0,
        max(7, i.hi, j.hi),
        "i",
    )


def simple_integer(g: Maker) -> Var:
    how = g.choose(["compare", "where", "count", "has"])
    if how == "count":
        return g.emit((), "0.1 * v.num_children().astype(D)", [], 0, 2)
    if how == "has":
        return g.emit((), f"v.has_child({g.choose(range(2))})", [], kind="b")
    if how == "compare":
        x = g.pick(where=lambda v: v.size > 0)
        return g.emit(x.shape, "{0} > 0.07", [x], kind="b")
    b = g.pick("b")
    x, y = g.want(b.shape), g.want(b.shape)
    return g.emit(b.shape, "jnp.where({0}, {1}, {2})", [b, x, y], min(x.lo, y.lo), max(x.hi, y.hi))


# Of engine native's operations on int32, and of those that it lacks. Overflow wraps.
INTEGERS = [
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "jnp.maximum({0}, {1})", "jnp.minimum({0}, {1})", "-{0}", "jnp.abs({0} - {1})",
    "jnp.sign({0} - 2)", "{0} & {1}", "{0} | {1}", "{0} ^ {1}", "jnp.where({0} > {1}, {0}, 5)", "({0} * 715827883) ^ {1}",
    "{0} * 1000003 * ({1} + 7)", "jnp.where({0} != {1}, {0} + 1, -{1})",
]  # fmt: skip
MORE_INTEGERS = [
    "~{0}", "{0} << 2", "({0} - 9) >> 1", "jax.lax.shift_right_logical({0} - 9, 0 * {0} + 28)", "{0} // 3", "({0} - 5) % 3",
    "jax.lax.population_count({0} * 77)", "jax.lax.clz({0})", "(300 * {0}).astype(jnp.uint8).astype(jnp.int32)",
    "(100 * {0}).astype(jnp.int8).astype(jnp.int32)", "({0}.astype(jnp.uint32) * 0x9E3779B9 >> 16).astype(jnp.int32)",
    "jax.lax.rem({0} - 5, jnp.full_like({0}, 3))", "jax.lax.div({0} - 9, {1} + 1)", "{0}.astype(jnp.int64).astype(jnp.int32)",
]  # fmt: skip
FLOATS = ["jnp.floor(3 * {0} + 0.04).astype(jnp.int32)", "({0} * 1e13).astype(jnp.int32)", "({0} + 0.02).astype(bool)"]
COMPARED = ["{0} == {1}", "{0} != {1}", "{0} < {1}", "{0} <= {1}", "{0} > {1} - 2", "{0} - 3 >= {1}", "{0}.astype(bool)"]


def arithmetic(g: Maker) -> Var:
    """An operation on int32, or one between int32 and floats or booleans."""
    if g.chance(0.25):
        x = g.pick(where=lambda v: v.size > 0)
        i = g.emit(x.shape, f"{g.choose(FLOATS)}.astype(jnp.int32) & 7", [x], 0, 7, "i")
    else:
        i = g.pick("i") if g.chance(0.8) else g.want((g.choose(g.widths),), "i")
    j = g.want(i.shape, "i")
    if g.chance(0.25):
        b = g.emit(i.shape, g.choose(COMPARED), [i, j], kind="b")
        return g.emit(b.shape, "{0}.astype(D) - 0.5", [b], -0.5, 0.5) if g.chance(0.5) else b
    template = g.choose(INTEGERS + MORE_INTEGERS if g.level == ANY else INTEGERS)
    out = g.emit(i.shape, f"({template}) & 7", [i, j], 0, 7, "i")
    return g.emit(out.shape, "0.1 * {0}.astype(D)", [out], 0, 0.7) if g.chance(0.4) else out


REDUCED = {
    "i": [
        "jnp.bitwise_or.reduce({0}, axis=None)",
        "jnp.bitwise_and.reduce({0} | 1, axis=None)",
        "jnp.bitwise_and.reduce({0}, axis=None)",
        "{0}.max()",
        "{0}.min()",
        "{0}.sum(dtype='int32')",
    ],
    "b": ["{0}.any()", "{0}.all()", "{0}.sum(dtype='int32') > 1", "~{0}.any()"],
}
MORE_REDUCED = {
    "i": [
        "jnp.bitwise_xor.reduce({0}, axis=None)",
        "jnp.prod({0}, dtype='int32')",
        "jnp.argmax({0})",
        "jnp.argmin({0} * 3 & 5)",
    ],
    "b": ["jnp.argmax({0}) == 0", "jnp.bitwise_xor.reduce({0}, axis=None)", "jnp.logical_and.reduce({0}, axis=None)"],
}


def reduced(g: Maker) -> Var:
    """A reduction of a vector or matrix of integers or booleans."""
    kind = g.choose("ib", [3, 1])
    n = g.choose([w for w in g.widths if w] or [1])
    if kind == "i" and g.chance(0.5):
        y = g.pick(where=lambda v: v.size > 1)
        x = g.emit(y.shape, "jnp.floor(9 * {0} + 0.3).astype(jnp.int32)", [y], -60, 60, "i")
    else:
        try:
            x = g.pick(kind, where=lambda v: v.size > 1)
        except NoFit:
            x = g.want((n,), kind)
    template = g.choose(REDUCED[kind] + MORE_REDUCED[kind] if g.level == ANY else REDUCED[kind])
    if kind == "b":
        return g.emit((), template, [x], kind="b")
    out = g.emit((), f"{template}.astype(jnp.int32) & 7", [x], 0, 7, "i")
    return g.emit((), "0.1 * {0}.astype(D)", [out], 0, 0.7) if g.chance(0.5) else out


def random_bits(g: Maker) -> Var:
    k = g.pick("k")
    n = g.choose(g.widths)
    if g.chance(0.5):
        g.coarse = max(g.coarse, 1e-7)
        return g.emit((n,), f"jax.random.normal({{0}}, ({n},), jnp.float32).astype(D)", [k], -3, 3)
    if g.chance(0.5):
        i = g.want((), "i")
        return g.emit((), "jax.random.fold_in({0}, {1})", [k, i], kind="k")
    x = g.want((n,))
    return g.emit((n,), "jnp.where(jax.random.bits({0}, {1}.shape) % 3 > 0, {1}, 0)", [k, x], min(x.lo, 0), max(x.hi, 0))
