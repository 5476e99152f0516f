"""Random statements without blocks of their own: maths, products, shapes, integers, truth values, constants."""

import math
from collections.abc import Callable

import numpy as np

from tests.random_maker import ANY, NATIVE, PERSISTENT, Maker, NoFit
from tests.random_programs import Var

# template, bounds of its result for values in (lo, hi), and the lowest level that may have it.
UNARY: list[tuple[str, Callable[[float, float], tuple[float, float]], int]] = [
    ("jnp.tanh({0})", lambda a, b: (math.tanh(a), math.tanh(b)), PERSISTENT),
    ("jnp.sin({0})", lambda a, b: (-1, 1), PERSISTENT),
    ("jax.nn.sigmoid({0})", lambda a, b: (1 / (1 + math.exp(-a)), 1 / (1 + math.exp(-b))), PERSISTENT),
    ("jax.nn.relu({0} + 0.1)", lambda a, b: (0, max(0, b + 0.1)), PERSISTENT),
    ("jax.nn.gelu({0})", lambda a, b: (-0.2, max(0, b)), PERSISTENT),
    ("jax.nn.silu({0})", lambda a, b: (-0.3, max(0, b)), PERSISTENT),
    ("jax.nn.softplus({0})", lambda a, b: (math.log1p(math.exp(a)), math.log1p(math.exp(b))), PERSISTENT),
    ("jnp.abs({0})", lambda a, b: (0, max(abs(a), abs(b))), PERSISTENT),
    ("{0} ** 2", lambda a, b: (0, max(a * a, b * b)), PERSISTENT),
    ("jnp.square({0})", lambda a, b: (0, max(a * a, b * b)), PERSISTENT),
    ("jnp.log(1 + {0} * {0})", lambda a, b: (0, math.log1p(max(a * a, b * b))), PERSISTENT),
    ("jnp.sqrt(0.5 + {0} * {0})", lambda a, b: (0.5, max(abs(a), abs(b)) + 0.8), PERSISTENT),
    ("jnp.exp(-{0} * {0})", lambda a, b: (0, 1), PERSISTENT),
    ("1 / (1 + {0} ** 2)", lambda a, b: (0, 1), PERSISTENT),
    ("jnp.clip({0}, -0.7, 0.8)", lambda a, b: (max(-0.7, min(a, 0.8)), min(0.8, max(b, -0.7))), PERSISTENT),
    ("-0.7 * {0}", lambda a, b: (-0.7 * b, -0.7 * a), PERSISTENT),
    ("jnp.where({0} > 0.05, {0}, 0.3 * {0})", lambda a, b: (min(a, 0), max(b, 0)), PERSISTENT),
    ("jax.lax.stop_gradient({0})", lambda a, b: (a, b), PERSISTENT),
    ("bend({0})", lambda a, b: (-1, 1), PERSISTENT),
    ("clipped({0})", lambda a, b: (a, b), NATIVE),
    ("{0}.astype(jnp.float32).astype(D)", lambda a, b: (a, b), ANY),
    ("jnp.cos({0})", lambda a, b: (-1, 1), PERSISTENT),
    ("jax.lax.erf({0})", lambda a, b: (-1, 1), PERSISTENT),
    ("jnp.exp2(-jnp.abs({0}))", lambda a, b: (0, 1), PERSISTENT),
    ("jnp.log1p({0} * {0})", lambda a, b: (0, math.log1p(max(a * a, b * b))), PERSISTENT),
    ("jnp.expm1(-{0} * {0})", lambda a, b: (-1, 0), PERSISTENT),
    ("{0} ** 3", lambda a, b: (a**3, b**3), PERSISTENT),
    ("(1.2 + {0} * {0}) ** -2", lambda a, b: (0, 1), PERSISTENT),
    ("{0} ** 2.0", lambda a, b: (0, max(a * a, b * b)), PERSISTENT),
    ("{0} ** 3.0", lambda a, b: (a**3, b**3), PERSISTENT),
    ("({0} ** 1 + {0} ** 0)", lambda a, b: (a + 1, b + 1), PERSISTENT),
    ("jnp.where({0}.astype(bool), {0}, 0.5)", lambda a, b: (min(a, 0.5), max(b, 0.5)), PERSISTENT),
    ("jax.lax.erfc({0})", lambda a, b: (0, 2), ANY),
    ("(1.5 + jnp.sin({0})) ** {0}", lambda a, b: (0, 250), PERSISTENT),
    ("jnp.sign({0} - 0.03) * {0}", lambda a, b: (-max(abs(a), abs(b)), max(abs(a), abs(b))), PERSISTENT),
    (
        "jax.lax.clamp(jnp.full_like({0}, -0.4), {0}, jnp.full_like({0}, 0.6))",
        lambda a, b: (max(-0.4, min(a, 0.6)), min(0.6, max(b, -0.4))),
        NATIVE,
    ),
    ("jnp.floor(2 * {0} + 0.07)", lambda a, b: (2 * a - 1, 2 * b + 1), NATIVE),
    ("jnp.ceil(3 * {0} - 0.02) / 3", lambda a, b: (a - 1, b + 1), NATIVE),
    ("jnp.round(2 * {0} + 0.03)", lambda a, b: (2 * a - 1, 2 * b + 1), ANY),
    ("jnp.where(jnp.isfinite({0}), {0}, 0.5)", lambda a, b: (min(a, 0.5), max(b, 0.5)), PERSISTENT),
    ("jnp.arctan({0})", lambda a, b: (-1.6, 1.6), ANY),
    ("jnp.sinh({0} / 3)", lambda a, b: (-4, 4), ANY),
    ("jnp.cbrt(2 + {0} * {0})", lambda a, b: (1, 4), ANY),
    ("jax.lax.select_n(({0} > 0.02).astype(jnp.int32) + ({0} > 0.4), {0}, 2 * {0}, -{0})", lambda a, b: (-2 * abs(b), 9), ANY),
]
# Only for values of at least 0.2. Padding rows and missing children may hold less, and must not matter.
POSITIVE = ["1 / {0}", "jnp.log({0})", "jnp.sqrt({0})", "jax.lax.rsqrt({0})", "{0} ** 1.5", "{0} ** -0.5", "jnp.log2({0})"]
VECTOR: list[tuple[str, Callable[[Var], tuple[float, float]]]] = [
    ("jax.nn.softmax({0}, axis=-1)", lambda v: (0, 1)),
    ("jax.nn.log_softmax({0}, axis=-1)", lambda v: (-20, 0)),
    ("jnp.cumsum({0}, axis=-1)", lambda v: (-v.size * 2, v.size * 2)),
    ("jnp.sort({0}, axis=-1)", lambda v: (v.lo, v.hi)),
    ("jnp.flip({0}, -1)", lambda v: (v.lo, v.hi)),
    ("jnp.roll({0}, 1, -1)", lambda v: (v.lo, v.hi)),
    ("{0}[..., ::-1]", lambda v: (v.lo, v.hi)),
    ("({0} - {0}.mean()) * jax.lax.rsqrt({0}.var() + 0.1)", lambda v: (-3, 3)),
    ("({0} - {0}.mean()) / jnp.sqrt({0}.var() + 0.1)", lambda v: (-3, 3)),
    ("jnp.fft.ifft(jnp.fft.fft({0}) * 0.9).real", lambda v: (-3, 3)),
    ("jnp.abs(jnp.fft.fft({0} + 2)) / 9", lambda v: (-6, 6)),
    ("jnp.fft.irfft(jnp.fft.rfft({0}), {0}.shape[-1])", lambda v: (-3, 3)),
    ("{0} / jnp.sqrt(0.3 + ({0} ** 2).sum())", lambda v: (-1, 1)),
    ("{0}[jnp.argsort({0}.reshape(-1))[0] % {0}.shape[0]] * {0}", lambda v: (-6, 6)),
    ("{0}.at[0].set(0.5)", lambda v: (min(v.lo, 0.5), max(v.hi, 0.5))),
    ("{0}.at[-1].add({0}[0])", lambda v: (2 * min(v.lo, 0), 2 * max(v.hi, 0))),
    ("jnp.where(jnp.arange({0}.shape[-1]) > 0, {0}, 0)", lambda v: (min(v.lo, 0), max(v.hi, 0))),
    ("{0} * jnp.linspace(-1, 1, {0}.shape[-1], dtype=D)", lambda v: (-6, 6)),
    ("jnp.concatenate([{0}, {0}[:0]])", lambda v: (v.lo, v.hi)),
    ("jax.lax.cumlogsumexp({0}) / 4", lambda v: (-2, 4)),
    ("jax.lax.associative_scan(jnp.add, {0}) / 3", lambda v: (-6, 6)),
    ("jnp.convolve({0}.reshape(-1), np.array([0.5, -0.25, 0.1]).astype(D), mode='same').reshape({0}.shape)", lambda v: (-3, 3)),
]
SCALAR = [
    "{0}.sum()",
    "{0}.mean()",
    "{0}.max()",
    "{0}.min()",
    "jax.nn.logsumexp({0})",
    "jnp.prod({0})",
    "({0} * {0}).sum()",
    "{0}.var()",
    "jnp.linalg.norm({0} + 3)",
    "jnp.median({0})",
]
SIMPLE_SCALAR = ["{0}.sum()", "{0}.mean()", "{0}.max()", "{0}.min()", "jax.nn.logsumexp({0})", "({0} * {0}).sum()"]


