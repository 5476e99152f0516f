"""Functions that mix dtypes, also where `jax_numpy_dtype_promotion` is `"strict"`, which is meant for what users write."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def promoting(fn: Callable[P, R]) -> Callable[P, R]:
    """Returns `fn`, inside which JAX promotes dtypes as it does by default."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_dtype_promotion("standard"):
            return fn(*args, **kwargs)

    return call
