"""The user's function of one training step, checked when it is traced."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cavs._graphs.counted import counted
from cavs._graphs.pytree import PyTree


def of_two(fun: Any) -> Any:
    """Returns `fun`, with a check that it returns a state and metrics."""
    name = getattr(fun, "__name__", "fun")

    @functools.wraps(fun)
    def one(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        out = fun(state, batch)
        if not isinstance(out, tuple | list) or len(out) != 2:
            got = counted(len(out), "result") if isinstance(out, tuple | list) else f"a {type(out).__name__}"
            raise TypeError(f"step: {name}: returned {got}; expected the new state and the metrics. Write return state, loss.")
        return out[0], out[1]

    return one


def keeping(fun: Any) -> Any:
    """Returns `fun`, with a check that its new state has the structure, shapes and dtypes of the old one."""
    name = getattr(fun, "__name__", "fun")

    @functools.wraps(fun)
    def one(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        new, metrics = fun(state, batch)
        before, after = jax.tree.structure(state), jax.tree.structure(new)
        if before != after:
            raise TypeError(f"step: {name}: returned a state of structure {after}; expected that of the old state, {before}.")
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(new), strict=True):
            was, now = (f"{jnp.result_type(a)}{list(np.shape(a))}" for a in (x, y))
            # An old state may be a Python number, whose dtype JAX converts.
            weak = np.shape(x) == np.shape(y) and getattr(x, "weak_type", isinstance(x, int | float))
            if was != now and not weak:
                write = f" Write x.astype({jnp.result_type(x).name!r})." if np.shape(x) == np.shape(y) else ""
                raise TypeError(
                    f"step: {name}: returned a state whose {jax.tree_util.keystr(path) or 'array'} is {now}; expected {was}, "
                    f"as in the old state.{write}"
                )
        return new, metrics

    return one
