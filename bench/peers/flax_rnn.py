"""Peer: Flax, `nnx.RNN` over padded sequences; cell "lstm" only.

    pip install flax

What a Flax user runs on sequences of unequal length: `nnx.RNN(nnx.OptimizedLSTMCell)` with the longest of the batch, rounded up
so that batches share compiled code. The loss does not count padding. Steps are dispatched asynchronously, like those of Cavs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.peers.jax_scan import rounded

_NO_WORD = 1 << 30


class FlaxRNN:
    """An LSTM language model's body on `nnx.RNN`."""

    def __init__(self, cell, params, threads=2, device="cpu"):
        if cell != "lstm":
            raise ValueError(f"flax_rnn runs the cell 'lstm', not {cell!r}")
        hidden = params["u"].shape[0]
        rnn = nnx.RNN(nnx.OptimizedLSTMCell(params["w"].shape[0], hidden, rngs=nnx.Rngs(0)))
        swapped = {k: _swap_og(params[k]) for k in ("w", "u", "b")}
        rnn.cell.dense_i.kernel[...] = jnp.array(swapped["w"])
        rnn.cell.dense_h.kernel[...] = jnp.array(swapped["u"])
        rnn.cell.dense_h.bias[...] = jnp.array(swapped["b"])
        self._graph, weights, self._rest = nnx.split(rnn, nnx.Param, ...)
        self._p = {"rnn": weights, **{k: jnp.array(params[k]) for k in ("out_w", "out_b")}}
        self._embed = jnp.array(params["embed"])
        self._step = jax.jit(self._train, donate_argnums=(0, 1))

    def params(self):
        cell = nnx.merge(self._graph, self._p["rnn"], self._rest).cell
        named = {"w": _swap_og(cell.dense_i.kernel), "u": _swap_og(cell.dense_h.kernel), "b": _swap_og(cell.dense_h.bias)}
        return {k: np.asarray(v) for k, v in (named | {"embed": self._embed, **self._p}).items() if k != "rnn"}

    def schedule(self, batch):
        """(chains, longest) words and labels, padded."""
        lengths = np.array([len(g["words"]) for g in batch])
        words = np.full((len(batch), rounded(lengths.max())), _NO_WORD, np.int32)
        labels = np.full(words.shape, -1, np.int32)
        real = np.arange(words.shape[1]) < lengths[:, None]
        words[real], labels[real] = (np.concatenate([g[k] for g in batch]) for k in ("words", "labels"))
        return words, labels

    def run(self, batches, lr=0.05):
        losses = []
        for batch in batches:
            self._p, self._embed, loss = self._step(self._p, self._embed, *self.schedule(batch), lr)
            losses.append(loss)
        jax.block_until_ready((self._p, self._embed, losses))
        return [float(x) for x in losses]

    def step(self, batch, lr=0.05):
        return self.run([batch], lr)[0]

    def compilations(self):
        return self._step._cache_size()

    def _train(self, p, embed, words, labels, lr):
        def loss(p, x):
            zeros = jnp.zeros((len(x), p["out_w"].shape[0]))
            h = nnx.merge(self._graph, p["rnn"], self._rest)(x, initial_carry=(zeros, zeros))
            log_p = jax.nn.log_softmax(h @ p["out_w"] + p["out_b"])
            of_label = jnp.take_along_axis(log_p, labels[..., None], -1, mode="clip")[..., 0]
            return -jnp.where(labels >= 0, of_label, 0).sum() / (labels >= 0).sum()

        value, (d_p, d_x) = jax.value_and_grad(loss, (0, 1))(p, embed.at[words].get(mode="clip"))
        return jax.tree.map(lambda a, d: a - lr * d, p, d_p), embed.at[words].add(-lr * d_x, mode="drop"), value


def _swap_og(w):
    """Gate order i, f, o, g to Flax's i, f, g, o along the last axis, and back."""
    i, f, o, g = np.split(np.asarray(w), 4, -1)
    return np.concatenate([i, f, g, o], -1)
