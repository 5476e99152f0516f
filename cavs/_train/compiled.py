"""How the commands set up JAX: to start and compile quickly, and to keep compiled code in a folder."""

import hashlib
import os
from pathlib import Path

import jax

from cavs._step.host_memory import starts_on_cpu

# Programs that compile faster than this many seconds are not cached.
WORTH_KEEPING = 0.1
# On a CPU, XLA's newer code generator runs an MLIR pipeline for each of the 100 to 200 fused loops of a step. The older one
# compiles a step in half of the time, and the step is not slower: in tagging, translation and language models an epoch takes
# 0.68 to 0.9 times as long (2 cores, JAX 0.11.2, 2026-11-25). Versions of XLA that do not know the option ignore it.
_OLDER_GENERATOR = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
# By default JAX takes three quarters of a GPU's memory when it starts, which takes 1.8 s on an H200 (2026-11-25).
_ALLOCATION = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# Lines of /proc/cpuinfo that describe the instruction set: on x86, on Arm, and the name of the processor.
_CPU_FIELDS = ("flags", "Features", "model name")


def compile_quickly() -> None:
    """Lets XLA compile quickly on a CPU, unless `XLA_FLAGS` has options of its code generator. Call it before JAX compiles."""
    flags = os.environ.get("XLA_FLAGS", "")
    if starts_on_cpu() and "xla_backend_extra_options" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_OLDER_GENERATOR}".strip()


def allocate_when_needed() -> None:
    """Lets JAX take memory of a GPU when it is needed, unless its variables say otherwise. Call it before JAX starts.

    JAX then never returns a block of memory. A program that needs much of a GPU can fail because blocks of other programs are
    in its way, so this is for programs that need little.
    """
    if not starts_on_cpu() and not any(name in os.environ for name in _ALLOCATION):
        os.environ[_ALLOCATION[0]] = "false"


def keep_compiled() -> None:
    """Caches compiled code in `~/.cache/cavs` (or under `XDG_CACHE_HOME`), unless JAX's cache is already configured.

    A second run with the same sizes then starts at once. The folder may be deleted at any time.
    `JAX_COMPILATION_CACHE_DIR` selects another folder, and `JAX_ENABLE_COMPILATION_CACHE=false` turns the cache off.
    """
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:  # type: ignore
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "cavs" / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # the home directory is not writable: compile again
        return
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
