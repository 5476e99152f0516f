"""Compiled code kept from one `cavs train` or `cavs predict` to the next, by JAX's persistent compilation cache."""

import hashlib
import os
from pathlib import Path

import jax

# Seconds of compiling from which code is worth keeping.
WORTH_KEEPING = 0.5


def keep_compiled() -> None:
    """Keeps compiled code in `~/.cache/cavs` (or under `XDG_CACHE_HOME`), unless JAX was told of a place, or to keep none.

    A second run with the same sizes starts at once. The folder may be deleted at any time; `JAX_COMPILATION_CACHE_DIR`
    names another and `JAX_ENABLE_COMPILATION_CACHE=false` switches it off.
    """
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:  # type: ignore
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "cavs" / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written: compile anew
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)


def _processor() -> str:
    # A home shared by machines with unlike processors: code for one may hold instructions that another lacks.
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    facts = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return hashlib.sha256("\n".join([os.uname().machine, *facts]).encode()).hexdigest()[:12]
