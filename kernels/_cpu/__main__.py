"""`python -m cavs.kernels._cpu` compiles the libraries of the scheduler and of engine `native` in place."""

import platform

from cavs.kernels._cpu.build import SOURCE, build, compiler

print(*(build(SOURCE.parent) or [f"no library: the compiler is {compiler()}, the machine {platform.machine()}"]), sep="\n")
