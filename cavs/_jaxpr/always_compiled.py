"""Functions that run as compiled programs also under `jax.disable_jit`."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def always_compiled(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns `fn`, inside which `jax.disable_jit` has no effect.

    That switch lets users read values within their own functions. The levels of a batch are one program of XLA or of a kernel,
    which cannot run operation by operation. `cavs.interpret` runs F vertex by vertex, with values.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return fn(*args, **kwargs)
        with jax.disable_jit(False):
            return fn(*args, **kwargs)

    return call