def unary(g: Maker) -> Var:
    x = g.pick()
    template, bounds, _ = g.choose([u for u in UNARY if u[2] <= g.level])
    if "float32" in template:
        g.coarse = max(g.coarse, 1e-7)
    return g.emit(x.shape, template, [x], *bounds(x.lo, x.hi))


def positive(g: Maker) -> Var:
    x = g.pick(where=lambda v: v.lo >= 0.2)
    return g.emit(x.shape, g.choose(POSITIVE), [x], -3, 5)


def divided(g: Maker) -> Var:
    y = g.pick(where=lambda v: v.lo >= 0.2)
    x = g.pick(shape=y.shape)
    return g.emit(x.shape, "{0} / {1}", [x, y], -max(abs(x.lo), abs(x.hi)) / y.lo, max(abs(x.lo), abs(x.hi)) / y.lo)


def vector(g: Maker) -> Var:
    x = g.pick(shape=1 if g.chance(0.7) else 2, where=lambda v: v.size > 1)
    template, bounds = g.choose(VECTOR)
    if len(x.shape) == 2 and ("argsort" in template or "cumlog" in template) or "convolve" in template and x.size < 3:
        raise NoFit
    return g.emit(x.shape, template, [x], *bounds(x))


def scalar(g: Maker) -> Var:
    x = g.pick(where=lambda v: v.size > 1)
    template = g.choose(SCALAR if g.level == ANY else SIMPLE_SCALAR)
    inner = template in ("{0}.mean()", "{0}.max()", "{0}.min()", "jnp.median({0})")
    bound = x.size * max(x.lo * x.lo, x.hi * x.hi, 1)
    return g.emit((), template, [x], *((x.lo, x.hi) if inner else (-bound, bound)))


