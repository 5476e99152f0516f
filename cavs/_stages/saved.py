"""What the forward pass of a batch saves for the backward pass."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax

from cavs._graphs.pytree import PyTree
from cavs._stages.tensors import Values

# The transpose of a linearized function, from `jax.vjp`: a pytree of the arrays that the transpose reads. It gets cotangents.
Transpose: TypeAlias = Callable[..., tuple[PyTree, ...]]


class Saved(NamedTuple):
    """The residuals of `run`: a pytree of arrays. "For each kind" means in the order of the schedule's kinds."""

    # For each kind, the transpose of the eager part: cotangents of its rows to those of static values, of the pulled rows,
    # and of the rows of edges.
    eager: list[Transpose]
    # For each kind, the outputs of the eager part, (inner rows of the kind, ...) or (edges, ...). An engine that pulls in
    # the levels has inputs among them where these lie.
    eager_rows: list[list[Values]]
    edges: list[jax.Array]  # the leaves of the edges, (Ep, ...)
    # For each kind, the values of the recurrent part that the lazy part reads, (inner rows, ...) or (edges, ...).
    extras: list[list[jax.Array]]
    inputs: list[jax.Array]  # the leaves of the inputs, (Vp, ...)
    # For each kind, the values of the recurrent part that the backward levels read, as the engine lays them out.
    kept: list[list[jax.Array]]
    lazy: list[Transpose]  # for each kind, the transpose of the lazy part; empty if every push is a scattered state
    # For each kind, the transpose of F at the leaves: cotangents of states and pushes to those of params and the pulled
    # rows.
    leaf: list[Transpose]
    states: list[jax.Array]  # the dynamic tensor of each leaf of the state, (rows of the schedule, ...)
    static: list[Transpose]  # for each kind, the transpose of the static part: from static values to params
    statics: list[list[jax.Array]]  # for each kind, the static values, which have no vertex axis
