"""Peer: the hand-levelled PyTorch model with its level function under `torch.compile`.

    pip install torch          # and a C++ compiler, for the CPU back end

A whole step cannot be compiled once: every batch has other levels. So what is compiled is the function of one level, with
dynamic sizes, and its backward; levels, gathers between them, and SGD stay as in `torch_levelled`.
"""

import torch

from bench.peers.torch_levelled import TorchLevelled


class TorchCompiled(TorchLevelled):
    """`TorchLevelled` whose level functions are compiled."""

    def __init__(self, cell, params, threads=2, device="cpu"):
        super().__init__(cell, params, threads, device)
        torch.set_num_threads(threads)
        self._leaf, self._inner = (torch.compile(f, dynamic=True) for f in (self._leaf, self._inner))
