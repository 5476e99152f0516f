"""Implements MLIR's arithmetic on Python numbers, so that tests can run code that is emitted for a GPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np

WORD = 0xFFFFFFFF


def bits(x: Any) -> int:
    return int(np.float32(x).view(np.uint32)) if isinstance(x, float | np.floating) else int(x)


ARITHMETIC = SimpleNamespace(
    addi=lambda a, b: a + b,
    subi=lambda a, b: a - b,
    muli=lambda a, b: a * b,
    andi=lambda a, b: a & b,
    ori=lambda a, b: a | b,
    shli=lambda a, b: a << b & WORD,
    shrui=lambda a, b: (a & WORD) >> b,
    divui=lambda a, b: a // b,
    remui=lambda a, b: a % b,
    minui=min,
    select=lambda p, a, b: a if p else b,
    extsi=lambda kind, x: x,
    constant=lambda kind, x: x,
    cmpi=lambda kind, a, b: a >= b,
    cmpf=lambda kind, a, b: np.isnan(a),
    bitcast=lambda kind, x: bits(x),
    CmpFPredicate=SimpleNamespace(UNO=None),
    CmpIPredicate=SimpleNamespace(uge=None),
)
