"""Settings of all tests. JAX uses 64 bits, so that gradients can be compared with a reference to 1e-10."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

# The tests spend most of their time in compilation. LLVM's optimisations change no tested value and no HLO.
if not Path("/dev/nvidia0").exists():  # tests marked `gpu` compile as users do
    os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0").strip()
else:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the card

signal.signal(signal.SIGINT, signal.default_int_handler)  # scripts under test inherit it; background jobs ignore it

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

jax.config.update("jax_enable_x64", True)


@pytest.fixture(scope="module", autouse=True)
def compiled_code_is_freed() -> Iterator[None]:
    """Frees compiled code after each file. Each program maps memory, and Linux allows a process 65,530 mappings."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Iterator[Path]:
    """A folder with compiled code, shared by the tests of a file that restart trainings."""
    folder = tmp_path_factory.mktemp("compiled")
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        compilation_cache.reset_cache()
        yield folder
    finally:
        jax.config.update("jax_compilation_cache_dir", before[0])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
        compilation_cache.reset_cache()
