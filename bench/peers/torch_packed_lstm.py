"""Peer: torch.nn.LSTM or torch.nn.GRU over packed sequences (or, with `padded=True`, over padded ones).

    pip install torch

What most PyTorch users run on sequences of unequal length. Inside the clock: padding the words,
packing them, look-up, the layer, loss over all positions, autograd, SGD. Packing comes before the
look-up, so that no padding is ever embedded. The second bias is held at zero, but for the part of
a GRU's that its reset gate multiplies: one bias, as in the other systems. In a run in bf16 weights,
states and updates are bf16, the loss float32.
"""

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from bench.peers import torch_dtype
from bench.peers.torch_peer import IGNORED, Autograd, InCudaGraph, load_gru, load_lstm, of_gru, of_lstm

LAYERS = {"lstm": (torch.nn.LSTM, load_lstm, of_lstm), "gru": (torch.nn.GRU, load_gru, of_gru)}


class TorchPackedLSTM(Autograd):
    """A language model's body on nn.LSTM or nn.GRU."""

    def __init__(self, cell, params, threads=2, padded=False, device="cpu"):
        super().__init__(cell, params, threads, device)
        self._padded = padded
        layer, load, self._of_layer = LAYERS[cell]
        ours = {k: self._p.pop(k).detach() for k in "wubd" if k in self._p}
        self._layer = layer(len(ours["w"]), len(ours["u"]), batch_first=True, device=self._device, dtype=torch_dtype())
        load(self._layer, ours)
        self._weights = [*(w for w in self._layer.parameters() if w.requires_grad), self._p["out_w"], self._p["out_b"]]

    def _ours(self):
        return self._p | self._of_layer(self._layer)

    def schedule(self, batch):
        return pad(batch) if self._padded else _pack(batch)

    def _net(self, batch):
        if self._padded:
            padded, _ = pad(batch)
            forward = lambda x: self._layer(x.view(*padded.shape[:2], -1))[0].flatten(0, 1)  # noqa: E731
            words, labels = padded.view(-1, 2).t().contiguous().numpy()
            return words, forward, labels
        packed = _pack(batch)
        # The batch sizes stay on the host; the two permutations are not needed, as all rows are read out in packed order.
        forward = lambda x: self._layer(PackedSequence(x, packed.batch_sizes))[0].data  # noqa: E731
        words, labels = packed.data.t().contiguous().numpy()
        return words, forward, labels


class TorchPackedCudaGraph(InCudaGraph, TorchPackedLSTM):
    """cuDNN's LSTM or GRU over packed sequences, or with `padded=True` over padded ones."""


def _pack(batch):
    """Words and labels as a `PackedSequence`."""
    padded, lengths = pad(batch)
    return pack_padded_sequence(padded, torch.from_numpy(lengths), batch_first=True, enforce_sorted=False)


def pad(batch):
    """(chains, longest, 2) words and labels, and the lengths."""
    lengths = np.array([len(g["words"]) for g in batch])
    padded = np.zeros((len(batch), lengths.max(), 2), np.int64)
    padded[..., 1] = IGNORED
    real = np.arange(lengths.max()) < lengths[:, None]
    padded[real, 0] = np.concatenate([g["words"] for g in batch])
    padded[real, 1] = np.concatenate([g["labels"] for g in batch])
    return torch.from_numpy(padded), lengths
