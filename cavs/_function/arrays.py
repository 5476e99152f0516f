"""Arguments of users as arrays."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from cavs._graphs.pytree import PyTree

EQUINOX = (
    "For an Equinox module write params, static = equinox.partition(module, equinox.is_array), and inside F "
    "equinox.combine(params, static)."
)


def as_arrays(tree: PyTree, where: str, cure: str = EQUINOX) -> PyTree:
    """Returns `tree` with all leaves as JAX arrays.

    Raises `TypeError` if a leaf is not an array, and `ValueError` if it does not fit JAX's 32 bits; the message names the
    argument `where`, and the first such leaf. It ends with `cure` if the leaf is no array of NumPy, either.
    """
    try:
        return jax.tree.map(_fitting, tree)
    except (TypeError, ValueError, OverflowError):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            at = jax.tree_util.keystr(path) or "the root"
            try:
                _fitting(leaf)
            except OverflowError as error:
                raise ValueError(f"{where}: got {_unfitting(leaf)} It is at {at}.") from error
            except (TypeError, ValueError) as error:
                check_unmasked(leaf, where, at)
                got = f"an array of {leaf.dtype}" if hasattr(leaf, "dtype") else f"a {type(leaf).__name__}"
                hint = "Write np.asarray(rows, np.float32), or numbers in place of names." if hasattr(leaf, "dtype") else cure
                raise TypeError(f"{where}: got {got} at {at}; expected only arrays of numbers. {hint}") from error
        raise


def as_array(x: ArrayLike | Sequence[int], where: str) -> jax.Array:
    """Returns one argument as an array.

    Raises `TypeError` if it is something else, such as `None`, and `ValueError` if it does not fit JAX's 32 bits; the message
    names the argument `where`.
    """
    try:
        return _fitting(x)
    except OverflowError as error:
        raise ValueError(f"{where}: got {_unfitting(x)}") from error
    except (TypeError, ValueError) as error:
        raise TypeError(f"{where}: got a {type(x).__name__}; expected an array of numbers.") from error


def _fitting(x: ArrayLike | Sequence[int]) -> jax.Array:
    """Returns an array of JAX. Raises `OverflowError` if it does not fit 32 bits, also where JAX changes values silently."""
    if beyond_32_bits(x):
        raise OverflowError
    return jnp.asarray(x)


def _unfitting(x: object) -> str:
    """Says what does not fit, for an error."""
    return beyond_32_bits(x) or MSG_BITS.format("int", x, x, "int32")


def check_unmasked(x: object, where: str, at: str) -> None:
    """Raises `TypeError` if values of an array are masked: NumPy would return what lies below the mask.

    The message names the argument `where`, and the leaf by its path `at`.
    """
    if np.ma.is_masked(x):
        raise TypeError(f"{where}: got an array with masked values at {at}; expected all values. Write rows.filled(0).")


def is_real(x: object) -> bool:
    """Whether `x` is a number or an array of numbers. Complex numbers, keys of `jax.random` and texts are not."""
    if not isinstance(x, ArrayLike):
        return False
    dtype = getattr(x, "dtype", np.dtype(type(x)))
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating))


def as_indices(x: jax.Array) -> jax.Array:
    """Returns integers of 8 and 16 bits as int32: to index with them, JAX adds the size of the axis, which may overflow."""
    return x.astype(jnp.int32) if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 4 else x


MSG_BITS = (
    "dtype {} with values from {} to {}; expected values that fit {}, as JAX has 32 bits. Write "
    "jax.config.update('jax_enable_x64', True) for 64."
)


def beyond_32_bits(x: object) -> str | None:
    """Says which values of a NumPy array or a float would become others on a device, for an error; `None` if none would."""
    if not isinstance(x, np.ndarray | np.generic | float):
        return None
    x = np.asarray(x)
    if x.dtype.itemsize < 8 or x.dtype.kind not in "iuf" or not x.size:
        return None
    if jax.config.jax_enable_x64:  # type: ignore
        return None
    if x.dtype.kind == "f":
        limits = np.finfo(np.float32)
        finite = x if max(x.max(), -x.min()) <= limits.max else x[np.isfinite(x)]
    else:
        limits = np.iinfo(np.int32 if x.dtype.kind == "i" else np.uint32)
        finite = x
    if not finite.size or limits.min <= finite.min() and finite.max() <= limits.max:
        return None
    return MSG_BITS.format(x.dtype, finite.min(), finite.max(), limits.dtype)
