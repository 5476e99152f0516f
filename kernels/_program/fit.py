"""What the persistent kernels can compute, equation by equation; all else is refused by name."""

from typing import Any

import numpy as np

from cavs.kernels._program.specs import STATIC, Unfit, describe, is_var

# Primitives that act on each number alone and that Mosaic GPU lowers, or that `_body.evaluate` writes with those that it does.
ELEMENTWISE = frozenset(
    """add sub mul div rem max min neg abs sign exp exp2 log log2 tanh logistic erf erfc sin cos sqrt rsqrt square
    integer_pow one_minus_square select_n clamp eq ne lt le gt ge and or not convert_element_type add_any pow expm1 log1p
    copy copy_p stop_gradient atan2 is_finite tan cbrt""".split()
)
STRUCTURE = frozenset("reshape squeeze expand_dims split slice concatenate broadcast_in_dim stack unstack pad".split())
ACROSS = frozenset("spread reduce_children_sum reduce_children_max".split())  # between rows and edges
REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}


def check_known(eqn: Any) -> None:
    """Refuses a primitive or a dtype that there is no device code for: [`Unfit`][]. To be asked before widths are known."""
    name = eqn.primitive.name
    if name not in {*ELEMENTWISE, *STRUCTURE, *ACROSS, *REDUCTIONS, "dot_general"}:
        raise Unfit(f"{describe(eqn)}: the primitive {name} has no device code")
    for v in eqn.outvars:
        if v.aval.dtype not in (np.float32, np.int32, np.bool_):
            raise Unfit(f"{describe(eqn)}: float32 values are needed, with int32 and bool beside them")


def check(eqn: Any, level: dict[Any, int], unit: int) -> None:
    """Refuses an equation that does not work on whole vectors of `unit` numbers: [`Unfit`][]."""
    name = eqn.primitive.name
    read = [x for x in eqn.invars if is_var(x) and (level.get(x, STATIC) != STATIC or name != "dot_general")]
    for v in (*eqn.outvars, *read):
        size = int(np.prod(v.aval.shape))
        if size != 1 and (not v.aval.shape or v.aval.shape[-1] % unit):
            raise Unfit(f"{describe(eqn)}: a width that is no multiple of {unit}")
    if name.startswith("reduce") and eqn.outvars[0].aval.dtype != np.float32:
        raise Unfit(f"{describe(eqn)}: only float32 values can be summed, or their maximum taken")
    if name in ELEMENTWISE or name in ACROSS:
        return
    if name in STRUCTURE:
        _check_structure(eqn, unit)
        return
    if name in REDUCTIONS:
        x = eqn.invars[0].aval
        if tuple(eqn.params["axes"]) != tuple(range(x.ndim)):
            raise Unfit(f"{describe(eqn)}: only a sum or maximum over all numbers of a vertex is possible")
        return
    if is_product(eqn, level):
        weight = eqn.invars[1].aval
        if any(n % unit for n in weight.shape) or weight.dtype != np.float32:
            raise Unfit(f"{describe(eqn)}: the weight must be float32 and its sizes multiples of {unit}")
        return
    raise Unfit(f"{describe(eqn)}: only a vertex's value times a parameter matrix is possible")


def _check_structure(eqn: Any, unit: int) -> None:
    name, p = eqn.primitive.name, eqn.params
    last = len(eqn.invars[0].aval.shape) - 1
    bad = False
    if name == "slice":
        bad = p["strides"] is not None or bool(p["start_indices"][-1] % unit or p["limit_indices"][-1] % unit)
    elif name in ("unstack", "stack"):
        bad = p["axis"] == (last if name == "unstack" else last + 1)
    elif name == "pad":
        low, high, inside = zip(*p["padding_config"], strict=True)
        bad = any(inside) or min(*low, *high) < 0 or bool(low[-1] % unit or high[-1] % unit)
    elif name == "reshape":
        bad = p["dimensions"] is not None
    elif name == "broadcast_in_dim":
        x, out = eqn.invars[0].aval, eqn.outvars[0].aval
        if int(np.prod(x.shape)) > 1:
            bad = x.shape[-1] != out.shape[-1] or p["broadcast_dimensions"][-1] != out.ndim - 1
    if bad:
        raise Unfit(f"{describe(eqn)}: only whole blocks of {unit} numbers can be moved")


def is_product(eqn: Any, level: dict[Any, int]) -> bool:
    """Whether an equation is the product of a vertex's (or an edge's) value and a matrix that is the same for all."""
    if eqn.primitive.name != "dot_general":
        return False
    x, w = eqn.invars
    (lc, _), (lb, _) = eqn.params["dimension_numbers"]
    static = not is_var(w) or level.get(w, STATIC) == STATIC
    rows = is_var(x) and level.get(x, STATIC) != STATIC
    return rows and static and not lb and tuple(lc) == (len(x.aval.shape) - 1,) and len(w.aval.shape) == 2
