"""Pull without a copy: rows of the inputs that the levels read where they lie."""

from typing import Any, NamedTuple, TypeAlias

import jax


def get_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the rows of `x` with the numbers `index` (gather, pull)."""
    return x.at[index].get(mode="promise_in_bounds")


class Pulled(NamedTuple):
    """Rows of the inputs, or of the edges, that are read where they lie."""

    source: jax.Array  # the leaf of the inputs or of the edges
    index: jax.Array  # (rows,) the numbers of the rows

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a copy."""
        return self.index.shape + self.source.shape[1:]

    @property
    def dtype(self) -> Any:
        """The dtype of the rows."""
        return self.source.dtype

    def copied(self) -> jax.Array:
        """Returns a copy."""
        return get_rows(self.source, self.index)


Values: TypeAlias = Any  # an array with one row for each vertex or edge, or `Pulled`
