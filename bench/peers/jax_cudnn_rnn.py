"""Peer: cuDNN's LSTM through `jax.experimental.rnn`, over padded sequences with their lengths; cell "lstm" only, GPU only.

    pip install 'jax[cuda13]'

The longest length of a batch is rounded up so that batches share compiled code. The loss does not count padding. cuDNN's second
bias stays zero, because the other systems have one bias. Steps are dispatched asynchronously, like those of Cavs.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.rnn import lstm

from bench.peers.jax_scan import NO_WORD, JaxPeer, rounded


class JaxCudnnRNN(JaxPeer):
    """An LSTM language model's body on cuDNN."""

    def __init__(self, cell, params, threads=2, device="gpu"):
        # cuDNN's layout: a row for each gate's unit.
        super().__init__(_states, {k: _swap_og(v).T if k in ("w", "u", "b") else v for k, v in params.items()})

    def params(self):
        return {k: _swap_og(v.T) if k in ("w", "u", "b") else np.asarray(v) for k, v in self._p.items()}

    def schedule(self, batch):
        """(chains, longest) words, padded, and their labels in one row; (chains,) lengths."""
        lengths = np.array([len(g["words"]) for g in batch], np.int32)
        words = np.full((len(batch), rounded(lengths.max())), NO_WORD, np.int32)
        labels = np.full(words.shape, -1, np.int32)
        real = np.arange(words.shape[1]) < lengths[:, None]
        words[real], labels[real] = (np.concatenate([g[k] for g in batch]) for k in ("words", "labels"))
        return {"words": words, "labels": labels.ravel(), "lengths": lengths}


def _states(p, x, batch):
    (width, inputs), zeros = (p["u"].shape[1], x.shape[-1]), jnp.zeros((1, len(x), p["u"].shape[1]))
    weights = jnp.concatenate([p["w"].ravel(), p["u"].ravel(), p["b"], jnp.zeros_like(p["b"])])
    h, _, _ = lstm(x, zeros, zeros, weights, batch["lengths"], inputs, width, 1, 0.0, False)
    return h.reshape(-1, width)


def _swap_og(w):
    """Gate order i, f, o, g to cuDNN's i, f, g, o along the last axis, and back."""
    i, f, o, g = np.split(np.asarray(w), 4, -1)
    return np.concatenate([i, f, g, o], -1)
