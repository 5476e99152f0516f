"""Engine `native`: which operation of its library computes an elementwise equation."""

from collections.abc import Sequence

import jax.numpy as jnp

from cavs._function.jaxprs import Atom, Eqn
from cavs.kernels import Unfit

# In the order of `Code` in kernels/_cpu/elementwise.h.
OPERATIONS = (
    "add sub mul div max min neg abs sign sqrt rsqrt square exp exp2 log log1p expm1 tanh logistic erf sin cos pow integer_pow "
    "floor ceil one_minus_square copy eq ne lt le gt ge select_n clamp add_i sub_i mul_i max_i min_i neg_i abs_i sign_i eq_i "
    "ne_i lt_i le_i gt_i ge_i and or not xor to_float to_int to_bool to_bool_i is_finite"
).split()
CODE = {name: code for code, name in enumerate(OPERATIONS)}
_SAME = {"add_any": "add"}
_BITS = ("and", "or", "xor", "select_n")  # the same for integers and floats
REDUCTIONS = {
    "reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_and": "min", "reduce_or": "max",
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
    kinds = {letter(x) for x in eqn.invars}
    if name == "select_n":
        if len(eqn.invars) != 3:
            raise Unfit("select_n of more than two cases")
        return name
    if name == "is_finite" or kinds == {"f"}:
        return name
    if name in _BITS or (name == "not" and kinds == {"b"}):
        return name
    if kinds <= {"i", "b"} and f"{name}_i" in CODE:
        return f"{name}_i"
    raise Unfit(f"{name} of {', '.join(str(x.aval.dtype) for x in eqn.invars)}")


def _converted(before: str, after: str) -> str:
    if before == after or before + after == "bi":
        return "view"
    if after == "f":
        return "to_float"
    if after == "i":
        return "to_int"
    return "to_bool" if before == "f" else "to_bool_i"


def reduction(eqn: Eqn) -> int:
    """Returns the code of the operation that a reduction repeats."""
    name = REDUCTIONS[eqn.primitive.name]
    return CODE[name if letter(eqn.invars[0]) == "f" else f"{name}_i"]


def broadcasts(eqn: Eqn) -> Sequence[bool]:
    """Returns for each operand whether it is a scalar for results that are not."""
    size = eqn.outvars[0].aval.size
    return [size > 1 and x.aval.size == 1 for x in eqn.invars]
