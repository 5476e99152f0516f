"""Peer: the applications of `bench.cells`, batched by hand in PyTorch, gradients by autograd.

    pip install torch

What a careful PyTorch user writes for each: sentences sorted by length so that those alive are a prefix, products of inputs as
one batch, one batch a level or position, gates in one product, nn.LSTM for the encoder, padded attention. Where a level reads
rows of several earlier ones, a table carries the live rows, as in `torch_levelled`. Inside the clock: indices from the raw
arrays, forward, `torch.autograd.grad`, SGD.
"""

from bench.peers.torch_attention import encoder_decoder
from bench.peers.torch_dagnn import dagnn
from bench.peers.torch_edges import child_sum
from bench.peers.torch_lattice import lattice_lstm
from bench.peers.torch_peer import Autograd, from_torch, to_torch
from bench.peers.torch_vpps import rvnn, td_lstm, td_rnn

# Each takes the peer and a batch, and returns what `Autograd._net` does. Indices of trees that depend on what is alive come
# later, level by level.
NETS = {
    "child_sum": child_sum,
    "rvnn": rvnn,
    "td_rnn": td_rnn,
    "td_lstm": td_lstm,
    "encoder_decoder": encoder_decoder,
    "lattice_lstm": lattice_lstm,
    "dagnn": dagnn,
}


class TorchApplication(Autograd):
    """One application. `p`: its parameters; `width`: hidden; `send`: an array to the device."""

    def __init__(self, cell, params, threads=2, device="cpu"):
        # The encoder is nn.LSTM's kernel, with its order of gates.
        super().__init__(cell, params, threads, device)
        self._p |= {k: to_torch(v.detach()).requires_grad_() for k, v in self._p.items() if k.startswith("encoder.")}
        self._weights = [v for k, v in self._p.items() if k != "embed"]
        self.p, self.width, self.send = self._p, self._width, self._send

    def _ours(self):
        return {k: from_torch(v) if k.startswith("encoder.") else v for k, v in self._p.items()}

    def _net(self, batch):
        return NETS[self._cell](self, batch)
