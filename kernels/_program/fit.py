"""Which equations the persistent kernels can compute; each refusal names the equation."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cavs.kernels._program.jaxprs import STATIC, Atom, Domains, Eqn, Var, aval, describe, domain_of, is_var
from cavs.kernels._program.operations import ConstantRead, Source
from cavs.kernels._program.widths import padded_unit, unit_width


class Unfit(ValueError):
    """A program cannot run in the persistent kernels; the text names the equation and says why."""


# Primitives that act on each element alone and that Mosaic GPU lowers, or that `_body.primitives` writes with those it lowers.
ELEMENTWISE = frozenset(
    """add sub mul div rem max min neg abs sign exp exp2 log log2 tanh logistic erf sin cos sqrt rsqrt square integer_pow
    one_minus_square select_n clamp eq ne lt le gt ge and or not convert_element_type add_any copy copy_p stop_gradient
    atan2""".split()
)
STRUCTURE = frozenset("reshape squeeze expand_dims split slice concatenate broadcast_in_dim stack unstack pad".split())
ACROSS = {"spread": "", "reduce_children_sum": "sum", "reduce_children_max": "max"}  # between rows and edges
REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}


def check_known(eqn: Eqn) -> None:
    """Raises `Unfit` for a primitive or a dtype that has no device code. Call it before widths are known."""
    name = eqn.primitive.name
    if name not in {*ELEMENTWISE, *STRUCTURE, *ACROSS, *REDUCTIONS, "dot_general"}:
        raise Unfit(f"{describe(eqn)}: the primitive {name} has no device code")
    check_dtypes((*eqn.outvars, *filter(is_var, eqn.invars)), describe(eqn))


def check_dtypes(values: Iterable[Atom], where: str) -> None:
    """Raises `Unfit` if one of some values has a dtype that the kernels do not load, compute and store."""
    if other := [v for v in values if aval(v).dtype not in (np.float32, np.int32, np.bool_)]:
        raise Unfit(f"{where}: float32 values are needed, with int32 and bool beside them, not {aval(other[0]).dtype}")


def check(eqn: Eqn, domains: Domains, unit: int) -> None:
    """Raises `Unfit` for an equation that does not work on whole vectors of `unit` elements."""
    name = eqn.primitive.name
    _check_widths(eqn, domains, unit)
    if name in (*REDUCTIONS, "reduce_children_sum", "reduce_children_max") and aval(eqn.outvars[0]).dtype != np.float32:
        raise Unfit(f"{describe(eqn)}: only float32 values can be summed, or their maximum taken")
    if name in ELEMENTWISE or name in ACROSS:
        return
    if name in STRUCTURE:
        if not _moves_whole_units(eqn, unit):
            raise Unfit(f"{describe(eqn)}: only whole blocks of {unit} numbers can be moved")
        return
    if name in REDUCTIONS:
        if tuple(eqn.params["axes"]) != tuple(range(aval(eqn.invars[0]).ndim)):
            raise Unfit(f"{describe(eqn)}: only a sum or maximum over all numbers of a vertex is possible")
        return
    if not is_product(eqn, domains):
        raise Unfit(f"{describe(eqn)}: only a vertex's value times a parameter matrix is possible")
    weight = aval(eqn.invars[1])
    if any(n % unit for n in weight.shape) or weight.dtype != np.float32:
        raise Unfit(f"{describe(eqn)}: the weight must be float32 and its sizes multiples of {unit}")


def _check_widths(eqn: Eqn, domains: Domains, unit: int) -> None:
    is_dot = eqn.primitive.name == "dot_general"
    read = [x for x in eqn.invars if is_var(x) and (domain_of(x, domains) != STATIC or not is_dot)]
    for v in (*eqn.outvars, *read):
        shape = aval(v).shape
        if int(np.prod(shape)) != 1 and (not shape or shape[-1] % unit):
            raise Unfit(f"{describe(eqn)}: a width that is no multiple of {unit}")


def _moves_whole_units(eqn: Eqn, unit: int) -> bool:
    """Whether an equation of `STRUCTURE` moves whole unit vectors."""
    name, p = eqn.primitive.name, eqn.params
    x, out = aval(eqn.invars[0]), aval(eqn.outvars[0])
    last = len(x.shape) - 1
    match name:
        case "slice":
            whole = not (p["start_indices"][-1] % unit or p["limit_indices"][-1] % unit)
            return whole and (p["strides"] is None or max(p["strides"]) == 1)
        case "unstack":
            return p["axis"] != last
        case "stack":
            return p["axis"] != last + 1
        case "pad":
            low, high, inside = zip(*p["padding_config"], strict=True)
            return not (any(inside) or min(*low, *high) < 0 or low[-1] % unit or high[-1] % unit)
        case "reshape":
            return p["dimensions"] is None
        case "broadcast_in_dim" if int(np.prod(x.shape)) > 1:
            return x.shape[-1] == out.shape[-1] and p["broadcast_dimensions"][-1] == out.ndim - 1
    return True


def is_product(eqn: Eqn, domains: Domains) -> bool:
    """Whether an equation multiplies a vertex's (or an edge's) value with a matrix that is the same for all."""
    if eqn.primitive.name != "dot_general":
        return False
    x, w = eqn.invars
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    varying = domain_of(x, domains) != STATIC and domain_of(w, domains) == STATIC
    return varying and not batch and tuple(contracted) == (len(aval(x).shape) - 1,) and len(aval(w).shape) == 2


def contracted_axis(eqn: Eqn) -> int:
    """The axis of a product's matrix that is contracted."""
    return eqn.params["dimension_numbers"][0][1][0]


def reads_all_units(eqn: Eqn, domains: Domains) -> bool:
    """Whether an equation reads all units of its operand, of which thread blocks own parts."""
    return is_product(eqn, domains) or eqn.primitive.name in REDUCTIONS


def varying(eqn: Eqn, domains: Domains) -> list[Var]:
    """The variables that an equation reads and that differ from vertex to vertex."""
    return [x for x in eqn.invars if is_var(x) and domain_of(x, domains) != STATIC]


def unit_of(eqns: Sequence[Eqn], domains: Domains, sources: Mapping[Var, Source], multiple: int) -> tuple[int, int]:
    """Returns the number of elements of a unit vector, and its width in memory; products sum over multiples of `multiple`.

    Raises:
        Unfit: If the unit would have to be padded to more than twice its elements.
    """
    inside = [v for e in eqns for v in (*e.invars, *e.outvars) if domain_of(v, domains) != STATIC]
    valid = unit_width([*inside, *(v for v, s in sources.items() if not isinstance(s, ConstantRead))])
    summed = [aval(e.invars[1]).shape[contracted_axis(e)] for e in eqns if is_product(e, domains)]
    unit = padded_unit(valid)
    if any(k // valid * unit % multiple for k in summed):
        unit = padded_unit(valid, multiple)
    if unit > 2 * valid:
        raise Unfit(
            f"the greatest common divisor of the widths in F's recurrent part is {valid}, and vectors of {valid} would be "
            f"padded to {unit}; choose widths that are multiples of 16, or of one hidden size that is at least 8"
        )
    return valid, unit
