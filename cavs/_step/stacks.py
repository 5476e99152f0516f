"""Runs a training step over a stack that is not full, and over the parts of a batch on several devices."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex
from jax.sharding import PartitionSpec

from cavs._feed.batches import Batches
from cavs._graphs.pytree import PyTree

OneStep: TypeAlias = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


def run_filled(fun: OneStep, state: PyTree, stack: PyTree, filled: jax.Array, length: int) -> tuple[PyTree, PyTree]:
    """Runs `fun` over the first `filled` batches of a stack of `length` batches. Metrics of the others are zeros."""

    def at(i: jax.Array) -> PyTree:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), stack)

    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stack)
    trace = jax.make_jaxpr(fun, return_shape=True)
    closed, shapes = trace(state, like)  # traced once, for its shapes and for the loop
    if any(x.dtype != new.dtype for x, new in zip(jax.tree.leaves(state), jax.tree.leaves(shapes[0]), strict=True)):
        # A Python number, which takes the type that the function gives it, as in `lax.scan`.
        state = jax.tree.map(lambda x, new: x if x.dtype == new.dtype else x.astype(new.dtype), state, shapes[0])
        closed, shapes = trace(state, like)
    run, treedef = jex.jaxpr_as_fun(closed), jax.tree.structure(shapes)
    none = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), shapes[1])

    def one(i: jax.Array, done: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        state, metrics = jax.tree.unflatten(treedef, run(*jax.tree.leaves((done[0], at(i)))))
        return state, jax.tree.map(lambda into, x: lax.dynamic_update_index_in_dim(into, x, i, 0), done[1], metrics)

    return lax.fori_loop(0, filled, one, (state, none))


def divided(fun: Callable[..., PyTree], batches: Batches) -> Callable[..., PyTree]:
    """Runs `fun(state, tree)` on each device of the mesh of `batches`, with the part of `batches.stack` of that device.

    The state and what `fun` returns are the same on all devices.
    """
    assert batches.mesh is not None
    (axis,) = batches.mesh.axis_names
    before = 0 if batches.count is None else 1

    def local(state: PyTree, tree: PyTree) -> PyTree:
        return fun(state, jax.tree.map(lambda x: x.reshape(*x.shape[:before], *x.shape[before + 1 :]), tree))

    spec, every = PartitionSpec(), PartitionSpec(*(None,) * before, axis)
    return jax.shard_map(local, mesh=batches.mesh, in_specs=(spec, every), out_specs=spec)
