"""Functions that the `init` methods of all programs share."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

Init = TypeVar("Init", bound=Callable[..., Any])


def one_program(init: Init) -> Init:
    """Compiles `init(self, key)` of a program, which is hashable, as a whole. Else each line of it compiles some programs.

    Raises (when called):
        TypeError: If a size is not an int, a switch is not a bool, or `key` is not a key.
        ValueError: If a size is negative, or there are no layers.
    """
    compiled = jax.jit(init, static_argnums=0)

    @functools.wraps(init)
    def checked(self: Any, key: jax.Array) -> Any:
        for field in dataclasses.fields(self):
            if field.type is bool:
                check_switch(f"{type(self).__name__}: {field.name}", getattr(self, field.name))
            if field.type is not int:
                continue
            size, least, name = getattr(self, field.name), int(field.name == "layers"), f"{type(self).__name__}: {field.name}"
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
                raise TypeError(f"{name}: got {size!r}; expected an int. Write {field.name}=64.")
            if size < least:
                raise ValueError(f"{name}: got {size}; expected an int >= {least}. Write {field.name}={2 if least else 64}.")
        if not jax.dtypes.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key) and not jnp.ndim(key):
            raise TypeError(f"init: key: got {key!r}; expected a key. Write program.init(jax.random.key(0)).")
        return compiled(self, key)

    return cast(Init, checked)


def check_switch(argument: str, value: object) -> None:
    """Raises `TypeError` if `value` is no bool; `argument` names it in the message."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{argument}: got {value!r:.80}; expected True or False.")


def glorot(key: jax.Array, rows: int, columns: int, dtype: DTypeLike, gates: int = 1) -> jax.Array:
    """Draws the weights of `gates` matrices side by side, each uniform in +-sqrt(6 / (rows + columns)).

    Glorot and Bengio, 2010, equation 16. The limit is that of a single gate, although the gates share one matrix.

    Args:
        key: A key of `jax.random`.
        rows: The rows of each matrix.
        columns: The columns of each matrix.
        dtype: The dtype of the weights.
        gates: The number of matrices.

    Returns:
        The weights, (rows, gates * columns).

    Raises:
        ValueError: If `rows` and `columns` are both 0.
    """
    if not rows + columns:
        raise ValueError("init: got a matrix of weights without rows and columns; expected sizes (hidden, ...) of at least 1.")
    limit = (6 / (rows + columns)) ** 0.5
    return jax.random.uniform(key, (rows, gates * columns), dtype, -limit, limit)
