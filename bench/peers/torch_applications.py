"""Peer: the applications of `bench.cells`, batched by hand in PyTorch, gradients by autograd.

    pip install torch

What a careful PyTorch user writes for each: sentences sorted by length so that those alive are a prefix, products of inputs as
one batch, one batch a level or position, gates in one product, nn.LSTM for the encoder, padded attention. Where a level reads
rows of several earlier ones, a table carries the live rows, as in `torch_levelled`. Inside the clock: indices from the raw
arrays, forward, `torch.autograd.grad`, SGD.
"""

import torch
from torch.nn.functional import cross_entropy

from bench.peers import torch_device
from bench.peers.torch_attention import encoder_decoder
from bench.peers.torch_dagnn import dagnn
from bench.peers.torch_lattice import lattice_lstm
from bench.peers.torch_peer import TorchPeer, from_torch, to_torch
from bench.peers.torch_vpps import rvnn, td_lstm, td_rnn

# Each takes the peer and a batch; gives the words, a function from their vectors to states, and the labels of those.
NETS = {
    "rvnn": rvnn,
    "td_rnn": td_rnn,
    "td_lstm": td_lstm,
    "encoder_decoder": encoder_decoder,
    "lattice_lstm": lattice_lstm,
    "dagnn": dagnn,
}


class TorchApplication(TorchPeer):
    """One application. `p`: its parameters; `width`: hidden; `send`: an array to the device."""

    def __init__(self, cell, params, threads=2, device="cpu"):
        self._threads, self._device, self._net = threads, torch_device(device), NETS[cell]
        self.p = {k: torch.tensor(v, device=self._device) for k, v in params.items()}
        self.p = {k: to_torch(v) if k.startswith("encoder.") else v for k, v in self.p.items()}
        self._weights = [v.requires_grad_() for k, v in self.p.items() if k != "embed"]
        self.width, self.send = len(params["out_w"]), self._send

    def params(self):
        ours = {k: from_torch(v) if k.startswith("encoder.") else v for k, v in self.p.items()}
        return {k: v.detach().cpu().numpy().copy() for k, v in ours.items()}

    def schedule(self, batch):
        """Indices of all levels; those of trees that depend on what is alive come later, level by level."""
        return self._net(self, batch)

    def _train(self, batch, lr):
        words, forward, labels = self._net(self, batch)
        words = self.send(words)
        x = self.p["embed"].index_select(0, words).requires_grad_()
        logits = torch.addmm(self.p["out_b"], forward(x), self.p["out_w"])
        loss = cross_entropy(logits, self.send(labels))
        dx, *grads = torch.autograd.grad(loss, [x, *self._weights], materialize_grads=True)
        with torch.no_grad():
            self.p["embed"].index_add_(0, words, dx, alpha=-lr)
            torch._foreach_add_(self._weights, grads, alpha=-lr)
        return loss
