"""Winograd's convolution one stage after another in plain JAX: the reference of the tasks of `kernels/_tasks`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cavs.kernels._tasks.winograd import ConvolutionSizes, Padding, matrices


def staged(x: jax.Array, w: jax.Array, padding: Padding, m: int) -> jax.Array:
    """Convolves x of shape (N, H, W, C) with w of shape (3, 3, C, K), one stage after another, in the dtype of x."""
    a, g, b = (jnp.asarray(matrix, x.dtype) for matrix in matrices(m))
    s = ConvolutionSizes.of(x.shape, w.shape[3], padding, m)
    v = _exact("pi,qj,nyxijc->pqnyxc", b, b, _input_tiles(x, s))
    u = _exact("pi,qj,ijck->pqck", g, g, w)
    y = _exact("ip,jq,pqnyxk->nyixjk", a, a, _exact("pqnyxc,pqck->pqnyxk", v, u))
    return y.reshape(x.shape[0], s.tiles_down * m, s.tiles_across * m, -1)[:, : s.out_height, : s.out_width]


def staged_gradient(x: jax.Array, dy: jax.Array, padding: Padding, m: int) -> jax.Array:
    """Returns the gradient of `staged` with respect to w, one stage after another, for dy with respect to its result."""
    a, g, b = (jnp.asarray(matrix, x.dtype) for matrix in matrices(m))
    s = ConvolutionSizes.of(x.shape, dy.shape[3], padding, m)
    fill = ((0, 0), (0, s.tiles_down * m - s.out_height), (0, s.tiles_across * m - s.out_width), (0, 0))
    tiles = jnp.pad(dy, fill).reshape(s.images, s.tiles_down, m, s.tiles_across, m, s.outputs)
    v = _exact("pi,qj,nyxijc->pqnyxc", b, b, _input_tiles(x, s))
    d = _exact("ip,jq,nyixjk->pqnyxk", a, a, tiles)
    return _exact("pi,qj,pqck->ijck", g, g, _exact("pqnyxc,pqnyxk->pqck", v, d))


_exact = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def _input_tiles(x: jax.Array, s: ConvolutionSizes) -> jax.Array:
    """The tiles of the input, which overlap, as (N, tiles down, tiles across, m + 2, m + 2, C)."""
    counts, size = (s.tiles_down, s.tiles_across), s.m + 2
    fill = [(low, n * s.m + 2 - side - low) for (low, _), n, side in zip(s.padding, counts, x.shape[1:3], strict=True)]
    x = jnp.pad(x, ((0, 0), *fill, (0, 0)))
    down, across = (s.m * np.arange(n)[:, None] + np.arange(size) for n in counts)
    return x[:, down[:, None, :, None], across[None, :, None, :]]
