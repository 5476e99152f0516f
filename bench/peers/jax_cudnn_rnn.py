"""Peer: cuDNN's LSTM through `jax.experimental.rnn`, over padded sequences with their lengths; cell "lstm" only, GPU only.

    pip install 'jax[cuda13]'

The longest length of a batch is rounded up so that batches share compiled code. The loss does not count padding. cuDNN's second
bias stays zero, because the other systems have one bias. Steps are dispatched asynchronously, like those of Cavs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.rnn import lstm

from bench.peers.jax_scan import JaxPeer, rounded

_NO_WORD = 1 << 30


class JaxCudnnRNN(JaxPeer):
    """An LSTM language model's body on cuDNN."""

    def __init__(self, cell, params, threads=2, device="gpu"):
        if cell != "lstm":
            raise ValueError(f"jax_cudnn_rnn runs the cell 'lstm', not {cell!r}")
        # cuDNN's layout: a row for each gate's unit.
        self._p = {k: jnp.array(_swap_og(v).T if k in ("w", "u", "b") else v) for k, v in params.items()}
        self._step = jax.jit(_step, donate_argnums=0)

    def params(self):
        return {k: _swap_og(v.T) if k in ("w", "u", "b") else np.asarray(v) for k, v in self._p.items()}

    def schedule(self, batch):
        """(chains, longest) words and labels, padded; (chains,) lengths."""
        lengths = np.array([len(g["words"]) for g in batch], np.int32)
        words = np.full((len(batch), rounded(lengths.max())), _NO_WORD, np.int32)
        labels = np.full(words.shape, -1, np.int32)
        real = np.arange(words.shape[1]) < lengths[:, None]
        words[real], labels[real] = (np.concatenate([g[k] for g in batch]) for k in ("words", "labels"))
        return words, labels, lengths


def _step(params, batch, lr):
    words, labels, lengths = batch
    p, embed = {k: v for k, v in params.items() if k != "embed"}, params["embed"]
    width, inputs = p["u"].shape[1], embed.shape[1]
    zeros = jnp.zeros((1, len(words), width))

    def loss(p, x):
        weights = jnp.concatenate([p["w"].ravel(), p["u"].ravel(), p["b"], jnp.zeros_like(p["b"])])
        h, _, _ = lstm(x, zeros, zeros, weights, lengths, inputs, width, 1, 0.0, False)
        log_p = jax.nn.log_softmax(h @ p["out_w"] + p["out_b"])
        of_label = jnp.take_along_axis(log_p, labels[..., None], -1, mode="clip")[..., 0]
        return -jnp.where(labels >= 0, of_label, 0).sum() / (labels >= 0).sum()

    value, (d_p, d_x) = jax.value_and_grad(loss, (0, 1))(p, embed.at[words].get(mode="clip"))
    embed = embed.at[words].add(-lr * d_x, mode="drop")
    return jax.tree.map(lambda a, d: a - lr * d, p, d_p) | {"embed": embed}, value


def _swap_og(w):
    """Gate order i, f, o, g to cuDNN's i, f, g, o along the last axis, and back."""
    i, f, o, g = np.split(np.asarray(w), 4, -1)
    return np.concatenate([i, f, g, o], -1)
