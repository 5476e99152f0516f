"""What a type checker knows of a user's program, as pyright's `reveal_type` says it."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.markdown import ROOT

PROGRAM = """
import jax, numpy as np
import cavs

def rnn(params: dict[str, jax.Array], v: cavs.Vertex) -> None: ...

@cavs.data.step
def step(state: dict[str, jax.Array], sched: cavs.Schedule) -> tuple[dict[str, jax.Array], jax.Array]:
    return state, sched.num_vertices

graphs, rows = cavs.from_lengths([3]), np.ones((3, 2))
sched = cavs.schedule(graphs)
state, values = step({}, next(iter(cavs.data.Loader(graphs, 1))))
F, G = cavs.VertexFunction(rnn, state=(8,)), cavs.VertexFunction[dict[str, jax.Array]](rnn, state=(8,))
reveal_type(F)                                      # VertexFunction[Array]
reveal_type(cavs.run(F, {}, sched, rows))           # Array
reveal_type(cavs.run(G, {}, sched, select=[0]))     # dict[str, Array]
reveal_type(cavs.interpret(G, {}, graphs, rows))    # dict[str, Array]
reveal_type(cavs.vertex_programs.GRU(2, 2).vertex_function())  # VertexFunction[Array]
reveal_type(graphs.split([0.5, 0.5]))               # tuple[Graphs, ...]
reveal_type(sched)                                  # Schedule
reveal_type(sched.roots)                            # Array
reveal_type(sched.pad(rows))                        # ndarray
reveal_type(cavs.readout(rows, sched))              # Array
reveal_type(cavs.readout({"h": sched.row}, sched))  # dict[str, Array]
reveal_type(step)                                   # Step[dict[str, Array], Array]
reveal_type(state)                                  # dict[str, Array]
reveal_type(values)                                 # Array
reveal_type(cavs.debug.draw(graphs))                # Drawing

def collate(sample: cavs.data.Sample[cavs.Graphs, cavs.Schedule]) -> tuple[cavs.Schedule, jax.Array]:
    return sample.sched, sample.sched.roots

def scores(params: dict[str, jax.Array], sched: cavs.Schedule) -> jax.Array:
    return cavs.run(F, params, sched)

Loader = cavs.data.Loader
loader = Loader(graphs, 2)
reveal_type([*loader])                              # list[Batches[Schedule]]
reveal_type([*Loader(graphs, 2, steps=1, seed=3)])  # list[Schedule]
reveal_type([*Loader([graphs, graphs], 2)])         # list[Batches[tuple[Schedule, ...]]]
reveal_type([*Loader((graphs, graphs), 2, steps=1)])                        # list[tuple[Schedule, ...]]
reveal_type([*Loader(graphs, 2, collate=collate)])  # list[Batches[tuple[Schedule, Array]]]
reveal_type([*Loader(graphs, 2, collate=lambda sample: sample.sched.shape.vertices, steps=1)])             # list[int]
reveal_type([*Loader((graphs, graphs), 2, collate=lambda sample: sample.graphs, steps=1)])  # list[tuple[Graphs, ...]]
reveal_type([*Loader[tuple[cavs.Schedule, int]](graphs, 2, steps=1)])       # list[tuple[Schedule, int]]
reveal_type(cavs.data.predict(scores, {}, loader))  # ndarray
reveal_type(cavs.concurrent_jit(scores)({}, sched)) # Array
reveal_type(cavs.concurrent_jit(donate_argnums=0)(scores)({}, sched))       # Array
reveal_type(cavs.memory.sub_batched(scores)({}, []))  # Array
reveal_type(cavs.io.restore_checkpoint("a", state, loader))                 # dict[str, Array]
reveal_type(cavs.io.load_params("a", like=state))   # dict[str, Array]
"""


@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
def test_a_type_checker_knows_steps_schedules_and_readouts(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "cavs").symlink_to(ROOT / "cavs")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "program.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    found = re.findall(r"Type of \".*\" is \"(.*)\"", run.stdout)
    found = [re.sub(r"^ndarray\[.*", "ndarray", name) for name in found]  # its parameters differ between versions of NumPy
    assert found == re.findall(r"^reveal_type.*# (.*)$", PROGRAM, re.MULTILINE), run.stdout + run.stderr
    assert "0 errors" in run.stdout, run.stdout
