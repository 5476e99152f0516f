"""Decorators that switch off settings of JAX inside a function: they are meant for what users write."""

import jax

# Inside, JAX promotes dtypes as it does by default, also where `jax_numpy_dtype_promotion` is `"strict"`.
promoting = jax.numpy_dtype_promotion("standard")
# Inside, `jax.disable_jit` has no effect. That switch lets users read values within their own functions.
# The levels of a batch are one program of XLA or of a kernel, which cannot run operation by operation.
# `cavs.interpret` runs F vertex by vertex, with values.
always_compiled = jax.disable_jit(False)
