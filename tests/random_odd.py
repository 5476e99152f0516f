"""Random statements at the edges: signed zeros, infinities, NaN, saturation, rules of derivatives, values without elements."""

from collections.abc import Callable

from tests.random_maker import ANY, NATIVE, PERSISTENT, Maker, NoFit
from tests.random_programs import Var

Bounds = Callable[[float, float], tuple[float, float]]


def _largest(a: float, b: float) -> float:
    return max(abs(a), abs(b))


# template, bounds of its result for values in (lo, hi), and the lowest level that may have it. Gradients are finite. Signs of
# zeros become values here. They are those of products that are certain: sums of zeros in another order have other signs.
LITERALS: list[tuple[str, Bounds, int]] = [
    ("jax.lax.atan2(jnp.full_like({0}, -0.0), {0} + 0.25)", lambda a, b: (-3.2, 0), PERSISTENT),
    ("jax.lax.atan2(jnp.full_like({0}, 0.0), {0} - 0.25)", lambda a, b: (0, 3.2), PERSISTENT),
    ("jnp.arctan2(({0} + 0.25) * 0.0, jnp.full_like({0}, -1.0))", lambda a, b: (-3.2, 3.2), ANY),
    ("jnp.copysign({0}, jnp.zeros_like({0}) * -1.0)", lambda a, b: (-_largest(a, b), 0), ANY),
    ("jnp.copysign({0}, jnp.full_like({0}, -0.0))", lambda a, b: (-_largest(a, b), 0), ANY),
    ("jnp.copysign(jnp.full_like({0}, 0.5), ({0} - 0.25) * -0.0)", lambda a, b: (-0.5, 0.5), ANY),
    ("jnp.copysign(jnp.full_like({0}, 0.5), -(({0} + 0.25) * 0.0))", lambda a, b: (-0.5, 0.5), ANY),
    ("jnp.copysign(jnp.full_like({0}, 0.5), ({0} + 0.25) / -jnp.inf)", lambda a, b: (-0.5, 0.5), ANY),
    ("jnp.where(jnp.signbit(-jnp.abs({0}) * 0.0), 0.5, {0})", lambda a, b: (min(a, 0.5), max(b, 0.5)), ANY),
    ("jnp.tanh(1 / ((jax.lax.stop_gradient({0}) + 0.25) * 0.0))", lambda a, b: (-1, 1), NATIVE),
    ("jnp.tanh(1 / ((jax.lax.stop_gradient({0}) - 0.25) / -jnp.inf))", lambda a, b: (-1, 1), NATIVE),
    ("jnp.tanh(1 / -(jax.lax.stop_gradient({0} - 0.25) * 0.0))", lambda a, b: (-1, 1), NATIVE),
    ("jnp.tanh(1 / (jnp.full_like({0}, -0.0) + -0.0)) * {0}", lambda a, b: (-b, -a), NATIVE),
    ("jnp.tanh(1 / jnp.full_like({0}, -0.0)) * {0}", lambda a, b: (-b, -a), PERSISTENT),
    ("jnp.tanh(1 / (jnp.zeros_like({0}) * -2.0)) + {0}", lambda a, b: (a - 1, b - 1), NATIVE),
    ("jnp.where(jnp.isnan({0} + jnp.nan), {0}, 0.3)", lambda a, b: (min(a, 0.3), max(b, 0.3)), NATIVE),
    ("jnp.where(jnp.isnan(jax.lax.stop_gradient({0}) * 0.0 * jnp.inf), {0}, 0.3)", lambda a, b: (a, max(b, 0.3)), NATIVE),
    ("jnp.minimum({0}, jnp.inf)", lambda a, b: (a, b), PERSISTENT),
    ("jnp.maximum({0}, jnp.full_like({0}, -jnp.inf))", lambda a, b: (a, b), PERSISTENT),
    ("jnp.minimum(jnp.where({0} > 0.3, jnp.inf, {0}), 0.7)", lambda a, b: (min(a, 0.7), 0.7), PERSISTENT),
    ("jnp.exp(jnp.where({0} > 0.1, -{0}, -jnp.inf))", lambda a, b: (0, 1), PERSISTENT),
    ("1 / (jnp.abs({0}) + jnp.inf)", lambda a, b: (0, 0), NATIVE),
    ("({0} + -0.0)", lambda a, b: (a, b), PERSISTENT),
    ("(0.0 - {0})", lambda a, b: (-b, -a), PERSISTENT),
    ("jnp.where(jnp.isfinite(({0} + 0.25) / jnp.zeros_like({0})), 0.5, {0})", lambda a, b: (min(a, 0.5), max(b, 0.5)), NATIVE),
    ("jnp.nan_to_num(jax.lax.stop_gradient({0} + 0.25) / 0.0, nan=0.1, posinf=1.0, neginf=-1.0)", lambda a, b: (-1, 1), NATIVE),
    ("jnp.nan_to_num(jax.lax.stop_gradient({0}) / -jnp.zeros_like({0}), posinf=0.2, neginf=0.4)", lambda a, b: (0, 0.4), ANY),
]
SATURATED: list[tuple[str, Bounds, int]] = [
    ("jnp.tanh(40 * {0})", lambda a, b: (-1, 1), PERSISTENT),
    ("jnp.tanh(1e9 * {0})", lambda a, b: (-1, 1), PERSISTENT),
    ("jax.nn.sigmoid(60 * {0})", lambda a, b: (0, 1), PERSISTENT),
    ("jax.nn.sigmoid(-1e4 - {0})", lambda a, b: (0, 0), PERSISTENT),
    ("jnp.exp(-90 * jnp.abs({0}))", lambda a, b: (0, 1), PERSISTENT),
    ("jnp.expm1(-70 * jnp.abs({0}))", lambda a, b: (-1, 0), PERSISTENT),
    ("jax.nn.softplus(50 * {0}) / 50", lambda a, b: (0, max(b, 0) + 0.1), PERSISTENT),
    ("jax.lax.erf(9 * {0})", lambda a, b: (-1, 1), PERSISTENT),
    ("jax.nn.gelu(30 * {0}) / 30", lambda a, b: (-0.1, max(b, 0)), PERSISTENT),
    ("jax.nn.elu(200 * jnp.minimum({0}, 0))", lambda a, b: (-1, 0), PERSISTENT),
]
# Rules of derivatives that are not linear in the cotangent; `PRELUDE` of `random_cases` defines them.
RULES = ["limited({0})", "evened({0})", "signs({0})"]
# What is pushed and nothing reads: not finite, in the result or in the derivative.
NOT_FINITE = [
    "1 / (jax.lax.stop_gradient({0} + 0.25) * 0.0)",
    "1 / jnp.full_like({0}, -0.0) + {0}",
    "({0} * jnp.inf) * 0.0",
    "jnp.full_like({0}, -jnp.inf) + {0}",
    "jnp.full_like({0}, jnp.nan) + {0}",
    "jnp.where({0} > 0.1, {0}, jnp.nan)",
    "jnp.where({0} > 0.1, jnp.full_like({0}, jnp.inf), -jnp.inf)",
    "jnp.log(jax.lax.stop_gradient({0}) * 0.0)",
    "jnp.sqrt(jnp.minimum(jax.lax.stop_gradient({0}), -0.5))",
    "{0} + 0.0 * (jax.lax.stop_gradient({0} + 0.25) / 0.0)",
    "jnp.zeros_like({0}) * (jax.lax.stop_gradient({0}) / 0)",
    "jnp.zeros_like({0}) / (jax.lax.stop_gradient({0}) * 0)",
]


