"""Code that the PyTorch peers share: runs of steps, without synchronisation on a GPU or in a CUDA graph; orders of gates."""

import torch


class TorchPeer:
    """`step` and `run` of a class whose `_train(batch, lr)` is one training step and returns the loss, a scalar tensor.

    `_send(array)` takes a NumPy array to the device.
    """

    _threads: int
    _device: str

    def step(self, batch, lr=0.05):
        return self.run([batch], lr)[0]

    def run(self, batches, lr=0.05):
        """Runs training steps and returns the loss before each update. On a GPU it synchronises only at the end."""
        torch.set_num_threads(self._threads)
        return torch.stack([self._train(b, lr).detach() for b in batches]).tolist()

    def _train(self, batch, lr):
        raise NotImplementedError

    def _send(self, array):
        return torch.from_numpy(array).to(self._device)

    def _all_parameters(self):
        """Every tensor that a step updates in place."""
        return self._p.values()


class InCudaGraph:
    """Put before a peer: one captured training step for each batch seen; GPU only.

    A captured graph replays ONE structure: it holds for the batches it was captured from, and no other. So nothing is
    scheduled in the clock, nothing is launched from Python, and a new batch would cost a capture: an UPPER BOUND on what
    launching can give, not a way to train on changing graphs. Captures happen in the first pass, outside the clock.
    """

    schedule = None  # nothing is scheduled when a graph is replayed

    def __init__(self, *args, device="gpu", **options):
        if device != "gpu":
            raise ValueError(f"{type(self).__name__}: device is {device!r}, wanted 'gpu'")
        super().__init__(*args, device=device, **options)
        self._captured, self._sent, self._replayed = {}, [], None
        self._memory = torch.cuda.graph_pool_handle()  # graphs are replayed one after another: they share their memory

    def run(self, batches, lr=0.05):
        losses = []
        for batch in batches:
            if id(batch) not in self._captured:
                self._captured[id(batch)] = self._capture(batch, lr)
            graph, loss, *_ = self._captured[id(batch)]
            graph.replay()
            losses.append(loss.detach().clone())
        return torch.stack(losses).tolist()

    def _send(self, array):
        """During a capture, transfers are impossible: returns the arrays of the rehearsal, in order."""
        if self._replayed is None:
            self._sent.append(super()._send(array))
            return self._sent[-1]
        return next(self._replayed)

    def _capture(self, batch, lr):
        """A rehearsal on a side stream, which sends the indices and makes the buffers; the parameters put back; the capture."""
        self._sent = []
        before = [(p, p.detach().clone()) for p in self._all_parameters()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._train(batch, lr)
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad():
            for p, value in before:
                p.copy_(value)
        graph = torch.cuda.CUDAGraph()
        self._replayed = iter(self._sent)
        with torch.cuda.graph(graph, pool=self._memory):
            loss = self._train(batch, lr)
        self._replayed = None
        return graph, loss, self._sent, self._held(), batch  # kept alive as long as the graph

    def _held(self):
        """Buffers that a later, larger batch may replace while the graph still reads them."""
        return dict(getattr(self, "_buffers", {}))


def swap_og(w):
    """Gate order i, f, o, g to PyTorch's i, f, g, o along the last axis, and back."""
    i, f, o, g = w.chunk(4, -1)
    return torch.cat([i, f, g, o], -1)


def to_torch(w):
    """Converts our weights or bias of an LSTM to the format of nn.LSTM."""
    return swap_og(w).t().contiguous()


def from_torch(w):
    """The inverse of `to_torch`."""
    return swap_og(w.t()).contiguous()
