"""Initial weights that all programs share."""

from typing import Any

import jax


def glorot(key: jax.Array, rows: int, columns: int, dtype: Any, gates: int = 1) -> jax.Array:
    """(rows, gates * columns): `gates` matrices side by side, each uniform in +-sqrt(6 / (rows + columns)).

    Glorot and Bengio, 2010, equation 16, for each gate by itself: the fused matrix is no wider a layer than its gates.
    """
    if not rows + columns:
        raise ValueError("init: a matrix of weights has neither rows nor columns; wanted sizes (hidden, ...) of at least 1.")
    limit = (6 / (rows + columns)) ** 0.5
    return jax.random.uniform(key, (rows, gates * columns), dtype, -limit, limit)
