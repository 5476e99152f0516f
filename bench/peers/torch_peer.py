"""Code that the PyTorch peers share: runs of steps, gradients by autograd, steps in a CUDA graph, and orders of gates."""

import torch
from torch.nn.functional import cross_entropy

from bench.peers import torch_device, torch_dtype

IGNORED = -100  # the label of a padded position


class TorchPeer:
    """A model whose `_train(batch, lr)` is one training step and returns the loss, a scalar tensor.

    `_p` holds the parameters, in the run's dtype. `_send(array)` takes a NumPy array to the device.
    """

    def __init__(self, cell, params, threads=2, device="cpu"):
        self._threads, self._cell, self._device, self._buffers = threads, cell, torch_device(device), {}
        self._p = {k: torch.tensor(v, device=self._device, dtype=torch_dtype()) for k, v in params.items()}
        self._width = len(params["out_w"])

    def params(self):
        return {k: v.detach().float().cpu().numpy().copy() for k, v in self._ours().items()}

    def _ours(self):
        """The parameters, with the names and shapes of all systems."""
        return self._p

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

    def _buffer(self, name, rows, *shape):
        """Returns the first `rows` rows of a buffer, which grows if needed. Its contents are not cleared."""
        if name not in self._buffers or len(self._buffers[name]) < rows:
            self._buffers[name] = torch.empty(rows + rows // 4, *shape, device=self._device)
        return self._buffers[name][:rows]

    def _all_parameters(self):
        """Every tensor that a step updates in place."""
        return self._p.values()


class Autograd(TorchPeer):
    """A peer that autograd differentiates.

    `_net(batch)` prepares a batch. It returns the words to look up, a function from their vectors to the states that have
    labels, and these labels. `_weights` are the tensors to train, besides the embedding.
    """

    def __init__(self, cell, params, threads=2, device="cpu"):
        super().__init__(cell, params, threads, device)
        self._weights = [v.requires_grad_() for k, v in self._p.items() if k != "embed"]

    def _net(self, batch):
        raise NotImplementedError

    def schedule(self, batch):
        return self._net(batch)

    def _train(self, batch, lr):
        words, forward, labels = self._net(batch)
        words, embed = self._send(words), self._p["embed"]
        x = embed.index_select(0, words).requires_grad_()
        logits = torch.addmm(self._p["out_b"], forward(x), self._p["out_w"])
        loss = cross_entropy(logits.float(), self._send(labels), ignore_index=IGNORED)
        dx, *grads = torch.autograd.grad(loss, [x, *self._weights], materialize_grads=True)
        with torch.no_grad():
            embed.index_add_(0, words, dx, alpha=-lr)
            torch._foreach_add_(self._weights, grads, alpha=-lr)
        return loss

    def _all_parameters(self):
        return [self._p["embed"], *self._weights]


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
        saved = [(p, p.detach().clone()) for p in self._all_parameters()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._train(batch, lr)
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad():
            for p, value in saved:
                p.copy_(value)
        graph = torch.cuda.CUDAGraph()
        self._replayed = iter(self._sent)
        with torch.cuda.graph(graph, pool=self._memory):
            loss = self._train(batch, lr)
        self._replayed = None
        # Kept alive as long as the graph. A later, larger batch may replace buffers that the graph still reads.
        return graph, loss, self._sent, dict(self._buffers), batch


def lstm_state(z, c=None):
    """Returns the states of an LSTM's cells from their gates i, f, o, g before the activation, and c of the states before."""
    width = z.shape[-1] // 4
    ifo, g = z.split([3 * width, width], -1)
    i, f, o = ifo.sigmoid().chunk(3, -1)
    ig = i * g.tanh()
    c = ig if c is None else torch.addcmul(ig, f, c)
    return o * c.tanh(), c


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


NAMES = {"w": "weight_ih", "u": "weight_hh", "b": "bias_ih"}  # of the parameters in PyTorch


def load_lstm(module, values, suffix="_l0"):
    """Copies our `w`, `u` and `b` to a layer of nn.LSTM. Its second bias stays zero: one bias, as in the other systems."""
    with torch.no_grad():
        for ours, theirs in NAMES.items():
            getattr(module, theirs + suffix).copy_(to_torch(values[ours]))
        getattr(module, "bias_hh" + suffix).zero_().requires_grad_(False)


def of_lstm(module, suffix="_l0"):
    """The inverse of `load_lstm`."""
    return {ours: from_torch(getattr(module, theirs + suffix)) for ours, theirs in NAMES.items()}


def load_gru(module, values):
    """Copies our `w`, `u`, `b` and `d` to nn.GRU. Of its second bias only what the reset gate multiplies, `d`, trains."""
    zeros = torch.cat([torch.zeros_like(values["d"]), torch.zeros_like(values["d"])])
    with torch.no_grad():
        for ours, theirs in NAMES.items():
            getattr(module, theirs + "_l0").copy_(values[ours].t())
        module.bias_hh_l0.copy_(torch.cat([zeros, values["d"]]))
    module.bias_hh_l0.register_hook(lambda gradient: torch.cat([zeros, gradient[len(zeros) :]]))


def of_gru(module):
    """The inverse of `load_gru`."""
    params = {ours: getattr(module, theirs + "_l0").t().contiguous() for ours, theirs in NAMES.items()}
    return params | {"d": module.bias_hh_l0[len(module.bias_hh_l0) // 3 * 2 :]}
