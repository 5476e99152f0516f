"""Finds and registers the library of engine `native`."""

import contextlib
import ctypes
import functools
import importlib.metadata
import platform
import warnings
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
        if (installed := _installed(folder)) is not None:
            message = f"cavs is imported from {folder.parents[2]}, where its library was not compiled, and not from {installed}"
            warnings.warn(f"{message}: steps are slower. Write pip install -e . there, or start elsewhere.", stacklevel=2)
            return f"{message} (write pip install -e . there, or start Python in another folder)"
        return "its library was not compiled (install cavs where a C++ compiler is, or run python -m cavs.kernels._cpu)"
    try:
        library = ctypes.CDLL(str(files[0]))
    except OSError as e:
        return f"its library cannot be loaded ({e})"
    version_of = library.cavs_version
    version_of.restype = ctypes.c_char_p
    if version_of().decode() != version():
        return "its library was compiled from other sources (run python -m cavs.kernels._cpu)"
    library.cavs_threads(usable_cores())
    for name in (NATIVE_LEVELS, NATIVE_GRADIENTS):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return None


def _installed(folder: Path) -> Path | None:
    """Returns where an installation with the library is that `folder`, a clone, hides: Python prefers the working folder."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        installed = Path(str(importlib.metadata.distribution("cavs").locate_file("cavs/kernels/_cpu")))
        if installed.exists() and not installed.samefile(folder) and any(installed.glob("levels-*.so")):
            return installed.parents[2]
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
