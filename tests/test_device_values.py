"""The operators of `_mosaic.value`: MLIR folds the operations that they emit for constants to what NumPy computes."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

if jax.__version_info__ < (0, 11):
    pytest.skip("the kernels need jax 0.11", allow_module_level=True)

from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir, passmanager
from jax._src.lib.mlir.dialects import func

from cavs.kernels._mosaic.value import bitcast, compare, constant, int32, int64, maximum, minimum, select, zero_extended

SIGNED = [operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor, operator.lshift]
SIGNED += [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]
UNSIGNED = [operator.rshift, operator.floordiv, operator.mod]
PAIRS = [(-7, 3), (7, 3), (2**31 - 1, 5), (-(2**31), 31), (5, 5), (-1, 1)]


def folded(emit: Callable[[], list[Any]]) -> list[float]:
    """Returns the constants to which MLIR folds the values that `emit` emits."""
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            func.FuncOp.from_py_func()(lambda: emit())
        passmanager.PassManager.parse("builtin.module(canonicalize)").run(module.operation)
        *_, end = module.body.operations[0].regions[0].blocks[0].operations
        kinds = [str(value.type) for value in end.operands]
        found = [value.owner.opview.literal_value for value in end.operands]
        return [x % 2 if kind == "i1" else x for x, kind in zip(found, kinds, strict=True)]


@pytest.mark.parametrize("number", [False, True])
def test_operators_compute_what_numpy_does(number: bool) -> None:
    """On signed integers; `>>`, `//` and `%` on unsigned ones. The right operand is a value, or a Python number."""
    got = folded(lambda: [op(int32(a), b if number else int32(b)) for op in SIGNED + UNSIGNED for a, b in PAIRS])
    with np.errstate(over="ignore"):
        want = [int(op(np.int32(a), np.int32(b))) for op in SIGNED for a, b in PAIRS]
    want += [int(op(np.uint32(a % 2**32), np.uint32(b)).view(np.int32)) for op in UNSIGNED for a, b in PAIRS]
    assert got == want


def test_functions_compute_what_they_say() -> None:
    def emit() -> list[Any]:
        i32, i64, f32 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64), ir.F32Type.get()
        minus, two = int32(-1), constant(f32, 2)
        integers = [minimum(minus, 2), maximum(minus, 2), select(minus == 1, 5, minus), int64(minus)]
        unsigned = [compare("ult", minus, 2), zero_extended(i64, minus), bitcast(i32, two)]
        return [*integers, *unsigned, two + 0.5, two - 0.5, two * two]

    assert folded(emit) == [-1, 2, -1, -1, 0, 2**32 - 1, 0x40000000, 2.5, 1.5, 4]


def test_a_value_is_no_condition_of_python() -> None:
    with pytest.raises(TypeError, match="write `mu.when` or `select`"):
        folded(lambda: [int32(1) if int32(1) == 1 else int32(0)])
