"""Peer: FlashRNN (Poeppel, Beck, Hochreiter 2024), an LSTM in one fused kernel; cell "lstm" only, GPU only.

    pip install flashrnn

Its CUDA sources (Apache-2.0) are compiled at the first step for each hidden size and batch, by nvcc, a C++ compiler and ninja,
several times over until the best division of the recurrent matrix into registers and shared memory is found: minutes.
Chains are padded to the longest; what follows the end of a chain does not reach its words. One head, so that the recurrent
matrix is whole. In a run in tf32 its kernels take float32; in bf16 weights, states and updates are bf16, as its users have
them. Where a size does not fit the card, the table shows its error. CUDA 13 has dropped eight fields of `cudaDeviceProp` that
gpu_info.cc of its release 1.0.8 prints (clockRate, computeMode, ...): there write 0 for them in the installed file.
"""

import os
import tempfile

import torch
from flashrnn import flashrnn
from torch.nn.functional import linear

from bench.peers.torch_packed_lstm import pad
from bench.peers.torch_peer import Autograd, from_torch, to_torch

# Its builds for several sizes have equal names: each process has a folder of its own.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", tempfile.mkdtemp(prefix="flashrnn-"))


class TorchFlashRNN(Autograd):
    """An LSTM language model's body on FlashRNN; `backend` is its, "vanilla" its reference, which runs on a CPU."""

    def __init__(self, cell, params, threads=2, device="gpu", backend="cuda_fused"):
        super().__init__(cell, params, threads, device)
        self._backend = backend
        # Its gates' order is that of nn.LSTM: input, forget, cell, output.
        self._p |= {k: to_torch(self._p[k].detach()).requires_grad_() for k in "wub"}
        self._weights = [v for k, v in self._p.items() if k != "embed"]

    def _ours(self):
        return self._p | {k: from_torch(self._p[k]) for k in "wub"}

    def schedule(self, batch):
        return pad(batch)

    def _net(self, batch):
        padded, _ = pad(batch)
        (chains, longest, _), width, p = padded.shape, self._width, self._p

        def forward(x):
            gates = linear(x, p["w"]).view(chains, longest, 4, 1, width)
            states, _ = flashrnn(
                gates,
                p["u"].view(4, 1, width, width),
                p["b"].view(4, 1, width),
                function="lstm",
                backend=self._backend,
                dtype={torch.float32: "float32", torch.bfloat16: "bfloat16"}[gates.dtype],
            )
            return states[0].reshape(-1, width)  # of (states, chains, steps, heads, width)

        words, labels = padded.view(-1, 2).t().contiguous().numpy()
        return words, forward, labels