def stretched(g: Maker, x: Var, y: Var) -> tuple[Var, str]:
    """Another operand than `y` for a matrix, now and then: a vector whose axis of 1 JAX repeats. And how it is written."""
    forms = [(v, text) for v in g.scope for text in ("{1}", "{1}[None]", "{1}[:, None]") if v.kind == "f" and len(v.shape) == 1]
    forms = [(v, text) for v, text in forms if len(x.shape) == 2 and v.size == x.shape[0 if ":" in text else 1]]
    rng = np.random.default_rng([g.count, len(forms)])  # of its own, so that the other statements of a seed stay
    return forms[rng.integers(len(forms))] if forms and x.size and rng.random() < 0.6 else (y, "{1}")


def binary(g: Maker) -> Var:
    x = g.pick()
    y, at = stretched(g, x, g.pick(shape=x.shape) if g.chance(0.85) else g.pick(shape=()))
    a, b = max(abs(x.lo), abs(x.hi)), max(abs(y.lo), abs(y.hi))
    how = g.choose(["+", "-", "*", "maximum", "minimum", "*", "+", "mod"])
    if how == "mod":
        return g.emit(x.shape, f"jnp.hypot({{0}} + 3, {at})", [x, y], -WIDEST, WIDEST) if g.level == ANY else binary(g)
    if how in ("maximum", "minimum"):
        pick = max if how == "maximum" else min
        return g.emit(x.shape, f"jnp.{how}({{0}}, {at})", [x, y], pick(x.lo, y.lo), pick(x.hi, y.hi))
    bounds = {"+": (x.lo + y.lo, x.hi + y.hi), "-": (x.lo - y.hi, x.hi - y.lo), "*": (-a * b, a * b)}[how]
    if how == "*" and min(x.lo, y.lo) >= 0:
        bounds = (x.lo * y.lo, x.hi * y.hi)
    return g.emit(x.shape, f"{{0}} {how} {at}", [x, y], *bounds)


