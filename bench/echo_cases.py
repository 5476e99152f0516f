"""The models of Echo's evaluation, as functions of plain JAX, for `bench.echo`.

Each case has `init(key, size)`, which returns parameters and a batch, and `loss(params, batch, remat)`. `remat` is the
identity, or `jax.checkpoint` where an expert would place it: around each step, block or attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
Params = dict[str, Any]
Remat = Callable[[Callable[..., Any]], Callable[..., Any]]


def identity(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def _matrix(key: Array, *shape: int) -> Array:
    return jax.random.normal(key, shape) * shape[-2] ** -0.5


def _cross_entropy(logits: Array, labels: Array) -> Array:
    """As MXNet's SoftmaxOutput: the gradient is the softmax less one at the label, without a scatter."""
    at_label = jnp.where(labels[..., None] == jnp.arange(logits.shape[-1]), logits, 0).sum(-1)
    return (jax.nn.logsumexp(logits, -1) - at_label).mean()


# ---------------------------------------------------------------- recurrent nets


def _lstm_params(key: Array, inputs: int, hidden: int) -> Params:
    a, b = jax.random.split(key)
    return {"W": _matrix(a, inputs, 4 * hidden), "U": _matrix(b, hidden, 4 * hidden), "b": jnp.zeros(4 * hidden)}


