"""Settings of every test: 64-bit JAX, so that gradients can be held against a reference to 1e-10."""

import os

# Nearly all the time of the tests is compilation. LLVM's optimisations change no value that is tested and no HLO.
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0").strip()

import jax  # noqa: E402

jax.config.update("jax_enable_x64", True)