WIDEST = 20.0


def product(g: Maker) -> Var:
    """A product with a parameter, weights turned round or shared now and then."""
    x = g.pick(shape=1 if g.chance(0.85) or g.simple else 2, where=lambda v: v.size > 0)
    n, m = x.shape[-1], g.widths[0] if g.simple else g.choose(g.widths)
    b = 2 * max(abs(x.lo), abs(x.hi))
    if len(x.shape) == 2:
        r = x.shape[0]
        forms = [
            (f"{{0}} @ {g.param((n, m))}", (r, m)),
            (f"{g.param((m, r))} @ {{0}}", (m, n)),
            (f"{{0}} @ {g.param((n,))}", (r,)),
            (f"jnp.einsum('ij,jk->ki', {{0}}, {g.param((n, m))})", (m, r)),
            (f"{{0}}.T @ {g.param((r, m))}", (n, m)),
        ]
    else:
        forms = [
            (f"{{0}} @ {g.param((n, m))}", (m,)),
            (f"{{0}} @ {g.param((n, m))}", (m,)),
            (f"{{0}} @ {g.param((m, n))}.T", (m,)),
            (f"{{0}} @ {g.param((n, m))} + {g.param((m,))}", (m,)),
            (f"jnp.tanh({{0}} @ {g.param((n, m))}) @ {g.param((m, m))}", (m,)),
        ]
        if not g.simple:
            forms += [
                (f"{g.param((m, n))} @ {{0}}", (m,)),
                (f"{g.param((n, m))}.T @ {{0}}", (m,)),
                (f"jnp.einsum('j,kj->k', {{0}}, {g.param((m, n))})", (m,)),
                (f"jnp.dot({{0}}, {g.param((n, m))} * {g.param((m,))})", (m,)),
                (f"({{0}} @ {g.param((n, 2 * m))})[{m}:]", (m,)),
                (f"{{0}} @ {g.param((2 * n, m))}[:{n}]", (m,)),
                (f"jnp.split({{0}} @ {g.param((n, 2 * m))}, 2)[0]", (m,)),
                (f"jnp.tensordot({g.param((m, n))}, {{0}}, 1)", (m,)),
                (f"{{0}} @ {g.param((2, n, m))}[1]", (m,)),
                (f"jnp.einsum('i,kij->kj', {{0}}, {g.param((2, n, m))}).sum(0)", (m,)),
                (f"({{0}} @ {g.param((n, m))}).reshape(1, {m})[0]", (m,)),
                (f"{{0}} @ {g.param((n,))}", ()),
            ]
    text, shape = g.choose(forms)
    return g.emit(shape, text, [x], -b, b)


def shared(g: Maker) -> Var:
    """Two or three rows times one weight, so that its gradient is one product; or the weight is added or scaled, too."""
    x = g.pick(shape=1, where=lambda v: v.size > 0 and (not g.simple or v.shape == (g.widths[0],)))
    y, w = g.want(x.shape), g.param((x.size, x.size))
    b = 2 * (max(abs(x.lo), abs(x.hi)) + max(abs(y.lo), abs(y.hi)))
    forms = [f"{{0}} @ {w} + {{1}} @ {w}", f"jnp.tanh({{0}} @ {w}) * ({{1}} @ {w})", f"({{0}} @ {w} + {{1}} @ {w}) @ {w}"]
    if not g.simple:
        forms += [f"{{0}} @ {w} + {w}[0] * {{1}}", f"({{0}}[:, None] * {w} + {w}).sum(0) + {{1}} @ {w}"]
    return g.emit(x.shape, g.choose(forms), [x, y], -2 * b - 2, 2 * b + 2)


