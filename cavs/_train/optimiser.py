"""Parameter updates: optax for the dense parameters, row-sparse ("lazy") updates for the table of embeddings.

A batch reads a few hundred of a table's many thousand rows. Only those rows and their optimiser state are updated:

- sgd      row -= lr g                                        equal to the dense update
- adagrad  s += g², row -= lr g / √(s + 1e-10)                equal to the dense update
- adam     m and v decay only if the row is read (as in TensorFlow's LazyAdam and PyTorch's SparseAdam); the bias correction
           uses the number of all steps so far. This differs from the dense Adam, which updates every row at every step.
- adamw    as adam

Weight decay applies to the matrices among the dense parameters, not to biases or the table. It is added to the gradient (L2),
or with adamw to the update.
"""

import jax
import jax.numpy as jnp
import optax

from cavs._graphs.pytree import PyTree
from cavs._train.config import Config

EPSILON = {"adagrad": 1e-10, "adam": 1e-8, "adamw": 1e-8}
ADAM = (0.9, 0.999)


def dense(config: Config) -> optax.GradientTransformation:
    """The optax transformation of all parameters except the table. Its state is a pytree of arrays."""
    if config.optimizer == "adamw":
        return optax.adamw(config.lr, *ADAM, eps=EPSILON["adamw"], weight_decay=config.weight_decay, mask=_is_matrix)
    rule = {
        "sgd": lambda: optax.sgd(config.lr),
        "adagrad": lambda: optax.adagrad(config.lr, initial_accumulator_value=0.0, eps=EPSILON["adagrad"]),
        "adam": lambda: optax.adam(config.lr, *ADAM, eps=EPSILON["adam"]),
    }[config.optimizer]()
    # A state of the same structure with and without decay, so that a resumed run may change it.
    decay = optax.add_decayed_weights(config.weight_decay) if config.weight_decay else optax.identity()
    return optax.chain(optax.masked(decay, _is_matrix), rule)


def factor(config: Config, count: jax.Array, total: int) -> jax.Array | float:
    """The factor of a step's learning rates: a linear warm-up, then the schedule, which ends with 0.

    Args:
        config: the settings: `warmup` steps, and the name of the `schedule`.
        count: the number of steps before this one.
        total: the number of steps of the whole run.
    """
    if config.schedule == "constant" and not config.warmup:
        return 1.0
    now = count.astype(jnp.float32)
    rise = (now + 1) / max(config.warmup, 1)
    done = jnp.clip((now - config.warmup) / max(total - config.warmup, 1), 0, 1)
    fall = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + jnp.cos(jnp.pi * done)) / 2}[config.schedule]
    return jnp.where(now < config.warmup, rise, fall)


def _is_matrix(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def clip(gradients: PyTree, limit: float) -> PyTree:
    """Scales all gradients so that their global Euclidean norm is at most `limit`; 0 means no limit."""
    if not limit:
        return gradients
    norm = global_norm(gradients)
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda g: g * scale, gradients)


def global_norm(gradients: PyTree) -> jax.Array:
    """The Euclidean norm of all leaves together. (The name of optax's function differs between the supported versions.)"""
    return jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradients)))


def init_rows(config: Config, table: jax.Array) -> dict[str, jax.Array]:
    """The optimiser state of the table, one row per word."""
    names = {"sgd": (), "adagrad": ("sum",), "adam": ("m", "v"), "adamw": ("m", "v")}[config.optimizer]
    return {name: jnp.zeros_like(table) for name in names}


def update_rows(
    config: Config,
    table: jax.Array,
    slots: dict[str, jax.Array],
    index: jax.Array,
    rows: jax.Array,
    gradient: jax.Array,
    count: jax.Array,
    factor: jax.Array | float = 1.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Updates the table and its optimiser state after a step that read `rows = table[index]`.

    Args:
        config: the settings of the optimiser.
        table: (N, d) word vectors.
        slots: the optimiser state, each of shape (N, d).
        index: (U,) distinct row numbers, out of range in padding.
        rows: (U, d) the rows read.
        gradient: (U, d) their gradient.
        count: the number of this step, from 1.
        factor: a factor of the learning rate.
    """
    lr = (config.lr if config.embedding_lr is None else config.embedding_lr) * factor
    old = {name: slot.at[index].get(mode="fill", fill_value=0) for name, slot in slots.items()}
    new: dict[str, jax.Array] = {}
    if config.optimizer == "sgd":
        rows = rows - lr * gradient
    elif config.optimizer == "adagrad":
        new["sum"] = old["sum"] + gradient**2
        rows = rows - lr * jnp.where(new["sum"] > 0, gradient / jnp.sqrt(new["sum"] + EPSILON["adagrad"]), 0)
    else:
        first, second = ADAM
        count = count.astype(table.dtype)
        new["m"] = first * old["m"] + (1 - first) * gradient
        new["v"] = second * old["v"] + (1 - second) * gradient**2
        m, v = new["m"] / (1 - first**count), new["v"] / (1 - second**count)
        rows = rows - lr * m / (jnp.sqrt(v) + EPSILON["adam"])
    return _put(table, index, rows), {name: _put(slots[name], index, new[name]) for name in slots}


def _put(whole: jax.Array, index: jax.Array, rows: jax.Array) -> jax.Array:
    return whole.at[index].set(rows, mode="drop")