def _lstm_step(p: Params, state: tuple[Array, Array], gates_of_x: Array) -> tuple[Array, Array]:
    h, c = state
    i, f, o, g = jnp.split(gates_of_x + h @ p["U"] + p["b"], 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def lstm(p: Params, xs: Array, remat: Remat = identity, reverse: bool = False) -> Array:
    """xs: (T, B, inputs). Returns (T, B, hidden)."""

    def step(state: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = _lstm_step(p, state, x @ p["W"])
        return (h, c), h

    zero = jnp.zeros((xs.shape[1], p["U"].shape[0]), xs.dtype)
    return lax.scan(remat(step), (zero, zero), xs, reverse=reverse)[1]


def nmt_init(key: Array, hidden: int, batch: int, length: int, words: tuple[int, int]) -> tuple[Params, Any]:
    k = iter(jax.random.split(key, 12))
    params = {
        "source": _matrix(next(k), words[0], hidden), "target": _matrix(next(k), words[1], hidden),
        "encoder": _lstm_params(next(k), hidden, hidden), "decoder": _lstm_params(next(k), 2 * hidden, hidden),
        "keys": _matrix(next(k), hidden, hidden), "query": _matrix(next(k), hidden, hidden),
        "score": jax.random.normal(next(k), (hidden,)) * hidden**-0.5,
        "combine": _matrix(next(k), 2 * hidden, hidden), "out": _matrix(next(k), hidden, words[1]),
    }  # fmt: skip
    lengths = jax.random.randint(next(k), (batch,), 3 * length // 5, length + 1)
    source, target = (jax.random.randint(next(k), (length, batch), 0, n) for n in words)
    return params, (source, target, lengths)


def nmt_loss(p: Params, batch: Any, remat: Remat = identity) -> Array:
    """Sockeye's RNN model: an LSTM encoder, and an LSTM decoder that attends to it by a one-layer net (Bahdanau et al.)."""
    source, target, lengths = batch
    encoded = lstm(p["encoder"], p["source"][source], remat)
    keys = encoded @ p["keys"]
    valid = jnp.arange(len(source))[:, None] < lengths

    def attend(h: Array, keys: Array, encoded: Array) -> Array:
        scores = jnp.tanh(keys + h @ p["query"]) @ p["score"]
        weights = jax.nn.softmax(jnp.where(valid, scores, -1e9), 0)
        return jnp.einsum("sb,sbh->bh", weights, encoded)

    def step(state: Any, word: Array) -> Any:
        h, c, context = state
        h, c = _lstm_step(p["decoder"], (h, c), jnp.concatenate([word, context], -1) @ p["decoder"]["W"])
        context = jnp.tanh(jnp.concatenate([h, attend(h, keys, encoded)], -1) @ p["combine"])
        return (h, c, context), context

    zero = jnp.zeros_like(encoded[0])
    shifted = jnp.concatenate([jnp.zeros_like(target[:1]), target[:-1]])
    states = lax.scan(remat(step), (encoded[-1], zero, zero), p["target"][shifted])[1]
    return _cross_entropy(states @ p["out"], target)


def speech_init(key: Array, hidden: int, batch: int, length: int, layers: int, bands: int) -> tuple[Params, Any]:
    k = iter(jax.random.split(key, 2 * layers + 4))
    wide = [bands, *[hidden] * (layers - 1)]
    params = {
        "layers": [{d: _lstm_params(next(k), n, hidden) for d in ("ahead", "back")} for n in wide],
        "out": _matrix(next(k), hidden, 29),
    }
    return params, (jax.random.normal(next(k), (length, batch, bands)), jax.random.randint(next(k), (length, batch), 0, 29))


def speech_loss(p: Params, batch: Any, remat: Remat = identity) -> Array:
    """The recurrent part of DeepSpeech 2: bidirectional layers whose directions are added, here with one label a frame."""
    xs, labels = batch
    for layer in p["layers"]:
        xs = lstm(layer["ahead"], xs, remat) + lstm(layer["back"], xs, remat, reverse=True)
        xs = jnp.clip(xs, 0.0, 20.0)
    return _cross_entropy(xs @ p["out"], labels)


# ---------------------------------------------------------------- feed-forward nets


def _norm(x: Array, p: Params, axes: tuple[int, ...] = (-1,)) -> Array:
    mean = x.mean(axes, keepdims=True)
    var = ((x - mean) ** 2).mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["shift"]


def _norm_params(n: int) -> Params:
    return {"scale": jnp.ones(n), "shift": jnp.zeros(n)}


def transformer_init(key: Array, hidden: int, batch: int, length: int, layers: int, words: int) -> tuple[Params, Any]:
    k = iter(jax.random.split(key, 6 * layers + 5))
    blocks = [
        {
            "qkv": _matrix(next(k), hidden, 3 * hidden), "proj": _matrix(next(k), hidden, hidden), "key": next(k),
            "up": _matrix(next(k), hidden, 4 * hidden), "down": _matrix(next(k), 4 * hidden, hidden),
            "norms": [_norm_params(hidden), _norm_params(hidden)],
        }
        for _ in range(layers)
    ]  # fmt: skip
    keys = [block.pop("key") for block in blocks]
    params = {"words": _matrix(next(k), words, hidden), "blocks": blocks, "out": _matrix(next(k), hidden, words)}
    tokens = jax.random.randint(next(k), (batch, length), 0, words)
    return params, (tokens, keys)


def _dropout(key: Array, x: Array, rate: float = 0.1) -> Array:
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def transformer_block(p: Params, x: Array, key: Array, heads: int) -> Array:
    """Attention and two dense layers, each after a norm, with dropout. x: (B, T, hidden)."""
    first, second, third = jax.random.split(key, 3)
    b, t, d = x.shape
    q, k, v = jnp.split((_norm(x, p["norms"][0]) @ p["qkv"]).reshape(b, t, heads, -1).transpose(0, 2, 1, 3), 3, -1)
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * (d // heads) ** -0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9), -1)
    attended = jnp.einsum("bhqk,bhkd->bqhd", _dropout(first, weights), v).reshape(b, t, d)
    x = x + _dropout(second, attended @ p["proj"])
    return x + _dropout(third, jax.nn.gelu(_norm(x, p["norms"][1]) @ p["up"]) @ p["down"])


def transformer_loss(p: Params, batch: Any, remat: Remat = identity) -> Array:
    tokens, keys = batch
    block = remat(partial(transformer_block, heads=8))
    x = p["words"][tokens]
    for layer, key in zip(p["blocks"], keys, strict=True):
        x = block(layer, x, key)
    return _cross_entropy((x @ p["out"])[:, :-1], tokens[:, 1:])


def resnet_init(key: Array, width: int, batch: int, pixels: int, blocks: int, stages: int = 4) -> tuple[Params, Any]:
    k = iter(jax.random.split(key, 16 * blocks + 5))

    def conv(size: int, n: int, m: int) -> Array:
        return jax.random.normal(next(k), (size, size, n, m)) * (size * size * n) ** -0.5

    found, n = [], width
    for s in range(stages):
        m = width * 2**s
        stage = []
        for _ in range(blocks):
            block = {"in": conv(1, n, m), "mid": conv(3, m, m), "out": conv(1, m, 4 * m)}
            block |= {"norms": [_norm_params(m), _norm_params(m), _norm_params(4 * m)]}
            stage.append(block | ({"skip": conv(1, n, 4 * m)} if n != 4 * m else {}))
            n = 4 * m
        found.append(stage)
    params = {"stem": conv(7, 3, width), "norm": _norm_params(width), "stages": found, "head": _matrix(next(k), n, 100)}
    return params, (jax.random.normal(next(k), (batch, pixels, pixels, 3)), jax.random.randint(next(k), (batch,), 0, 100))


def _conv(x: Array, w: Array, stride: int = 1) -> Array:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def resnet_block(p: Params, x: Array, stride: int) -> Array:
    """A bottleneck block with batch normalisation (He et al., 2016)."""
    norm = partial(_norm, axes=(0, 1, 2))
    y = jax.nn.relu(norm(_conv(x, p["in"]), p["norms"][0]))
    y = jax.nn.relu(norm(_conv(y, p["mid"], stride), p["norms"][1]))
    y = norm(_conv(y, p["out"]), p["norms"][2])
    return jax.nn.relu(y + (_conv(x, p["skip"], stride) if "skip" in p else x))


def resnet_loss(p: Params, batch: Any, remat: Remat = identity) -> Array:
    images, labels = batch
    x = jax.nn.relu(_norm(_conv(images, p["stem"], 2), p["norm"], (0, 1, 2)))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for s, stage in enumerate(p["stages"]):
        for b, block in enumerate(stage):
            x = remat(partial(resnet_block, stride=2 if s and not b else 1))(block, x)
    return _cross_entropy(x.mean((1, 2)) @ p["head"], labels)


@dataclass(frozen=True)
class Case:
    """A model: `full` sizes as in Echo's evaluation, for a GPU, and `small` ones for a CPU."""

    init: Callable[..., tuple[Params, Any]]
    loss: Callable[..., Array]
    full: dict[str, Any]
    small: dict[str, Any]


CASES = {
    "nmt": Case(
        # IWSLT15 English to Vietnamese has 17,191 and 7,709 words: rounded up to multiples of 8, or XLA would pad the logits.
        nmt_init, nmt_loss,
        {"hidden": 512, "batch": 64, "length": 50, "words": (17192, 7712)},
        {"hidden": 128, "batch": 16, "length": 40, "words": (1000, 500)},
    ),
    "deepspeech2": Case(
        speech_init, speech_loss,
        {"hidden": 800, "batch": 32, "length": 400, "layers": 5, "bands": 161},
        {"hidden": 128, "batch": 16, "length": 100, "layers": 3, "bands": 40},
    ),
    "transformer": Case(
        transformer_init, transformer_loss,
        {"hidden": 512, "batch": 64, "length": 128, "layers": 6, "words": 32000},
        {"hidden": 128, "batch": 8, "length": 64, "layers": 4, "words": 1000},
    ),
    "resnet": Case(
        resnet_init, resnet_loss,
        {"width": 64, "batch": 64, "pixels": 224, "blocks": 4},
        {"width": 16, "batch": 8, "pixels": 64, "blocks": 2},
    ),
}  # fmt: skip
