"""Integers and floats of a kernel, with Python's operators: these emit operations of MLIR's dialect `arith`."""

from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeAlias, Union

from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, memref, vector
from jax.experimental.mosaic.gpu import FragmentedArray

Operand: TypeAlias = Union["Value", float]


def binary(operation: str, a: "Value", b: Operand) -> "Value":
    """Emits an operation of `arith` on two values."""
    return Value(getattr(arith, operation)(a, _like(a, b)))


def compare(predicate: str, a: "Value", b: Operand) -> "Value":
    """Compares two integers by a predicate of `arith.CmpIPredicate`, such as "ult"."""
    return Value(arith.cmpi(arith.CmpIPredicate[predicate], a, _like(a, b)))


def _operator(integer: str, floating: str = "") -> Callable[["Value", Operand], "Value"]:
    return lambda self, other: binary(floating if isinstance(self.type, ir.FloatType) else integer, self, other)


def _comparison(predicate: str) -> Callable[["Value", Operand], "Value"]:
    return lambda self, other: compare(predicate, self, other)


class Value(ir.Value):
    """An integer or a float of a kernel. A right operand that is a Python number becomes a constant of the left one's type.

    Integers are signed in comparisons, `minimum`, `maximum` and `int64`: the number of a row may be -1. They are unsigned in
    `>>`, `//` and `%`. `compare` and `binary` emit what has no operator, such as unsigned comparisons.
    """

    __add__, __sub__, __mul__ = _operator("addi", "addf"), _operator("subi", "subf"), _operator("muli", "mulf")
    __floordiv__, __mod__, __lshift__, __rshift__ = map(_operator, ("divui", "remui", "shli", "shrui"))
    __and__, __or__, __xor__ = map(_operator, ("andi", "ori", "xori"))
    __lt__, __le__, __gt__, __ge__ = map(_comparison, ("slt", "sle", "sgt", "sge"))
    __hash__ = ir.Value.__hash__

    def __eq__(self, other: Operand) -> "Value":  # type: ignore[override]
        return compare("eq", self, other)

    def __ne__(self, other: Operand) -> "Value":  # type: ignore[override]
        return compare("ne", self, other)

    def __bool__(self) -> NoReturn:
        raise TypeError("Value: got bool(value), but no value is known while a kernel is lowered; write `mu.when` or `select`.")


minimum, maximum = partial(binary, "minsi"), partial(binary, "maxsi")


def select(condition: Value, value: Operand, other: Value) -> Value:
    """Returns `value` if the condition holds, else `other`."""
    return Value(arith.select(condition, _like(other, value), other))


def constant(kind: ir.Type, value: float) -> Value:
    """A constant of an MLIR type."""
    return Value(arith.constant(kind, float(value) if isinstance(kind, ir.FloatType) else int(value)))


def _like(value: Value, other: Operand) -> Value:
    return other if isinstance(other, Value) else constant(value.type, other)


def int32(value: ir.Value | int) -> Value:
    """An i32: a constant, or a value of MLIR's index type."""
    i32 = ir.IntegerType.get_signless(32)
    return Value(arith.index_cast(i32, value)) if isinstance(value, ir.Value) else constant(i32, value)


def int64(value: Value) -> Value:
    """Extends a signed i32 to an i64."""
    return Value(arith.extsi(ir.IntegerType.get_signless(64), value))


def zero_extended(kind: ir.Type, value: Value) -> Value:
    """Extends an unsigned integer to a wider type."""
    return Value(arith.extui(kind, value))


def bitcast(kind: ir.Type, value: Value) -> Value:
    """Reads the bits of a value as another type."""
    return Value(arith.bitcast(kind, value))


def as_index(value: Value | int) -> ir.Value:
    """Casts an i32 to MLIR's index type."""
    return arith.index_cast(ir.IndexType.get(), value if isinstance(value, Value) else int32(value))


def load_element(ref: ir.Value, *at: ir.Value) -> Value:
    """Loads `ref[at]`; the subscripts are i32 or of MLIR's index type."""
    return Value(memref.load(ref, [as_index(x) if isinstance(x, Value) else x for x in at]))


def scalar(array: FragmentedArray) -> Value:
    """The value of a scalar that Pallas passed as an array."""
    return Value(array.registers.flat[0])


def element(register: ir.Value) -> Value:
    """The value of a register that is a vector of one element, as in the layout of `mlir.tile_layout`."""
    return Value(vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0])))
