"""Finds 64-bit numbers that JAX would silently change, because it has 32 bits unless `jax_enable_x64` is set."""

import jax
import numpy as np

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
