"""Fills uninitialised memory with NaN or with huge values. No bit of a result may depend on it."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from cavs.kernels import Output, persistent
from cavs.kernels._program.jaxprs import EDGE, ROW
from cavs.kernels._program.names import EDGE_OWNER, FIRST_EDGE
from tests.random_cases import Case, functions
from tests.random_check import batched
from tests.random_compare import Outcome, named

FILLS = {"NaN": np.nan, "huge numbers": 3e38}
_LAUNCH = persistent._launch


@contextlib.contextmanager
def poisoned(value: float) -> Iterator[None]:
    """A context in which uninitialised buffers hold `value`, and integers their largest value."""

    def filled(shape: Any, dtype: Any) -> Any:
        whole = jnp.issubdtype(dtype, jnp.integer)
        return jnp.full(shape, jnp.iinfo(dtype).max if whole else value, dtype)

    def launch(program: Any, config: Any, weights: Any, arrays: Any, reverse: bool, flows: bool, shared: bool) -> Any:
        count = {domain: arrays.integers[k].shape[0] for domain, k in ((ROW, FIRST_EDGE), (EDGE, EDGE_OWNER))}
        scratch = {n: Output(count[s.domain], s.width, s.dtype, s.domain) for n, s in program.scratch.items()}
        outputs = arrays.outputs | scratch
        waited = program.exchanged() if flows else set()  # these are initialised: with `UNWRITTEN`
        fresh = {n: filled((m.rows, m.width), m.dtype) for n, m in outputs.items() if n not in waited}
        arrays = dataclasses.replace(arrays, updated=fresh | arrays.updated)
        return _LAUNCH(program, config, weights, arrays, reverse, flows, shared)

    with mock.patch.object(jax.lax, "empty", filled), mock.patch.object(persistent, "_launch", launch):
        yield


def check_poison(case: Case) -> Outcome:
    """Checks that a case gives the same bits for any content of uninitialised memory."""

    def bits(fill: float | None) -> list[tuple[str, bytes]]:
        fns = functions(case.program, "float32" if case.options.float32 else "float64")
        with poisoned(fill) if fill is not None else contextlib.nullcontext():
            return [(name, x.tobytes()) for name, x in named(batched(case, fns))]

    plain = bits(None)
    for name, fill in FILLS.items():
        for (what, a), (_, b) in zip(plain, bits(fill), strict=True):
            if a != b:
                return Outcome("wrong", f"{name} in uninitialised memory changes results", what)
    return Outcome("ok")
