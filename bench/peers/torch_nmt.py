"""Echo's translation model by hand in PyTorch: memory and time of a training step, to compare with those of JAX.

The encoder is cuDNN's LSTM, and the decoder's cell PyTorch's fused one, as an expert would write it. On a GPU, products are in
TF32.
"""

import time
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
import torch
import torch.utils.checkpoint

from bench.memory import TORCH
from bench.models import CASES
from bench.peers.torch_peer import load_lstm


class Translation(torch.nn.Module):
    """The model of `models.nmt_loss`, with the same weights.

    Args:
        params: those of `models.nmt_init`, as NumPy arrays.
        again: whether the attention runs again in the backward, by `torch.utils.checkpoint`.
    """

    def __init__(self, params: dict[str, Any], again: bool):
        super().__init__()
        width = params["keys"].shape[0]
        self.again = again
        tensors = {k: torch.tensor(np.asarray(v)) for k, v in params.items() if not isinstance(v, dict)}
        self.source, self.target, self.score, self.keys, self.query, self.combine, self.out = (
            torch.nn.Parameter(tensors[k]) for k in ("source", "target", "score", "keys", "query", "combine", "out")
        )
        dtype = self.keys.dtype
        self.encoder = torch.nn.LSTM(width, width, dtype=dtype)
        self.decoder = torch.nn.LSTMCell(2 * width, width, dtype=dtype)
        for module, name, suffix in ((self.encoder, "encoder", "_l0"), (self.decoder, "decoder", "")):
            load_lstm(module, {k.lower(): torch.tensor(np.asarray(v)) for k, v in params[name].items()}, suffix)

    def forward(self, source: torch.Tensor, target: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        encoded, _ = self.encoder(self.source[source])
        keys = encoded @ self.keys
        valid = torch.arange(len(source), device=source.device)[:, None] < lengths
        shifted = torch.cat([torch.zeros_like(target[:1]), target[:-1]])
        words = self.target[shifted]
        h, c, context = encoded[-1], torch.zeros_like(encoded[0]), torch.zeros_like(encoded[0])
        states = []
        for word in words:
            h, c = self.decoder(torch.cat([word, context], -1), (h, c))
            arguments = h, keys, encoded, valid
            if self.again:
                attended: Any = torch.utils.checkpoint.checkpoint(self.attend, *arguments, use_reentrant=False)
            else:
                attended = self.attend(*arguments)
            context = torch.tanh(torch.cat([h, attended], -1) @ self.combine)
            states.append(context)
        logits = torch.stack(states) @ self.out
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    def attend(self, h: torch.Tensor, keys: torch.Tensor, encoded: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """The mean of the encoder's states, weighted by a net of one layer."""
        scores = torch.tanh(keys + h @ self.query) @ self.score
        weights = torch.softmax(torch.where(valid, scores, -1e9), 0)
        return torch.einsum("sb,sbh->bh", weights, encoded)


def echo(case: str, size: str, variant: str, steps: int) -> Generator[None, None, dict[str, Any]]:
    """Measures one variant of the translation model, as `bench.memory_steps` does. On a CPU no memory is measured.

    Returns:
        A record: the allocator's peak in a step ("peak", and "total", as PyTorch has no other number), and that without
        parameters and the batch ("temp"); "ms", the median of `steps` steps; and the last loss.
    """
    if case != "nmt":
        raise ValueError(f"echo: case: got {case!r}; expected 'nmt', the model that is written in PyTorch.")
    model, device = CASES[case], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    with jax.default_device(jax.devices("cpu")[0]):
        params, batch = jax.device_get(model.init(jax.random.key(0), **getattr(model, size)))
    net = Translation(params, variant == TORCH[1]).to(device)
    data = [torch.tensor(np.asarray(x), dtype=torch.int64, device=device) for x in batch]
    fixed = sum(x.numel() * x.element_size() for x in (*net.parameters(), *data))
    step, losses = _captured(net, data) if variant == TORCH[2] else _eager(net, data)
    yield
    times = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    result: dict[str, Any] = {"case": case, "size": size, "variant": variant, "loss": float(losses[-1])}
    result["ms"] = round(sorted(times[3:])[steps // 2] * 1e3, 3)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        result |= {"peak": peak, "total": peak, "temp": peak - fixed}
    return result


def _eager(net: Translation, data: list[torch.Tensor]) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """A step of plain SGD, and a list whose last element is the loss."""
    losses: list[torch.Tensor] = []
    parameters = [p for p in net.parameters() if p.requires_grad]

    def step() -> None:
        for p in parameters:
            p.grad = None
        loss = net(*data)
        loss.backward()
        with torch.no_grad():
            torch._foreach_add_(parameters, [p.grad for p in parameters], alpha=-1e-3)
        losses[:] = [loss.detach()]

    return step, losses


def _captured(net: Translation, data: list[torch.Tensor]) -> tuple[Callable[[], None], list[torch.Tensor]]:
    """The same step as one CUDA graph. It can train on sentences of these lengths only."""
    step, losses = _eager(net, data)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    losses.clear()
    for p in net.parameters():
        p.grad = None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay, losses
