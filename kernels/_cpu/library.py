"""Finds and registers the library of engine `native`."""

import ctypes
import functools
import platform
from pathlib import Path

import jax

from cavs.kernels._cpu.build import VARIANTS, version
from cavs.kernels._cpu.cores import usable_cores

NATIVE_LEVELS, NATIVE_GRADIENTS = "cavs_levels", "cavs_gradients"  # the names of the handlers
_FLAGS = {"avx512": {"avx512f", "avx512dq", "avx512vl", "avx512bw", "fma"}, "avx2": {"avx2", "fma"}, "neon": set()}


@functools.cache
def native_unavailable() -> str | None:
    """Loads and registers the library. Returns why it cannot run here, or `None` if it can."""
    folder = Path(__file__).parent
    names = [name for name in VARIANTS.get(platform.machine(), ()) if runs_here(name)]
    files = [path for name in names if (path := folder / f"levels-{name}.so").exists()]
    if not names:
        return f"its library has no code for this processor ({platform.machine()})"
    if not files:
        return "its library was not compiled (install cavs where a C++ compiler is, or run python -m cavs.kernels._cpu)"
    try:
        library = ctypes.CDLL(str(files[0]))
    except OSError as e:
        return f"its library cannot be loaded ({e})"
    own = library.cavs_version
    own.restype = ctypes.c_char_p
    if own().decode() != version():
        return "its library was compiled from other sources (run python -m cavs.kernels._cpu)"
    library.cavs_threads(usable_cores())
    for name in (NATIVE_LEVELS, NATIVE_GRADIENTS):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return None


def runs_here(name: str) -> bool:
    """Whether this processor has the instructions of the library called `name`."""
    return _FLAGS[name] <= _processor_flags()


@functools.cache
def _processor_flags() -> set[str]:
    """Returns the instruction sets of this processor, as Linux names them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.split(":")[1] for line in lines if line.split(":")[0].strip() == "flags"), "").split())
