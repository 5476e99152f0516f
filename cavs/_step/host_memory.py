"""`keep_host_memory`: training steps on a CPU reuse their memory instead of returning it to the system."""

import ctypes
import os
import resource
import sys
from pathlib import Path

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

    XLA's CPU client allocates the temporaries of each step with malloc. By default, glibc maps blocks of more than 32 MB from
    the system and unmaps them after the step, so that every page faults again in the next step. What that costs depends on the
    machine: a Tree-LSTM step at hidden 256 with 34 MB of temporaries took 26 ms without this call and 18 ms with it on an AMD
    EPYC, and a step of 200 trees 56 and 52 ms on an Intel Xeon (2026-11-26). The price is that memory once used is not returned
    to the system before the process ends. Blocks of more than 100 MB are returned at once if glibc allows it (2.36 does), so
    that larger steps gain nothing. After each compilation, a function decorated with [`cavs.data.step`][] returns what is free.
    All threads share four of glibc's arenas. The peak of 64 to 512 trees was 0.8 to 1.1 times that without this call.

    The setting applies to the whole process, so `import cavs` does not change it. Call this function first, before JAX starts
    its threads, as `cavs train` does. If there is an NVIDIA GPU, it does nothing, unless `JAX_PLATFORMS=cpu`: XLA compiles for
    a GPU on many threads.

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
