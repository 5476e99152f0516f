"""Settings of a process: training steps on a CPU reuse their memory, and programs start in less time."""

import contextlib
import ctypes
import hashlib
import os
import resource
import sys
from pathlib import Path

import jax

# On a CPU, XLA's newer code generator runs an MLIR pipeline for each of the 100 to 200 fused loops of a step. The older one
# compiles a step in half of the time, and the step is not slower: in tagging, translation and language models an epoch takes
# 0.68 to 0.9 times as long (2 cores, JAX 0.11.2, 2026-11-25). Versions of XLA that do not know the option ignore it.
_OLDER_GENERATOR = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
WORTH_KEEPING = 0.1  # programs that compile faster than this many seconds are not cached
# Lines of /proc/cpuinfo that describe the instruction set: on x86, on Arm, and the name of the processor.
_CPU_FIELDS = ("flags", "Features", "model name")

# <malloc.h> of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_MANY = 1 << 16  # mapped blocks: glibc's default
MUCH = 1 << 30
LARGEST = 96 << 20  # bytes of a block that is kept
# Threads of XLA's compiler wait for each other if they share one arena. With one, a step took 1.6 times as long to compile on 2
# cores, with four as long as without a limit. With many, each could keep a step's temporaries.
ARENAS = 4
RESERVE = 1 << 30  # bytes
_NVIDIA = "/dev/nvidiactl"  # exists if there is a GPU
_kept: list[ctypes.CDLL] = []  # glibc, if it was configured


def keep_host_memory() -> bool:
    """Configures glibc to keep freed memory in this process.

    Call it first, before JAX starts its threads, as `cavs train` does. It applies to the whole process. If there is an NVIDIA
    GPU, it does nothing, unless `JAX_PLATFORMS=cpu`, because XLA compiles for a GPU on many threads.

    XLA allocates the temporaries of a step on a CPU with malloc. By default, glibc maps blocks of more than 32 MB from the
    system and unmaps them after the step, so that every page faults again in the next step. A Tree-LSTM step at hidden 256 with
    34 MB of temporaries took 26 ms without this call and 18 ms with it on an AMD EPYC, and a step of 200 trees 56 and 52 ms on
    an Intel Xeon (2026-11-26). In return, the process keeps its memory until it ends; a function decorated with
    [`cavs.data.step`][] returns that of compilations. Threads share four of glibc's arenas. The peak of 64 to 512 trees was 0.8
    to 1.1 times the peak without this call. With glibc 2.36, blocks of more than 100 MB still go back after every step.

    Returns:
        Whether the setting was made. `False` on systems other than Linux with glibc, and if JAX will use a GPU.
    """
    libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if not hasattr(libc, "gnu_get_libc_version") or libc is None or not starts_on_cpu():
        return False
    _kept.append(libc)
    # Arenas but the first map large memory from the system, whatever the other options say. The first is that of Python's main
    # thread, which as a rule allocates the temporaries of the steps that it starts.
    done = all([libc.mallopt(_M_MMAP_MAX, 0), libc.mallopt(_M_TRIM_THRESHOLD, -1), libc.mallopt(_M_ARENA_MAX, ARENAS)])
    _reserve(libc)
    # Larger blocks are mapped and returned: a step may not find that of the step before, because glibc takes a little more than
    # XLA asks for, to align it, and puts the rest aside. Older versions of glibc allow no such limit, and keep all.
    if libc.mallopt(_M_MMAP_THRESHOLD, LARGEST):
        libc.mallopt(_M_MMAP_MAX, _MANY)
    return done


def starts_on_cpu() -> bool:
    """Returns whether JAX will run on a CPU, as far as one can tell before it starts."""
    return os.environ.get("JAX_PLATFORMS") == "cpu" or not Path(_NVIDIA).exists()


def _reserve(libc: ctypes.CDLL) -> None:
    """Reserves a block for small allocations. Only touched pages become resident.

    glibc takes the smallest free block that fits. Without this one, small allocations would split the block that the
    temporaries of the last step left, and those of the next step would go behind it: a process grew to 2.6 times its size.
    """
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    block = libc.malloc(RESERVE)
    libc.malloc(1)  # keeps the block apart from the end of the heap
    libc.free(block)


def return_unused() -> None:
    """Returns the pages of freed memory to the system if `keep_host_memory` was called, which keeps them otherwise."""
    for libc in _kept[:1]:
        libc.malloc_trim(0)


def keeps_much() -> bool:
    """Returns whether `keep_host_memory` was called, and the process has a gigabyte."""
    if not _kept:
        return False
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize() > MUCH


def compile_quickly() -> None:
    """Selects XLA's older code generator for CPUs, which compiles a step in half of the time.

    Call it before JAX compiles, as `cavs train` does. It changes nothing if `XLA_FLAGS` has options of the code generator.
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
