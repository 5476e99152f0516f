"""What the `init` of all programs shares."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax.typing import DTypeLike

Init = TypeVar("Init", bound=Callable[..., Any])


def one_program(init: Init) -> Init:
    """Compiles `init(self, key)` of a program, which is hashable, as a whole. Else each line of it compiles some programs."""
    return cast(Init, jax.jit(init, static_argnums=0))


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
