"""`keep_host_memory`: training steps on a CPU reuse their memory instead of returning it to the system."""

import ctypes
import functools
import os
import resource
import sys
from pathlib import Path

# <malloc.h> of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_MANY = 1 << 16  # mapped blocks: glibc's default
MUCH = 1 << 30
LARGEST = 96 << 20  # bytes of a block that is kept
RESERVE = 1 << 30  # bytes
_NVIDIA = "/dev/nvidiactl"  # exists if there is a GPU
_kept: list[ctypes.CDLL] = []  # glibc, if it was configured


def keep_host_memory() -> bool:
    """Configures glibc to keep freed memory in this process.

    XLA's CPU client allocates the temporaries of each step with malloc. By default, glibc maps large ones from the system and
    unmaps them after the step, so that every page faults again in the next step. For a Tree-LSTM step at hidden 256 and batch
    64 (34 MB of temporaries) this was a third of the time: 26 ms without this call, 18 ms with it. The price is that memory
    once used is not returned to the system before the process ends. Blocks of more than 100 MB are returned at once if glibc
    allows it (2.36 does), so that larger steps gain nothing. After each compilation, a function decorated with
    [`cavs.data.step`][] returns what is free. With it, the peak of a Tree-LSTM at hidden 256 was 1.2 times that without this
    call at 200 trees, 1.25 at 512, and 0.97 at 4,096; a step of 200 trees took a fifth less time.

    The setting applies to the whole process, so `import cavs` does not change it. Call this function first, before JAX starts
    its threads, as `cavs train` does. If there is an NVIDIA GPU, it does nothing, unless `JAX_PLATFORMS=cpu`: all threads would
    share one arena, and a step for a GPU, which XLA compiles on many threads, took 51 s to compile instead of 14 (one H200 with
    16 cores, 2026-11-26).

    Returns:
        Whether the setting was made. `False` on systems other than Linux with glibc, and if JAX will use a GPU.
    """
    libc = _glibc()
    if libc is None or not starts_on_cpu():
        return False
    _kept.append(libc)
    # A second arena maps large memory from the system, whatever the other options say.
    done = all([libc.mallopt(_M_MMAP_MAX, 0), libc.mallopt(_M_TRIM_THRESHOLD, -1), libc.mallopt(_M_ARENA_MAX, 1)])
    _reserve(libc)
    # Larger blocks are mapped and returned: a step may not find that of the step before, because glibc takes a little more than
    # XLA asks for, to align it, and puts the rest aside. Older versions of glibc allow no such limit, and keep all.
    if libc.mallopt(_M_MMAP_THRESHOLD, LARGEST):
        libc.mallopt(_M_MMAP_MAX, _MANY)
    return done


def starts_on_cpu() -> bool:
    """Whether JAX will run on a CPU, as far as one can tell before it starts."""
    return os.environ.get("JAX_PLATFORMS") == "cpu" or not Path(_NVIDIA).exists()


def _reserve(libc: ctypes.CDLL) -> None:
    """Creates a free block for small allocations, of which only the pages that are used become resident.

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


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
