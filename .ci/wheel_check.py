"""Checks an installed wheel: its libraries run, and so does a processor without their instructions, with the same result."""

from unittest import mock

import jax
import numpy as np

import cavs
from cavs import vertex_programs
from cavs._schedule.batches import compiled
from cavs.kernels._cpu import library

assert library.native_unavailable() is None, library.native_unavailable()
assert compiled(), "the scheduler was not compiled"

program = vertex_programs.BinaryTreeLSTM(8, 4)
F, params = program.vertex_function(), program.init(jax.random.key(0))
graphs = cavs.from_edges([3, 1], [np.array([[2, 0], [2, 1]]), np.zeros((0, 2), int)])
sched = cavs.schedule(graphs)
inputs = sched.pad(np.random.default_rng(0).normal(size=(graphs.num_vertices, 4)).astype(np.float32))
native, scan = (cavs.run(F, params, sched, inputs, engine=engine) for engine in ("native", "scan"))
np.testing.assert_allclose(native, scan, rtol=1e-5, atol=1e-6)

names = list(library.VARIANTS[library.platform.machine()])
print("instruction sets of this processor:", *filter(library.runs_here, names))
if "avx2" in names:
    with mock.patch.object(library, "_processor_flags", set):
        library.native_unavailable.cache_clear()
        assert library.native_unavailable() is not None
        jax.clear_caches()
        np.testing.assert_allclose(cavs.run(F, params, sched, inputs), scan, rtol=1e-5, atol=1e-6)
print("the wheel of cavs", cavs.__version__, "works")
