"""Plans of twelve programs, graphs and arrays, under budgets: what the compiled steps need. For `bench.memory`."""

import math
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import cavs
from bench.budgets import Step
from bench.echo_cases import _cross_entropy as cross_entropy, _norm as norm, _norm_params as norm_params, transformer_block
from cavs.memory import BudgetError, plan, recompute

Array: TypeAlias = jax.Array
Made: TypeAlias = tuple[Callable[[Any, Any], Array], Any, Any, Any]  # a loss, parameters, a batch, and its axis of samples
POINTS = 4  # budgets from the whole batch to the smallest plan
AGAIN = 2  # budgets of arrays for `recompute`, from a middle one to its smallest plan


def _weights(shapes: Any) -> Any:
    """Arrays of these shapes, also in nested dicts, scaled to the width of their input."""
    if isinstance(shapes, dict):
        return {name: _weights(of) for name, of in shapes.items()}
    return jnp.asarray(np.random.default_rng(0).normal(size=shapes) / math.sqrt(math.prod(shapes[:-1])), jnp.float32)


def _data(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def _words(below: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(2).integers(0, below, shape).astype(np.int32)


def _conv(x: Array, w: Array, stride: int = 1) -> Array:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _losses(logits: Array, labels: Array) -> Array:
    return jax.vmap(cross_entropy)(logits, labels)


def mlp(n: int, h: int) -> Made:
    def loss(p: Any, batch: Any) -> Array:
        x, y = batch
        for name in ("a", "b", "c"):
            x = jax.nn.relu(x @ p[name])
        return cavs.data.mean(_losses(x[:, None] @ p["out"], y[:, None]))

    shapes = {"a": (h, 4 * h), "b": (4 * h, 4 * h), "c": (4 * h, h), "out": (h, 10)}
    return loss, _weights(shapes), (_data(16 * n, h), _words(10, 16 * n)), 0


def relu_cnn(n: int, h: int) -> Made:
    """As VGG: convolutions with ReLU, and pooling."""

    def loss(p: Any, batch: Any) -> Array:
        x, y = batch
        for name in ("a", "b", "c", "d"):
            x = jax.nn.relu(_conv(x, p[name]))
            if name in "bd":
                x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return cavs.data.mean(_losses(x.mean((1, 2))[:, None] @ p["out"], y[:, None]))

    shapes = {"a": (3, 3, 3, h), "b": (3, 3, h, h), "c": (3, 3, h, 2 * h), "d": (3, 3, 2 * h, 2 * h), "out": (2 * h, 10)}
    return loss, _weights(shapes), (_data(n, 32, 32, 3), _words(10, n)), 0


def resnet_with_group_norm(n: int, h: int) -> Made:
    def normed(x: Array) -> Array:
        groups = x.reshape(*x.shape[:3], 4, -1)
        mean = groups.mean((1, 2, 4), keepdims=True)
        scaled = (groups - mean) * lax.rsqrt(((groups - mean) ** 2).mean((1, 2, 4), keepdims=True) + 1e-5)
        return scaled.reshape(x.shape)

    def loss(p: Any, batch: Any) -> Array:
        x, y = batch
        x = _conv(x, p["stem"])
        for block in p["blocks"].values():
            x = jax.nn.relu(x + normed(_conv(jax.nn.relu(normed(_conv(x, block["a"]))), block["b"])))
        return cavs.data.mean(_losses(x.mean((1, 2))[:, None] @ p["out"], y[:, None]))

    blocks = {str(i): {"a": (3, 3, h, h), "b": (3, 3, h, h)} for i in range(3)}
    return loss, _weights({"stem": (3, 3, 3, h), "blocks": blocks, "out": (h, 10)}), (_data(n, 16, 16, 3), _words(10, n)), 0


def autoencoder(n: int, h: int) -> Made:
    """Convolutions of stride two, transposed convolutions, and a sum of squares."""

    def loss(p: Any, x: Any) -> Array:
        code = jax.nn.gelu(_conv(jax.nn.gelu(_conv(x, p["a"], 2)), p["b"], 2))
        up = partial(lax.conv_transpose, strides=(2, 2), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return cavs.data.total((up(jax.nn.gelu(up(code, p["c"])), p["d"]) - x) ** 2)

    shapes = {"a": (3, 3, 3, h), "b": (3, 3, h, 2 * h), "c": (3, 3, 2 * h, h), "d": (3, 3, h, 3)}
    return loss, _weights(shapes), _data(n, 32, 32, 3), 0


def transformer(n: int, h: int) -> Made:
    """Two blocks with dropout from a key of each sequence, and a vocabulary."""

    def loss(p: Any, batch: Any) -> Array:
        words, keys = batch
        x = p["words"][words]
        for i, block in p["blocks"].items():
            block = block | {"norms": [norm_params(h)] * 2}
            each = jax.vmap(lambda x, key, b=block, i=i: transformer_block(b, x[None], jax.random.fold_in(key, int(i)), 4)[0])
            x = each(x, keys)
        return cavs.data.mean(_losses((x @ p["out"])[:, :-1], words[:, 1:]))

    blocks = {str(i): {"qkv": (h, 3 * h), "proj": (h, h), "up": (h, 4 * h), "down": (4 * h, h)} for i in range(2)}
    return loss, _weights({"words": (500, h), "blocks": blocks, "out": (h, 500)}), (_words(500, n, 32), _keys(n)), 0


def _keys(n: int) -> Array:
    return jax.random.split(jax.random.key(0), n)


def mixer(n: int, h: int) -> Made:
    """Products over positions and over channels, in turn."""

    def loss(p: Any, batch: Any) -> Array:
        x, y = batch
        for name in ("a", "b"):
            x = x + jnp.einsum("bph,pq->bqh", jax.nn.gelu(norm(x, norm_params(h))), p[name]["over"])
            x = x + jax.nn.gelu(norm(x, norm_params(h)) @ p[name]["up"]) @ p[name]["down"]
        return cavs.data.mean(_losses(x.mean(1)[:, None] @ p["out"], y[:, None]))

    block = {"over": (16, 16), "up": (h, 4 * h), "down": (4 * h, h)}
    return loss, _weights({"a": block, "b": block, "out": (h, 10)}), (_data(n, 16, h), _words(10, n)), 0


def lstm_language_model(n: int, h: int) -> Made:
    """A padded loop over words, and a vocabulary."""

    def loss(p: Any, words: Any) -> Array:
        def step(carry: Any, x: Array) -> tuple[Any, Array]:
            i, f, o, g = jnp.split(x @ p["w"] + carry[0] @ p["u"], 4, -1)
            c = jax.nn.sigmoid(f) * carry[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (new := jax.nn.sigmoid(o) * jnp.tanh(c), c), new

        zeros = jnp.zeros((len(words), h))
        _, states = lax.scan(step, (zeros, zeros), p["words"][words].swapaxes(0, 1))
        return cavs.data.mean(_losses((states.swapaxes(0, 1) @ p["out"])[:, :-1], words[:, 1:]))

    shapes = {"words": (1000, h), "w": (h, 4 * h), "u": (h, 4 * h), "out": (h, 1000)}
    return loss, _weights(shapes), _words(1000, n, 24), 0


def series(n: int, h: int) -> Made:
    """A loop with a ReLU over series whose samples are the second axis; a table that all share."""

    def loss(p: Any, batch: Any) -> Array:
        first = jnp.zeros((batch["x"].shape[1], h)) + batch["start"]
        last, _ = lax.scan(lambda s, x: (jax.nn.relu(x @ p["w"] + s @ p["u"]), None), first, batch["x"])
        return cavs.data.total(((last @ p["out"])[:, 0] - batch["y"]) ** 2)

    batch = {"x": _data(40, n, 8), "y": _data(n), "start": _data(h)}
    return loss, _weights({"w": (8, h), "u": (h, h), "out": (h, 1)}), batch, {"x": 1, "y": 0, "start": None}


_MADE = (mlp, relu_cnn, resnet_with_group_norm, autoencoder, transformer, mixer, lstm_language_model, series)
ARRAYS = {made.__name__: made for made in _MADE}


def plans(program: str, samples: int, hidden: int) -> Generator[None, None, dict[str, Any]]:
    """Plans a program under budgets in geometric steps from the whole batch to the smallest plan, and compiles each plan.

    Yields once when all is compiled.

    Returns:
        A record. "points" has for each budget its bytes, "temp" of the step as compiled here, and "parts", or for `recompute`
        the FLOPs of products that run twice ("flops"). "refused": whether less than the smallest plan is refused.
    """
    if program not in ARRAYS:
        step = Step(program, "auto", samples, hidden)
        loss, params, batch, how = step.loss, step.params, step.graphs, {"collate": step.collate}
    else:
        loss, params, batch, axis = ARRAYS[program](samples, hidden)
        how = {"axis": axis}
    planned = partial(plan, loss, params, batch, **how)
    whole, least = planned().peak, planned("min").peak
    points = []
    for budget in _budgets(whole, least, POINTS):
        found = planned(budget)
        temp, count = _temp(found.loss, params, found.batch(batch), found.compiler_options), len(found._batch.sizes)
        points.append({"budget": budget, "parts": found.parts * found.segments, "temp": temp, "compilations": count})
    if program in ARRAYS:
        free, floor = (recompute(loss, budget).plan(params, batch).peak for budget in (None, "min"))
        for budget in _budgets(free, floor, AGAIN + 1)[1:]:
            small = recompute(loss, budget)
            again = small.plan(params, batch)
            temp, count = _temp(small, params, batch, again.compiler_options), len(again._search.compiled)
            points.append({"budget": budget, "flops": again.flops, "temp": temp, "compilations": count})
    try:
        refused = planned(max(1, least // 2)) is None
    except BudgetError:
        refused = True
    yield
    return {"program": program, "samples": samples, "hidden": hidden, "points": points, "refused": refused}


def _budgets(most: int, least: int, count: int) -> list[int]:
    return [max(least, math.ceil(b)) for b in np.geomspace(most, least, count)]


def _temp(loss: Any, params: Any, batch: Any, options: dict[str, Any]) -> int:
    """Bytes of temporary memory of a loss and its gradient, compiled anew."""
    memory = jax.jit(jax.value_and_grad(loss)).lower(params, batch).compile(options).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes
