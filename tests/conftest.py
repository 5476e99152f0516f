"""Settings of all tests. JAX uses 64 bits, so that gradients can be compared with a reference to 1e-10."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONTROLLER = "PYTEST_XDIST_WORKER" not in os.environ  # the process that starts the others, or the only one

# The tests spend most of their time in compilation, so XLA emits code fast instead of fast code. The HLO stays the same.
FAST_COMPILATION = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",  # an MLIR pipeline for each fusion: 3 times slower
]
if Path("/dev/nvidia0").exists():  # tests marked `gpu` compile as users do
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the card
elif CONTROLLER:  # workers and scripts under test inherit it
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FAST_COMPILATION]).strip()
    # All processes of this run share what they compile. A later run starts empty.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="cavs-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # the lines of each operation, which profilers read: 3 % of the time
    # Scripts under test import JAX, which takes three times as long without bytecode. Where Python must not write it beside the
    # sources, it goes to the same folder.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        os.environ["PYTHONPYCACHEPREFIX"] = os.environ["JAX_COMPILATION_CACHE_DIR"] + "/bytecode"

signal.signal(signal.SIGINT, signal.default_int_handler)  # scripts under test inherit it; background jobs ignore it

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_enable_x64", True)

# Tracing allocates many objects, and the collector would visit all of JAX each time: 6 % of the tests' time.
gc.freeze()
gc.set_threshold(200_000, 20, 20)


def pytest_unconfigure() -> None:
    if CONTROLLER and (folder := os.environ.get("JAX_COMPILATION_CACHE_DIR")):
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def compiled_code_is_freed() -> Iterator[None]:
    """Frees compiled code after each file. Each program maps memory, and Linux allows a process 65,530 mappings."""
    yield
    jax.clear_caches()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written to holds anything: here what is noticed most easily."""

    def poison(shape: Any, dtype: Any) -> Any:
        return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 1 << 30, dtype)

    monkeypatch.setattr(jax.lax, "empty", poison)
