"""The equations that a kernel computes on its values: elementwise maths, and moves of whole unit vectors."""

import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from cavs.kernels._program.jaxprs import Eqn, aval
from cavs.kernels._program.widths import blocks

Blocks: TypeAlias = np.ndarray  # an array of objects, each the (rows, units) array of one unit vector


def elementwise(e: Eqn, args: list[jax.Array]) -> jax.Array:
    """Computes an elementwise equation."""
    x, name = args[0], e.primitive.name
    if name in ("copy", "copy_p", "stop_gradient"):
        return x
    if name == "add_any":
        return x + args[1]
    if name == "one_minus_square":
        return 1 - x * x
    if name == "integer_pow":
        power = functools.reduce(lambda a, _: a * x, range(abs(e.params["y"])), jnp.ones_like(x))
        return 1 / power if e.params["y"] < 0 else power
    return e.primitive.bind(*args, **e.params)


def structure(e: Eqn, args: list[Blocks], unit: int) -> list[Blocks]:
    """Computes an equation that moves whole unit vectors."""
    name, p, x = e.primitive.name, e.params, args[0]
    rank = len(aval(e.invars[0]).shape)
    if name in ("reshape", "squeeze", "expand_dims"):
        return [x]
    if name == "split":
        sizes = [n // unit if p["axis"] == rank - 1 else n for n in p["sizes"]]
        return np.split(x, np.cumsum(sizes)[:-1], axis=p["axis"])
    if name == "slice":
        scale = [1] * (rank - 1) + [unit]
        places = zip(p["start_indices"], p["limit_indices"], scale, strict=True)
        return [x[tuple(slice(a // s, b // s) for a, b, s in places)]]
    if name == "concatenate":
        return [np.concatenate(args, axis=p["dimension"])]
    if name == "stack":
        return [np.stack(args, axis=p["axis"])]
    if name == "unstack":
        return [y.squeeze(p["axis"]) for y in np.split(x, x.shape[p["axis"]], axis=p["axis"])]
    if name == "pad":
        widths = [(a, b) for a, b, _ in p["padding_config"]]
        widths[-1] = (widths[-1][0] // unit, widths[-1][1] // unit)
        return [np.pad(x, widths, constant_values=args[1][()])]
    shape = blocks(aval(e.outvars[0]), unit)  # broadcast_in_dim
    if x.size == 1 and not x.shape:
        out = np.empty(shape, object)
        for at in np.ndindex(*shape):
            out[at] = x[()]
        return [out]
    kept = dict(zip(p["broadcast_dimensions"], x.shape, strict=True))
    return [np.broadcast_to(x.reshape([kept.get(d, 1) for d in range(len(shape))]), shape)]
