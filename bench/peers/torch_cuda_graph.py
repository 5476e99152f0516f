"""Peers in a CUDA graph, one graph a batch; GPU only. See `InCudaGraph`: upper bounds, not a way to train on changing graphs.

pip install torch
"""

from bench.peers.torch_manual import TorchManual
from bench.peers.torch_packed_lstm import TorchPackedLSTM
from bench.peers.torch_peer import InCudaGraph


class TorchCudaGraph(InCudaGraph, TorchManual):
    """The hand-written backward."""


class TorchPackedCudaGraph(InCudaGraph, TorchPackedLSTM):
    """cuDNN's LSTM over packed sequences, or with `padded=True` over padded ones."""
