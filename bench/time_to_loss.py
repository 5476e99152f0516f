"""How long Echo's translation model trains until its loss is small, with `jax.grad` and with `cavs.memory.recompute`.

`python -m bench.time_to_loss [--small] [--limit SECONDS]` prints a line of JSON for each. Both have the same memory, and each
has about the largest batch that fits. The sentences are a synthetic language: each word has four likely ones after it, and the
translation is the sentence itself. Steps are Adam's, at a rate that grows with the square root of the batch.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from bench.echo_cases import nmt_init, nmt_loss
from cavs.memory import bytes_of, recompute

WAYS: dict[str, Callable[[Any], Any]] = {"jax.grad": lambda loss: loss, "recompute": recompute}
EVERY = 10  # steps between two looks at the loss


@dataclass(frozen=True)
class Setting:
    """Sizes of the model; how many of its words occur; the memory; the batch of each way; and the loss that ends it."""

    sizes: dict[str, Any]
    words: int
    memory: str
    batches: dict[str, int]
    loss: float = 2.0  # the best without the source sentence is log 4 = 1.39


FULL = Setting({"hidden": 512, "length": 50, "words": (17192, 7712)}, 512, "2GB", {"jax.grad": 80, "recompute": 448})
SMALL = Setting({"hidden": 32, "length": 12, "words": (64, 64)}, 16, "6MiB", {"jax.grad": 16, "recompute": 32})


def sentences(key: jax.Array, setting: Setting, batch: int) -> Any:
    """Draws a batch of sentences of the same length and their translations."""
    first, later = jax.random.split(key)
    length, n = setting.sizes["length"], setting.words

    def follow(word: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (word := (3 * word + chosen) % n), word

    start, chosen = jax.random.randint(first, (batch,), 0, n), jax.random.randint(later, (length, batch), 0, 4)
    words = jax.lax.scan(follow, start, chosen)[1]
    return words, words, jnp.full((batch,), length)


def trained(way: str, setting: Setting, limit: float) -> dict[str, Any]:
    """Trains until the mean loss of `EVERY` steps is small enough, or for `limit` seconds. Compiling does not count.

    Returns:
        A record: "batch", "bytes" of the step as compiled, "seconds", "steps", "loss", and "ms" of a step.

    Raises:
        ValueError: the step needs more than the memory of the setting.
    """
    batch = setting.batches[way]
    optimiser = optax.adam(1e-3 * (batch / setting.batches["jax.grad"]) ** 0.5)
    params, _ = jax.jit(partial(nmt_init, batch=batch, **setting.sizes))(jax.random.key(0))
    loss = WAYS[way](nmt_loss)

    def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, sentences(key, setting, batch))
        updates, moments = optimiser.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    state, key = (params, jax.jit(optimiser.init)(params)), jax.random.key(1)
    compiled = jax.jit(step, donate_argnums=0).lower(state, key).compile()
    m = compiled.memory_analysis()
    assert m is not None
    needed = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    if needed > (most := bytes_of(setting.memory)):
        raise ValueError(f"{way}: a step of {batch} sentences needs {needed} bytes; expected at most {most}. Make it smaller.")
    mean, steps, start = float("inf"), 0, time.perf_counter()
    while mean > setting.loss and time.perf_counter() - start < limit:
        values = []
        for _ in range(EVERY):
            state, value = compiled(state, jax.random.fold_in(key, steps))
            steps, values = steps + 1, [*values, value]
        mean = float(sum(values)) / EVERY
    seconds = time.perf_counter() - start
    found = {"way": way, "batch": batch, "bytes": needed, "seconds": round(seconds, 2), "steps": steps, "loss": round(mean, 3)}
    return found | {"ms": round(1e3 * seconds / steps, 2)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=float, default=120)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    for way in WAYS:
        print(json.dumps(trained(way, SMALL if asked.small else FULL, asked.limit)), flush=True)
