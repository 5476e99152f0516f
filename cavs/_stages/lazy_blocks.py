"""Lazy batching in blocks of rows, if a product reads much more of a vertex than it scatters.

An example is the score of attention inside F: its lazy gradient reads a matrix per vertex, which is computed again from what
the vertex pulls. In blocks, this takes the memory of a block, and one pass over the gradients of the parameters per block.
"""

import jax
import jax.numpy as jnp
from jax import lax

from cavs._function.split import Split
from cavs._jaxpr.costs import bytes_of_var
from cavs._jaxpr.jaxprs import Env, is_var
from cavs._stages.blocks import block_of
from cavs._stages.cotangents import Floats, mask_rows, merged
from cavs._stages.entrance import Memory
from cavs._stages.lazy import lazy_gradients
from cavs._stages.tensors import Index, Rows, RowSpan, window


def lazy_block(part: Split, size: int) -> int:
    """Returns how many of `size` vertices lazy gradients are batched over at a time, 0 for all."""
    if part.gathers_all:  # the edges of a block would have to be found
        return 0
    read = [v for use in part.reverse.uses for v in use.operands.values() if is_var(v)]
    return block_of(max(map(bytes_of_var, read), default=0), sum(map(bytes_of_var, part.forward.states)), size)


def lazy_gradients_in_blocks(part: Split, rows: Rows, memory: Memory, cuts: Env, size: int) -> Floats:
    """Like `lazy_gradients` of all rows of a kind, `size` at a time."""

    def block(number: Index) -> Floats:
        first = jnp.asarray(number, jnp.int32) * size
        start = jnp.minimum(first, rows.size - size)  # the last block begins earlier, in rows of the one before it
        own = start + jnp.arange(size) >= first
        inside = {v: mask_rows(window(x, start, size), own) for v, x in cuts.items()}
        return lazy_gradients(part, rows, RowSpan(rows.pad + start, size, rows.edge_pad, 0), memory, inside)

    totals = {i: jnp.zeros(x.shape, x.dtype) for i, x in jax.eval_shape(block, 0).items()}
    return lax.fori_loop(0, -(-rows.size // size), lambda i, totals: merged(totals, block(i)), totals)
