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
from torch.nn.functional import cross_entropy, linear

from bench.peers import torch_device, torch_dtype
from bench.peers.torch_packed_lstm import _IGNORED, _pad
from bench.peers.torch_peer import TorchPeer, from_torch, to_torch

# Its builds for several sizes have equal names: each process has a folder of its own.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", tempfile.mkdtemp(prefix="flashrnn-"))


class TorchFlashRNN(TorchPeer):
    """An LSTM language model's body on FlashRNN; `backend` is its, "vanilla" its reference, which runs on a CPU."""

    def __init__(self, cell, params, threads=2, device="gpu", backend="cuda_fused"):
        if cell != "lstm":
            raise ValueError(f"torch_flashrnn runs the cell 'lstm', not {cell!r}")
        self._threads, self._device, self._backend = threads, torch_device(device), backend
        p = {k: torch.tensor(v, device=self._device, dtype=torch_dtype()) for k, v in params.items()}
        # Its gates' order is that of nn.LSTM: input, forget, cell, output.
        p |= {"w": to_torch(p["w"]), "u": to_torch(p["u"]), "b": to_torch(p["b"])}
        self._embed = p.pop("embed")
        self._p = {k: v.requires_grad_() for k, v in p.items()}

    def params(self):
        named = self._p | {k: from_torch(self._p[k]) for k in ("w", "u", "b")} | {"embed": self._embed}
        return {k: v.detach().float().cpu().numpy().copy() for k, v in named.items()}

    def _all_parameters(self):
        return [self._embed, *self._p.values()]

    def schedule(self, batch):
        return _pad(batch)

    def _train(self, batch, lr):
        both, _ = _pad(batch)
        (chains, longest, _), width = both.shape, self._p["u"].shape[1]
        words, labels = self._send(both.view(-1, 2).t().contiguous().numpy())
        x = self._embed.index_select(0, words).requires_grad_()
        gates = linear(x, self._p["w"]).view(chains, longest, 4, 1, width)
        states, _ = flashrnn(
            gates,
            self._p["u"].view(4, 1, width, width),
            self._p["b"].view(4, 1, width),
            function="lstm",
            backend=self._backend,
            dtype={torch.float32: "float32", torch.bfloat16: "bfloat16"}[gates.dtype],
        )
        h = states[0].reshape(-1, width)  # of (states, chains, steps, heads, width)
        loss = cross_entropy(torch.addmm(self._p["out_b"], h, self._p["out_w"]).float(), labels, ignore_index=_IGNORED)
        weights = list(self._p.values())
        dx, *grads = torch.autograd.grad(loss, [x, *weights])
        with torch.no_grad():
            self._embed.index_add_(0, words, dx, alpha=-lr)
            torch._foreach_add_(weights, grads, alpha=-lr)
        return loss
