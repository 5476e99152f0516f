"""Parameter updates: optax for the dense parameters, row-sparse ("lazy") updates for the table of embeddings.

A batch reads a few hundred of a table's many thousand rows. Only those rows and their optimiser state are touched:

- sgd      row -= lr g                                        as the dense update
- adagrad  s += g², row -= lr g / √(s + 1e-10)                as the dense update
- adam     m, v decay only when the row is read (as TensorFlow's LazyAdam, PyTorch's SparseAdam); bias correction by the
           number of all steps so far. Not the dense Adam, which would move every row at every step.

Weight decay (L2, added to the gradient) is for matrices of the dense parameters: not for biases, nor the table.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from cavs._train.config import Config

EPSILON = {"adagrad": 1e-10, "adam": 1e-8}
ADAM = (0.9, 0.999)


def dense(config: Config) -> optax.GradientTransformation:
    """The transformation for everything but the table; its state is a pytree of arrays."""
    rule = {
        "sgd": lambda: optax.sgd(config.lr),
        "adagrad": lambda: optax.adagrad(config.lr, initial_accumulator_value=0.0, eps=EPSILON["adagrad"]),
        "adam": lambda: optax.adam(config.lr, *ADAM, eps=EPSILON["adam"]),
    }[config.optimizer]()
    if not config.weight_decay:
        return rule
    return optax.chain(optax.add_decayed_weights(config.weight_decay, _is_matrix), rule)


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def clip(gradients: Any, limit: float) -> Any:
    """All gradients scaled so that their common Euclidean norm is at most `limit`; 0: no limit."""
    if not limit:
        return gradients
    norm = global_norm(gradients)
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda g: g * scale, gradients)


def global_norm(gradients: Any) -> Any:
    """The Euclidean norm of all leaves together (optax's has two names, neither of them in all versions we support)."""
    return jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradients)))


def init_rows(config: Config, table: Any) -> dict[str, Any]:
    """Optimiser state of the table: one row a word."""
    names = {"sgd": (), "adagrad": ("sum",), "adam": ("m", "v")}[config.optimizer]
    return {name: jnp.zeros_like(table) for name in names}


def update_rows(
    config: Config, table: Any, slots: dict[str, Any], index: Any, rows: Any, gradient: Any, count: Any
) -> tuple[Any, dict[str, Any]]:
    """The table and its state after one step that read `rows = table[index]`.

    **Arguments:** `index` (U,) distinct row numbers, out of range in padding; `rows`, `gradient` (U, d); `count` this
    step's number, from 1.
    """
    lr = config.lr if config.embedding_lr is None else config.embedding_lr
    old = {name: slot.at[index].get(mode="fill", fill_value=0) for name, slot in slots.items()}
    new: dict[str, Any] = {}
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


def _put(whole: Any, index: Any, rows: Any) -> Any:
    return whole.at[index].set(rows, mode="drop")
