"""Peer: torch.nn.LSTM over packed sequences (or, with `padded=True`, over padded ones); cell "lstm" only.

    pip install torch

What most PyTorch users run on sequences of unequal length. Inside the clock: padding the words,
packing them, look-up, nn.LSTM, loss over all positions, autograd, SGD. Packing comes before the
look-up, so that no padding is ever embedded. nn.LSTM's second bias is held at zero: one bias, as
in the other systems. In a run in bf16 weights, states and updates are bf16, the loss float32.
"""

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from bench.peers import torch_device, torch_dtype
from bench.peers.torch_peer import TorchPeer, from_torch, to_torch

_IGNORED = -100  # label of a padded position


class TorchPackedLSTM(TorchPeer):
    """An LSTM language model's body on nn.LSTM."""

    def __init__(self, cell, params, threads=2, padded=False, device="cpu"):
        if cell != "lstm":
            raise ValueError(f"torch_packed_lstm runs the cell 'lstm', not {cell!r}")
        self._threads, self._padded, self._device = threads, padded, torch_device(device)
        kind = {"device": self._device, "dtype": torch_dtype()}
        p = {k: torch.tensor(v, **kind) for k, v in params.items()}
        self._embed = p["embed"]
        self._lstm = torch.nn.LSTM(*p["w"].shape[:1], p["u"].shape[0], batch_first=True, **kind)
        with torch.no_grad():
            self._lstm.weight_ih_l0.copy_(to_torch(p["w"]))
            self._lstm.weight_hh_l0.copy_(to_torch(p["u"]))
            self._lstm.bias_ih_l0.copy_(to_torch(p["b"]))
            self._lstm.bias_hh_l0.zero_().requires_grad_(False)
        self._out_w, self._out_b = p["out_w"].requires_grad_(), p["out_b"].requires_grad_()
        self._weights = [*(w for w in self._lstm.parameters() if w.requires_grad), self._out_w, self._out_b]

    def params(self):
        named = {
            "embed": self._embed,
            "w": from_torch(self._lstm.weight_ih_l0),
            "u": from_torch(self._lstm.weight_hh_l0),
            "b": from_torch(self._lstm.bias_ih_l0),
            "out_w": self._out_w,
            "out_b": self._out_b,
        }
        return {k: v.detach().float().cpu().numpy().copy() for k, v in named.items()}

    def _all_parameters(self):
        return [self._embed, *self._weights]

    def _train(self, batch, lr):
        words, labels, h, x = (self._run_padded if self._padded else self._run_packed)(batch)
        logits = torch.addmm(self._out_b, h, self._out_w)
        loss = cross_entropy(logits.float(), labels, ignore_index=_IGNORED)
        dx, *grads = torch.autograd.grad(loss, [x, *self._weights])
        with torch.no_grad():
            self._embed.index_add_(0, words, dx.reshape(len(words), -1), alpha=-lr)
            torch._foreach_add_(self._weights, grads, alpha=-lr)
        return loss

    def schedule(self, batch):
        return _pad(batch) if self._padded else _pack(batch)

    def _run_packed(self, batch):
        packed = _pack(batch)
        words, labels = self._send(packed.data.t().contiguous().numpy())
        x = self._embed.index_select(0, words).requires_grad_()
        # The batch sizes stay on the host; the two permutations are not needed, as all rows are read out in packed order.
        out, _ = self._lstm(PackedSequence(x, packed.batch_sizes))
        return words, labels, out.data, x

    def _run_padded(self, batch):
        both, _ = _pad(batch)
        words, labels = self._send(both.view(-1, 2).t().contiguous().numpy())
        x = self._embed.index_select(0, words).view(*both.shape[:2], -1).requires_grad_()
        return words, labels, self._lstm(x)[0].flatten(0, 1), x


def _pack(batch):
    """Words and labels as a `PackedSequence`."""
    both, lengths = _pad(batch)
    return pack_padded_sequence(both, torch.from_numpy(lengths), batch_first=True, enforce_sorted=False)


def _pad(batch):
    """(chains, longest, 2) words and labels, and the lengths."""
    lengths = np.array([len(g["words"]) for g in batch])
    both = np.zeros((len(batch), lengths.max(), 2), np.int64)
    both[..., 1] = _IGNORED
    real = np.arange(lengths.max()) < lengths[:, None]
    both[real, 0] = np.concatenate([g["words"] for g in batch])
    both[real, 1] = np.concatenate([g["labels"] for g in batch])
    return torch.from_numpy(both), lengths