def between_rows(g: Maker) -> Var:
    """Products of values of the vertex's own: inner, outer, matrix times vector, tensor layers."""
    x = g.pick(shape=1, where=lambda v: v.size > 0)
    n, m = x.shape[0], g.choose(g.widths)
    b = 2 * max(abs(x.lo), abs(x.hi)) ** 2
    how = g.choose(["dot", "outer", "tensor", "matrix", "matmul"])
    if how == "dot":
        return g.emit((), "{0} @ {1}", [x, g.want((n,))], -b, b)
    if how == "outer":
        y = g.want((m,))
        return g.emit((n, m), "jnp.outer({0}, {1})", [x, y], -b, b)
    if how == "tensor":
        y = g.want((m,))
        return g.emit((n,), f"jnp.einsum('i,ijk,k->j', {{0}}, {g.param((n, n, m))}, {{1}})", [x, y], -b, b)
    a = g.pick(shape=2, where=lambda v: v.size > 0)
    if how == "matmul":
        y = g.want((a.shape[1], m))
        return g.emit((a.shape[0], m), "{0} @ {1}", [a, y], -WIDEST, WIDEST)
    y = g.want((a.shape[1],))
    return g.emit((a.shape[0],), "{0} @ {1}", [a, y], -WIDEST, WIDEST)


def shaped(g: Maker) -> Var:
    """Adds a statement that only moves values."""
    x = g.pick(where=lambda v: v.size > 0)
    n = g.choose(g.widths)
    if x.shape == ():
        return g.emit((n,), f"jnp.broadcast_to({{0}}, ({n},))", [x], x.lo, x.hi)
    if len(x.shape) == 2:
        r, c = x.shape
        text, shape = g.choose(
            [
                ("{0}.T", (c, r)),
                ("{0}[0]", (c,)),
                ("{0}[:, -1]", (r,)),
                ("{0}.sum(0) / 4", (c,)),
                ("{0}.mean(1)", (r,)),
                ("{0}.max(0)", (c,)),
                ("{0}.reshape(-1)[:2]", (min(2, x.size),)),
                ("jnp.diagonal({0})", (min(r, c),)),
            ]
        )
        return g.emit(shape, text, [x], min(x.lo, 0) * 2, max(x.hi, 0) * 2)
    k, y = x.shape[0], g.want(x.shape)
    text, shape = g.choose(
        [
            ("jnp.stack([{0}, {1}])", (2, k)),
            ("jnp.concatenate([{0}, {1}])[1::2]", (k,)),
            ("jnp.split(jnp.concatenate([{0}, {1}]), 2)[1]", (k,)),
            ("jnp.concatenate([{0}[1:], {1}[:1]])", (k,)),
            (f"jnp.pad({{0}}[:1], (0, {k - 1}))", (k,)),
            ("{0}[-1]", ()),
            ("jnp.stack([{0}, {1}], 1)", (k, 2)),
            ("jnp.concatenate([{1}[:1], {0}])", (k + 1,)),
            (f"jnp.where(np.arange({k}) % 2 == 0, {{0}}, {{1}})", (k,)),
            (f"jnp.tile({{0}}, 2)[{k}:]", (k,)),
            (f"jnp.repeat({{0}}, 2)[:{k}]", (k,)),
            ("jax.lax.dynamic_slice({0}, (0,), (1,))", (1,)),
        ][: None if g.level == ANY else -4]
    )
    return g.emit(shape, text, [x, y], min(x.lo, y.lo, 0), max(x.hi, y.hi, 0))


def constant(g: Maker) -> Var:
    n = g.choose(g.widths)
    if g.chance(0.5):
        return g.emit((n,), f"jnp.asarray(np.cos(np.arange({n})), D)", [], -1, 1)
    if g.chance(0.4) and not g.simple:
        return g.emit((n,), g.param((n,), 0.4, 1.2), [], 0.4, 1.2)
    return g.emit((n,), g.param((n,)), [], -1.5, 1.5)
