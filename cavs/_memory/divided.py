"""What `plan` divides into parts: a batch of graphs (`divided_graphs`) or of arrays (`divided_arrays`)."""

import abc
import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp

from cavs._graphs.pytree import PyTree
from cavs._memory.search import Choice

Loss: TypeAlias = Callable[[PyTree, PyTree], jax.Array]
FEW = 16  # samples that are compared even if a part has fewer


class Divided(abc.ABC):
    """A batch that a plan divides into parts of equal numbers of samples."""

    noun: ClassVar[str]

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of samples."""

    @property
    @abc.abstractmethod
    def text(self) -> str:
        """Says how large the batch is."""

    @property
    def cause(self) -> str:
        """Says what else makes the smallest plan large."""
        return ""

    @abc.abstractmethod
    def choices(self, parts: int | None, segments: int | None) -> list[Choice]:
        """Returns how the batch can be computed, with a given number of parts or segments."""

    @abc.abstractmethod
    def time(self, choice: Choice) -> float:
        """Returns the estimated time of a choice, in any unit."""

    @abc.abstractmethod
    def in_parts(self, loss: Loss, choice: Choice) -> Loss:
        """Returns the loss of the whole batch, as `arranged` returns it."""

    @abc.abstractmethod
    def structs(self, choice: Choice) -> PyTree:
        """Returns the shapes and dtypes of the batch as `arranged` returns it."""

    @abc.abstractmethod
    def few(self, parts: int) -> tuple[PyTree, PyTree, int]:
        """Returns some samples in one part and in two, as `arranged` does, and their number; as many as in two of `parts`."""

    @abc.abstractmethod
    def arranged(self, batch: Any, choice: Choice) -> PyTree:
        """Returns another batch as `in_parts` gets it. The shapes are the same while it is no larger than earlier ones."""

    @property
    @abc.abstractmethod
    def whole(self) -> Any:
        """The batch itself."""


def values(tree: PyTree) -> PyTree:
    """Returns the arrays of a tree; where shapes alone are known, random numbers."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(0), max(1, len(leaves)))
    pairs = zip(leaves, keys, strict=False)
    return treedef.unflatten([_drawn(x, key) if isinstance(x, jax.ShapeDtypeStruct) else x for x, key in pairs])


def _drawn(x: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(key, x.shape)
    return (0.1 * jax.random.normal(key, x.shape)).astype(x.dtype)


def bytes_of_arrays(tree: PyTree) -> int:
    """Returns the bytes of all arrays of a tree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
