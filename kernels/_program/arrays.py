"""The arrays that a launch is given, and the tensors that it writes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from cavs.kernels._program.jaxprs import Domain
from cavs.kernels._program.names import Index, Tensor

# The scalars that every launch has; the bases that sources name follow.
NUM_LEVELS, NUM_ROWS, NUM_EDGES = 0, 1, 2
_FIELDS = ("tensors", "constants", "integers", "updated")  # of `Arrays`: those that hold arrays
_K = TypeVar("_K")


class Ref(Protocol):
    """A reference to a buffer inside a kernel, as Pallas passes it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def at(self) -> Any: ...
    def __getitem__(self, index: Any) -> jax.Array: ...
    def __setitem__(self, index: Any, value: Any) -> None: ...


@dataclasses.dataclass(frozen=True)
class Output:
    """A tensor that a launch writes: (rows, width) of `dtype`, for rows or edges (`domain`) from `scalars[base]` on.

    Unless it is `sparse`, the launch fills the rows after the last vertex with zeros. It never fills those before `base`.
    """

    rows: int
    width: int
    dtype: np.dtype
    domain: Domain
    base: int | None = None
    sparse: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """The arrays of a launch, by the names that its `LevelProgram` uses.

    Attributes:
        tensors: (rows, width) tensors that are read.
        constants: Flat float32 vectors that are the same for all rows.
        integers: int32 vectors; see `_program.names.IndexRole`.
        updated: Tensors that are read and written.
        outputs: The tensors that the launch writes.
        replaced: The tensors that are read from the buffer of an updated one, whose rows replace theirs.
    """

    tensors: dict[Tensor, jax.Array]
    constants: dict[Tensor, jax.Array]
    integers: dict[Index, jax.Array]
    updated: dict[Tensor, jax.Array]
    outputs: dict[Tensor, Output]
    replaced: dict[Tensor, Tensor] = dataclasses.field(default_factory=dict)

    def values(self) -> list[list[Any]]:
        """The arrays alone, in lists: JAX would sort dicts, whose order is that in memory."""
        return [list(getattr(self, field).values()) for field in _FIELDS]

    def with_values(self, values: Sequence[Sequence[Any]]) -> "Arrays":
        """The same with other arrays, as `values` returns them."""
        named = {field: getattr(self, field) for field in _FIELDS}
        return dataclasses.replace(self, **{k: dict(zip(named[k], x, strict=True)) for k, x in zip(named, values, strict=True)})

    def without_values(self) -> "Arrays":
        """The same with `None` in place of each array."""
        return self.with_values([[None] * len(x) for x in self.values()])


def concatenated(vectors: Mapping[_K, jax.Array], dtype: type) -> tuple[jax.Array, dict[_K, tuple[int, int]]]:
    """Returns all vectors as one, and the (begin, size) of each."""
    parts = [jnp.asarray(x, dtype).reshape(-1) for x in vectors.values()]
    ends = np.cumsum([x.shape[0] for x in parts])
    rest = np.array([0, 0, 0, 1], dtype)  # so that it is not empty; if all were 0, XLA would fill it by a kernel
    whole = jnp.concatenate([*parts, rest])
    return whole, {k: (int(e) - x.shape[0], x.shape[0]) for k, x, e in zip(vectors, parts, ends, strict=True)}
