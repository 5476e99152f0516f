"""Settings of every test: 64-bit JAX, so that gradients can be held against a reference to 1e-10."""

import jax

jax.config.update("jax_enable_x64", True)
