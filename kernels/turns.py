"""Marks at the beginning and the end of a launch, by which launches run one after another.

The thread blocks of a launch wait for each other. If two launches shared a GPU, each with a part of its thread blocks, they
would wait forever. XLA runs the kernels of a program one after another unless it is told otherwise; `cavs.concurrent_jit` tells
it otherwise, and orders the launches by these marks, but for two that leave each other room. Everywhere else they are the
identity.
"""

from jax.extend import core as jex
from jax.interpreters import mlir

begin_p = jex.Primitive("cavs_begin")  # on a launch's counters, before the launch
end_p = jex.Primitive("cavs_end")  # on its flag (1,), after the launch


for _p in (begin_p, end_p):
    _p.def_impl(lambda x: x)
    _p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(_p, lambda ctx, x: [x])
