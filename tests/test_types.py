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
reveal_type(cavs.VertexFunction(rnn, state=(8,)))   # VertexFunction
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
"""


@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="pyright is not installed")
def test_a_type_checker_knows_steps_schedules_and_readouts(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "cavs").symlink_to(ROOT / "cavs")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "program.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    found = re.findall(r"Type of \".*\" is \"(.*)\"", run.stdout)
    found = [re.sub(r"^ndarray\[.*", "ndarray", name) for name in found]  # its parameters differ between versions of NumPy
    assert found == re.findall(r"^reveal_type.* # (.*)$", PROGRAM, re.MULTILINE), run.stdout + run.stderr
    assert "0 errors" in run.stdout, run.stdout
