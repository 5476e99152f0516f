"""What one equation of a jaxpr costs: floating-point operations, bytes, and whether it is worth storing its result."""

import math

import jax

from cavs._jaxpr.jaxprs import Atom, Eqn, all_equations, bodies_in

REDUCTIONS = {
    "argmax", "argmin", "reduce", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum",
    "reduce_xor",
}  # fmt: skip
CUMULATIVE = {"cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"}
# Never run again unless a budget asks for it. The list follows Echo's compute-heavy operators; random bits cost about a
# hundred integer operations an element, so a mask of one byte is stored instead.
_COSTLY = {
    *CUMULATIVE, "cavs_conv", "cavs_conv_filters", "conv_general_dilated", "cond", "custom_vjp_call", "dot_general", "fft",
    "pallas_call", "ragged_dot_general", "random_bits", "random_gamma", "reduce_window", "scan", "scatter", "scatter-add",
    "sort", "threefry2x32", "top_k", "while", "ffi_call", "native_call", "shard_map", "custom_partitioning",
}  # fmt: skip
# In F these do not run again unless the caller allows it: they cost more than storing their results. Unlike in a function that
# runs once, random bits are not among them: a level computes them in registers.
_COSTLY_IN_F = {
    "cavs_conv", "cavs_conv_filters", "dot_general", "conv_general_dilated", "scan", "while", "cond", "custom_vjp_call", "sort",
    "reduce_children_max",
}  # fmt: skip
_CONVOLUTIONS = {"cavs_conv", "cavs_conv_filters"}  # `cavs.conv`
_PRODUCTS = {*_CONVOLUTIONS, "conv_general_dilated", "dot_general", "pallas_call", "ragged_dot_general", "scan", "while"}
_LINEAR_ALGEBRA = {"cholesky", "eig", "eigh", "lu", "qr", "geqrf", "svd", "triangular_solve", "schur", "householder_product"}
_RANDOM = {"random_bits", "random_gamma", "threefry2x32"}
_RANDOM_FLOPS = 100
# Price of running a cheap equation again, in bytes for each byte that it moves. Low enough that every saving of more than a
# few percent is taken, high enough that statistics of a row (a mean, a variance) are stored and not reduced again.
_REDUCE_PRICE = 1 / 64
_MAP_PRICE = 1 / 4096


def bytes_of_var(x: Atom) -> int:
    """Returns the bytes of a variable's value on the device."""
    itemsize = getattr(getattr(x.aval, "dtype", None), "itemsize", 4)  # tokens have no dtype
    return 0 if on_host(x) else math.prod(getattr(x.aval, "shape", ())) * itemsize


def on_host(x: Atom) -> bool:
    return getattr(x.aval, "memory_space", None) == jax.memory.Space.Host


def is_costly(eqn: Eqn) -> bool:
    """Returns whether the result of an equation is stored rather than computed twice, unless a budget asks for it."""
    return any(e.primitive.name in _COSTLY or e.primitive.name in _LINEAR_ALGEBRA or e.effects for e in all_equations([eqn]))


def is_costly_in_f(eqn: Eqn) -> bool:
    """Returns whether the result of an equation of F is stored rather than computed twice, unless the caller allows that."""
    return any(e.primitive.name in _COSTLY_IN_F for e in all_equations([eqn]))


def is_heavy(eqn: Eqn) -> bool:
    """Returns whether an equation is, or contains, a product: the others are fused with their neighbours."""
    return any(e.primitive.name in _PRODUCTS for e in all_equations([eqn]))


def may_repeat(eqn: Eqn) -> bool:
    """Returns whether an equation can be run twice at all: not if it has side effects or an unknown number of steps."""
    return not any(e.effects or e.primitive.name == "while" for e in all_equations([eqn]))


def flops_of(eqn: Eqn) -> float:
    """Returns the operations of an equation: of products exactly, of a `while` for one step, of the rest one an element."""
    name, out = eqn.primitive.name, sum(math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars)
    if name == "dot_general":
        contracted = eqn.params["dimension_numbers"][0][0]
        return 2.0 * out * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        return 2.0 * out * math.prod(kernel) / kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    if name in _CONVOLUTIONS:
        pixels = eqn.outvars[0] if name == "cavs_conv" else eqn.invars[1]
        return 18.0 * math.prod(pixels.aval.shape) * eqn.invars[0].aval.shape[3]
    if name in _RANDOM:
        return float(_RANDOM_FLOPS * out)
    if name in _LINEAR_ALGEBRA:
        shape = eqn.invars[0].aval.shape
        return float(math.prod(shape) * min(shape[-2:], default=1))
    if name == "sort":
        return out * math.log2(max(2, max(eqn.invars[0].aval.shape, default=2)))
    bodies = [sum(map(flops_of, body.eqns)) for body in bodies_in(eqn)]
    if bodies:
        return max(bodies) if name == "cond" else eqn.params.get("length", 1) * sum(bodies)
    return float(max(out, sum(math.prod(getattr(x.aval, "shape", ())) for x in eqn.invars)) if name in REDUCTIONS else out)


def price_of(eqn: Eqn) -> float:
    """Returns the price in bytes of running a cheap equation again. It decides between cuts of about equal size."""
    out, into = sum(map(bytes_of_var, eqn.outvars)), sum(map(bytes_of_var, eqn.invars))
    return into * _REDUCE_PRICE if into > 2 * out and eqn.primitive.name in REDUCTIONS else out * _MAP_PRICE
