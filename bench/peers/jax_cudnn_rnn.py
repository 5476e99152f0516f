"""Peer: cuDNN's LSTM through `jax.experimental.rnn`, over padded sequences with their lengths; cell "lstm" only, GPU only.

    pip install 'jax[cuda13]'

The longest length of a batch is rounded up so that batches share compiled code. The loss does not count padding. cuDNN's second
bias stays zero, because the other systems have one bias. Steps are dispatched asynchronously, like those of Cavs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.rnn import lstm

from bench.peers.jax_scan import rounded

_NO_WORD = 1 << 30


class JaxCudnnRNN:
    """An LSTM language model's body on cuDNN."""

    def __init__(self, cell, params, threads=2, device="gpu"):
        if cell != "lstm":
            raise ValueError(f"jax_cudnn_rnn runs the cell 'lstm', not {cell!r}")
        # cuDNN's layout: a row for each gate's unit.
        self._p = {k: jnp.array(_swap_og(params[k]).T) for k in ("w", "u", "b")}
        self._p |= {k: jnp.array(params[k]) for k in ("out_w", "out_b")}
        self._embed = jnp.array(params["embed"])
        self._step = jax.jit(_step, donate_argnums=(0, 1))

    def params(self):
        p = {k: np.asarray(v) for k, v in (self._p | {"embed": self._embed}).items()}
        return p | {k: _swap_og(p[k].T) for k in ("w", "u", "b")}

    def schedule(self, batch):
        """(chains, longest) words and labels, padded; (chains,) lengths."""
        lengths = np.array([len(g["words"]) for g in batch], np.int32)
        words = np.full((len(batch), rounded(lengths.max())), _NO_WORD, np.int32)
        labels = np.full(words.shape, -1, np.int32)
        real = np.arange(words.shape[1]) < lengths[:, None]
        words[real], labels[real] = (np.concatenate([g[k] for g in batch]) for k in ("words", "labels"))
        return words, labels, lengths

    def run(self, batches, lr=0.05):
        losses = []
        for batch in batches:
            self._p, self._embed, loss = self._step(self._p, self._embed, *self.schedule(batch), lr)
            losses.append(loss)
        jax.block_until_ready((self._p, self._embed, losses))
        return [float(x) for x in jax.device_get(losses)]

    def step(self, batch, lr=0.05):
        return self.run([batch], lr)[0]

    def compilations(self):
        return self._step._cache_size()


def _step(p, embed, words, labels, lengths, lr):
    width, inputs = p["u"].shape[1], embed.shape[1]
    zeros = jnp.zeros((1, len(words), width))

    def loss(p, x):
        weights = jnp.concatenate([p["w"].ravel(), p["u"].ravel(), p["b"], jnp.zeros_like(p["b"])])
        h, _, _ = lstm(x, zeros, zeros, weights, lengths, inputs, width, 1, 0.0, False)
        log_p = jax.nn.log_softmax(h @ p["out_w"] + p["out_b"])
        of_label = jnp.take_along_axis(log_p, labels[..., None], -1, mode="clip")[..., 0]
        return -jnp.where(labels >= 0, of_label, 0).sum() / (labels >= 0).sum()

    value, (d_p, d_x) = jax.value_and_grad(loss, (0, 1))(p, embed.at[words].get(mode="clip"))
    return jax.tree.map(lambda a, d: a - lr * d, p, d_p), embed.at[words].add(-lr * d_x, mode="drop"), value


def _swap_og(w):
    """Gate order i, f, o, g to cuDNN's i, f, g, o along the last axis, and back."""
    i, f, o, g = np.split(np.asarray(w), 4, -1)
    return np.concatenate([i, f, g, o], -1)
