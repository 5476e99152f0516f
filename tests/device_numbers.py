"""Implements MLIR's arithmetic on Python numbers, so that tests can run code that is emitted for a GPU."""

import itertools
import operator
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

WORD = 0xFFFFFFFF


def bits(x: Any) -> int:
    return int(np.float32(x).view(np.uint32)) if isinstance(x, float | np.floating) else int(x)


# The functions of `_mosaic.value` and `_mosaic.mlir`; Python's operators do the rest.
FUNCTIONS = {
    "as_index": int,
    "binary": lambda operation, a, b: {"minui": min}[operation](a, b),
    "bitcast": lambda kind, x: bits(x) if kind == "i32" else x,
    "compare": lambda predicate, a, b: {"uge": operator.ge}[predicate](a, b),
    "constant": lambda kind, x: x,
    "element": lambda register: register,
    "int32": int,
    "int64": int,
    "minimum": min,
    "scalar": int,
    "select": lambda condition, a, b: a if condition else b,
    "address": lambda ref, space: ref.begin,
    "ir": SimpleNamespace(
        F32Type=SimpleNamespace(get=lambda: "f32"),
        IntegerType=SimpleNamespace(get_signless=lambda n: f"i{n}"),
        MemRefType=lambda kind: kind,
    ),
}


def compute_numbers(monkeypatch: pytest.MonkeyPatch, modules: Sequence[Any], **functions: Any) -> None:
    """Makes modules of `_mosaic` compute Python numbers instead of emitting operations, with more functions of these names."""
    for module, (name, function) in itertools.product(modules, (FUNCTIONS | functions).items()):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, function)
