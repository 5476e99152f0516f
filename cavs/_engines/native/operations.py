"""Engine `native`: which operation of its library computes an elementwise equation."""

from collections.abc import Sequence

import jax.numpy as jnp

from cavs._jaxpr.jaxprs import Atom, Eqn
from cavs.kernels import NATIVE_OPERATIONS, Unfit

CODE = {name: operation.code for name, operation in NATIVE_OPERATIONS.items()}
_SAME = {"add_any": "add"}
REDUCTIONS = {
    "reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_and": "and", "reduce_or": "or",
    "reduce_children_sum": "add", "reduce_children_max": "max",
}  # fmt: skip


def letter(x: Atom) -> str:
    """Returns "f", "i" or "b": float32, int32 or bool.

    Raises:
        Unfit: If the dtype is another one.
    """
    dtype = x.aval.dtype
    for name, own in (("f", jnp.float32), ("i", jnp.int32), ("b", jnp.bool_)):
        if dtype == own:
            return name
    raise Unfit(f"it computes with {dtype}, and the library has float32, int32 and bool")


def elementwise(eqn: Eqn) -> str | None:
    """Returns the operation of an elementwise equation, "view" if it changes nothing, `None` if it is not elementwise.

    Raises:
        Unfit: If the library lacks this operation for the equation's dtypes.
    """
    name = _SAME.get(eqn.primitive.name, eqn.primitive.name)
    if name == "convert_element_type":
        return _converted(letter(eqn.invars[0]), letter(eqn.outvars[0]))
    if name not in CODE:
        return None
    operation = _operation(name, eqn.invars)
    if len(eqn.invars) != NATIVE_OPERATIONS[operation].operands:
        raise Unfit(f"{name} of {len(eqn.invars)} operands")
    return operation


def reduction(eqn: Eqn) -> int:
    """Returns the code of the operation that a reduction repeats.

    Raises:
        Unfit: If the library lacks it for the equation's dtype.
    """
    return CODE[_operation(REDUCTIONS[eqn.primitive.name], eqn.invars)]


def _operation(name: str, operands: Sequence[Atom]) -> str:
    """Returns the operation of this name for the dtypes of `operands`."""
    types = {letter(x) for x in operands}
    for own in (name, f"{name}_i"):
        if own in NATIVE_OPERATIONS and types <= NATIVE_OPERATIONS[own].types:
            return own
    raise Unfit(f"{name} of {', '.join(str(x.aval.dtype) for x in operands)}")


def _converted(before: str, after: str) -> str:
    if before == after or before + after == "bi":
        return "view"
    if after == "f":
        return "to_float"
    if after == "i":
        return "to_int"
    return "to_bool" if before == "f" else "to_bool_i"


def broadcasts(eqn: Eqn) -> Sequence[bool]:
    """Returns for each operand whether it is a scalar for results that are not."""
    size = eqn.outvars[0].aval.size
    return [size > 1 and x.aval.size == 1 for x in eqn.invars]
