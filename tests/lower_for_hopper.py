"""Lowers random vertex functions by engine persistent for a Hopper GPU, on a machine without one; also by hand:
`python -m tests.lower_for_hopper --count 100`."""

import argparse
import importlib.util
import json
import subprocess
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import cavs
from cavs._schedule.schedule import ExportedSchedule
from cavs.kernels import H200, Target
from tests.random_cases import functions, random_case, script
from tests.random_values import build, cast, given, inputs, parameters, vertex_function

DEVICE = {"device_kind": "NVIDIA H200", "num_cores": 132, "platform": "gpu"}


def compile_for_hopper(module: str, *args: str) -> Any:
    """Runs a module of the tests that compiles for an H200, and returns what it prints. Skips the test without a compiler."""
    for needed in ("jax_plugins.xla_cuda13", "nvidia.cu13"):
        try:
            found = importlib.util.find_spec(needed)
        except ModuleNotFoundError:
            found = None
        if found is None:
            pytest.skip(f"CUDA's compiler is not installed ({needed}); CONTRIBUTING.md says how")
    command = [sys.executable, "-m", module, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def lowered(seed: int) -> str:
    """Returns "lowered" for the case of a seed, or the reason why engine persistent cannot run it. Raises all other errors."""
    case = random_case(seed, None, float32=True)
    spec, fns = case.program, functions(case.program, "float32")
    case.options.optimizations.clear()
    F = vertex_function(case, fns)
    sched = cavs.schedule(build(case), scripts=True)
    if not sched.shape.levels:
        return "no scripts"
    params, x = cast(parameters(case)["f"], jnp.float32), cast(inputs(case), jnp.float32)
    floats = {n: y for n, y in x.items() if jnp.issubdtype(y.dtype, jnp.floating)}

    def loss(p: Any, floats: Any, data: Any) -> Any:
        rows, edges = given(spec, x | floats)
        pushes = cavs.run(F, p, ExportedSchedule(data, sched.shape), rows, edges=edges, engine="persistent")
        return sum((y.sum() for y in jax.tree.leaves(pushes) if jnp.issubdtype(y.dtype, jnp.floating)), jnp.zeros(()))

    sizes = {n: sched.shape.all_edges if n in spec.edges else sched.shape.vertices for n in x}
    x = {n: y.at[jnp.arange(sizes[n])].get(mode="clip") for n, y in x.items()}
    floats = {n: x[n] for n in floats}
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, floats, jnp.asarray(sched.data)))
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(**DEVICE))):
        try:
            jax.jit(jax.grad(loss, (0, 1))).trace(*shapes).lower(lowering_platforms=("cuda",))
        except ValueError as error:
            if "engine: got 'persistent', but" not in str(error):
                raise
            return "refused"
    return "lowered"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    args = parser.parse_args()
    Target.here = staticmethod(lambda: H200)
    counts: Counter[str] = Counter()
    for seed in range(args.first_seed, args.first_seed + args.count):
        try:
            counts[lowered(seed)] += 1
        except Exception:
            counts["failed"] += 1
            print(f"seed {seed}\n{traceback.format_exc()}\n{script(random_case(seed, None, float32=True))}", flush=True)
        if seed % 10 == 9:
            jax.clear_caches()
    print(dict(counts))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
