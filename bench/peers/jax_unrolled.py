"""Peer: plain JAX with unrolled levels, gradients by `jax.grad`.

    pip install jax

The program contains each level with its own width (rounded up). No level is padded to the widest one, and XLA optimizes the
whole net, but each new sequence of widths compiles again, which takes seconds to minutes. The benchmark reports how often and
for how long. Steps are dispatched asynchronously, like those of Cavs.
"""

import functools

import jax.numpy as jnp
import numpy as np

from bench.peers import jax_scan
from bench.peers.levels import tree_levels


class JaxUnrolled(jax_scan.JaxScan):
    """One model, trained by a jitted step that is compiled for each sequence of level widths."""

    @staticmethod
    def _forward(cell):
        if cell == "lstm":
            return functools.partial(jax_scan._lstm, unroll=True)
        return functools.partial({"tree_lstm": jax_scan._tree_lstm, "tree_fc": jax_scan._tree_fc}[cell], sweep=_sweep)

    def schedule(self, batch):
        if self._cell == "lstm":
            return jax_scan.pad_chains(batch)
        lv = tree_levels(batch)
        leaves, sizes = jax_scan.rounded(len(lv.words)), np.array(lv.sizes)
        padded = np.array([1 << max(0, n - 1).bit_length() for n in lv.sizes])
        starts, padded_starts = np.cumsum(sizes) - sizes, leaves + np.cumsum(padded) - padded
        inner = np.arange(len(lv.left)) + np.repeat(padded_starts - starts, sizes)
        real = np.concatenate([np.arange(len(lv.words)), inner]).astype(np.int32)
        kids = [np.zeros((2, n), np.int32) for n in padded]
        for k, start, n in zip(kids, starts, sizes, strict=True):
            k[:, :n] = real[lv.left[start : start + n]], real[lv.right[start : start + n]]
        words = np.full(leaves, 1 << 30, np.int32)
        words[: len(lv.words)] = lv.words
        return {"words": words, "kids": kids, "read": real[lv.roots], "labels": lv.labels.astype(np.int32)}


def _sweep(leaves, kids, inner):
    """As in `jax_scan`, but each level reads a table that ends with the level below it."""
    table = leaves
    for left, right in kids:
        table = jnp.concatenate([table, inner(table[left], table[right])])
    return table
