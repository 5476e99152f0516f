"""`compile_quickly` and `cache_compiled`: how a program starts in less time."""

import contextlib
import hashlib
import os
from pathlib import Path

import jax

from cavs._step.host_memory import starts_on_cpu

# On a CPU, XLA's newer code generator runs an MLIR pipeline for each of the 100 to 200 fused loops of a step. The older one
# compiles a step in half of the time, and the step is not slower: in tagging, translation and language models an epoch takes
# 0.68 to 0.9 times as long (2 cores, JAX 0.11.2, 2026-11-25). Versions of XLA that do not know the option ignore it.
_OLDER_GENERATOR = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
WORTH_KEEPING = 0.1  # programs that compile faster than this many seconds are not cached
# Lines of /proc/cpuinfo that describe the instruction set: on x86, on Arm, and the name of the processor.
_CPU_FIELDS = ("flags", "Features", "model name")


def compile_quickly() -> None:
    """Lets XLA compile quickly on a CPU, unless `XLA_FLAGS` has options of its code generator.

    XLA's older code generator compiles a step in half of the time. `cavs train` calls this. Call it before JAX compiles.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if starts_on_cpu() and "xla_backend_extra_options" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_OLDER_GENERATOR}".strip()


def cache_compiled() -> None:
    """Caches compiled code in `~/.cache/cavs` (or under `XDG_CACHE_HOME`), unless JAX's cache is already configured.

    A second run with the same sizes then starts at once. The folder may be deleted at any time.
    `JAX_COMPILATION_CACHE_DIR` selects another folder, and `JAX_ENABLE_COMPILATION_CACHE=false` turns the cache off.
    """
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:  # type: ignore
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cavs" / _processor()
    with contextlib.suppress(OSError):  # the home directory is not writable: compile again
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)


def _processor() -> str:
    # Machines with different processors may share a home directory, and code compiled on one may not run on another.
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    facts = sorted({line for line in lines if line.partition(":")[0].strip() in _CPU_FIELDS})
    return hashlib.sha256("\n".join([os.uname().machine, *facts]).encode()).hexdigest()[:12]
