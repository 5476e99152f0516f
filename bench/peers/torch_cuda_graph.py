"""Peer: the hand-written PyTorch model in a CUDA graph, one graph a batch; GPU only.

    pip install torch

A captured graph replays ONE structure: it holds for the batches it was captured from, and no other. So nothing is scheduled in
the clock, nothing is launched from Python, and a new batch would cost a capture: an UPPER BOUND on what launching can give, not
a way to train on changing graphs. Captures happen in the first pass, outside the clock.
"""

import torch

from bench.peers.torch_manual import TorchManual


class TorchCudaGraph(TorchManual):
    """One captured training step for each batch seen."""

    def __init__(self, cell, params, threads=2, device="gpu"):
        if device != "gpu":
            raise ValueError(f"torch_cuda_graph: device is {device!r}, wanted 'gpu'")
        super().__init__(cell, params, threads, device)
        self._captured, self._sent, self._replayed = {}, [], None

    schedule = None  # nothing is scheduled when a graph is replayed

    def step(self, batch, lr=0.05):
        return self.run([batch], lr)[0]

    @torch.no_grad()
    def run(self, batches, lr=0.05):
        losses = []
        for batch in batches:
            if id(batch) not in self._captured:
                self._captured[id(batch)] = self._capture(batch, lr)
            graph, loss, *_ = self._captured[id(batch)]
            graph.replay()
            losses.append(loss.clone())
        return torch.stack(losses).tolist()

    def _send(self, array):
        """Within a capture nothing can be sent: the arrays of the rehearsal, in order."""
        if self._replayed is None:
            self._sent.append(super()._send(array))
            return self._sent[-1]
        return next(self._replayed)

    def _capture(self, batch, lr):
        """A rehearsal on a side stream, which sends the indices and makes the buffers; the parameters put back; the capture."""
        self._buffers, self._sent = {}, []
        before = {k: v.clone() for k, v in self._p.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(batch, lr)
        torch.cuda.current_stream().wait_stream(side)
        for k, v in before.items():
            self._p[k].copy_(v)
        graph = torch.cuda.CUDAGraph()
        self._replayed = iter(self._sent)
        with torch.cuda.graph(graph):
            loss = self._step(batch, lr)
        self._replayed = None
        return graph, loss, self._buffers, self._sent, batch  # kept alive as long as the graph