def literal(g: Maker) -> Var:
    return _one_of(g, LITERALS)


def saturated(g: Maker) -> Var:
    return _one_of(g, SATURATED)


def _one_of(g: Maker, table: list[tuple[str, Bounds, int]]) -> Var:
    x = g.pick()
    template, bounds, _ = g.choose([row for row in table if row[2] <= g.level])
    return g.emit(x.shape, template, [x], *bounds(x.lo, x.hi))


def ruled(g: Maker) -> Var:
    """A function with a rule of its own, also of what is the same for all vertices: parameters, constants, zeros of leaves."""
    n = g.choose(g.widths)
    if g.chance(0.3):
        x = g.emit((n,), g.choose([g.param((n,)), f"jnp.full(({n},), 0.25, D)"]), [], -1.5, 1.5)
    else:
        x = g.pick(where=lambda v: v.size > 0)
    if len(x.shape) == 1 and x.size and g.chance(0.4):
        m = g.widths[0] if g.simple else g.choose(g.widths)
        return g.emit((m,), f"limited_product({{0}}, {g.param((x.size, m))})", [x], -1, 1)
    return g.emit(x.shape, g.choose(RULES), [x], min(x.lo, -1), max(x.hi, 1))


def empty(g: Maker) -> Var:
    """Sums and products over no elements."""
    n = g.choose(g.widths)
    try:
        x = g.pick(shape=1, where=lambda v: v.size == 0)
    except NoFit:
        y = g.pick(shape=1)
        x = g.emit((0,), "{0}[:0]", [y])
    text, shape = g.choose(
        [
            (f"{{0}} @ {g.param((0, n))}", (n,)),
            (f"{g.param((n, 0))} @ {{0}}", (n,)),
            (f"({{0}}[:, None] * {g.param((n,))}).sum(0)", (n,)),
            ("{0}.sum()", ()),
            ("{0} * 2", (0,)),
            (f"jnp.concatenate([{{0}}, {g.param((n,))}])", (n,)),
        ]
    )
    return g.emit(shape, text, [x], -1.5, 1.5)


def not_finite(g: Maker) -> Var:
    """A value for a push of which some elements are infinite or NaN."""
    x = g.pick(where=lambda v: v.size > 0)
    return g.emit(x.shape, g.choose(NOT_FINITE), [x])
