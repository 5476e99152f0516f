"""JAX's persistent compilation cache, so that the next `cavs train` or `cavs predict` does not compile again."""

import hashlib
import os
from pathlib import Path

import jax

# Programs that compile faster than this many seconds are not cached.
WORTH_KEEPING = 0.5
# Lines of /proc/cpuinfo that describe the instruction set: on x86, on Arm, and the name of the processor.
_CPU_FIELDS = ("flags", "Features", "model name")


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
