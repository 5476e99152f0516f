"""Compiles the libraries of the scheduler and of engine `native`: `python -m cavs.kernels._cpu`. It needs a C++ compiler alone.

An installation from source runs this if there is a compiler (`hatch_build.py`). Engine `native` has a file for each instruction
set; the scheduler has one that runs on every processor of a machine's kind.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent / "library.cpp"
# Instruction sets by machine, the best first, and the compiler's options for them.
_X86 = {
    "avx512": "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mavx2 -mfma -mprefer-vector-width=512",
    "avx2": "-mavx2 -mfma",
}
VARIANTS = {"x86_64": _X86, "AMD64": _X86, "aarch64": {"neon": ""}, "arm64": {"neon": ""}}
SCHEDULER, SCHEDULER_SOURCE = "scheduler.so", SOURCE.with_name("schedule.cpp")
_OPTIONS = "-O3 -std=c++17 -fno-math-errno -fno-trapping-math -fvisibility=hidden -fPIC -shared -pthread".split()


def version(source: Path = SOURCE) -> str:
    """Returns a digest of the sources. A library knows its own, so that one that was compiled from others is not used."""
    headers = [path for path in SOURCE.parent.iterdir() if path.suffix in (".def", ".h")] if source == SOURCE else []
    sources = sorted([source, *headers])
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def compiler() -> str | None:
    """Returns the C++ compiler: `$CXX`, or one of the usual names; `None` if there is none."""
    names = os.environ.get("CXX"), "c++", "g++", "clang++"
    return next((path for name in names if name and (path := shutil.which(name))), None)


def build(folder: Path) -> list[Path]:
    """Compiles the libraries into `folder`, that of engine `native` for every instruction set of this machine's kind.

    Nothing is raised if there is no compiler, or if it fails: engine `scan` and the scheduler in NumPy then run.

    Returns:
        The files that were compiled.
    """
    path, variants = compiler(), VARIANTS.get(platform.machine(), {})
    if path is None or sys.platform == "win32":
        return []
    running = []
    todo = [(f"levels-{name}.so", SOURCE, options) for name, options in variants.items()]
    for name, source, options in [*todo, (SCHEDULER, SCHEDULER_SOURCE, "")]:
        out = folder / name
        part = folder / f".{out.name}.{os.getpid()}"
        command = [path, *_OPTIONS, *options.split(), f'-DCAVS_VERSION="{version(source)}"', str(source), "-o", str(part)]
        running.append((out, part, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)))
    libraries = []
    for out, part, process in running:
        if process.wait() == 0:
            part.replace(out)  # at once: another process may load the old one
            libraries.append(out)
        else:
            part.unlink(missing_ok=True)
    return libraries
