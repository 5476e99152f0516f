"""Prints a hash of the lowered gradient of some programs, a line for each engine. See `test_same_texts`."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import cavs
from cavs import vertex_programs as vp
from cavs._schedule.schedule import ExportedSchedule
from cavs.kernels import H200, Target, native_unavailable
from tests.lower_for_hopper import DEVICE

HIDDEN = 16
ENGINES = ["scan", *([] if native_unavailable() else ["native"]), *(["persistent"] if jax.__version_info__ >= (0, 11) else [])]
# One that gathers all children on each engine, and one by number on the engine whose text depends on it most.
PROGRAMS = {
    "ChildSumTreeLSTM": (vp.ChildSumTreeLSTM(HIDDEN, HIDDEN), ENGINES),
    "BinaryTreeLSTM": (vp.BinaryTreeLSTM(HIDDEN, HIDDEN), ENGINES[-1:]),
    "GRU": (vp.GRU(HIDDEN, HIDDEN), ENGINES[:1]),
}


def text(program: Any, engine: str) -> str:
    """The lowered gradient of a program."""
    parents = [[1, 2, 3, -1], [1, -1]] if isinstance(program, vp.GRU) else [[2, 2, 6, 5, 5, 6, -1], [2, 2, -1]]
    F, params = program.vertex_function(), program.init(jax.random.key(0))
    sched = cavs.schedule(cavs.from_parents(parents), scripts=engine == "persistent")

    def loss(params: Any, x: Any, data: Any) -> Any:
        sums = jax.tree.map(jnp.sum, cavs.run(F, params, ExportedSchedule(data, sched.shape), x, engine=engine))
        return sum(jax.tree.leaves(sums))

    x = jnp.zeros((sched.shape.vertices, HIDDEN), jnp.float32)
    grad = jax.jit(jax.grad(loss, (0, 1)))
    if engine != "persistent":
        return grad.lower(params, x, sched.data).as_text()
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(**DEVICE))):
        return grad.trace(params, x, sched.data).lower(lowering_platforms=("cuda",)).as_text()


def main() -> None:
    Target.here = staticmethod(lambda: H200)
    for name, (program, engines) in PROGRAMS.items():
        for engine in engines:
            print(name, engine, hashlib.sha256(text(program, engine).encode()).hexdigest())


if __name__ == "__main__":
    main()
