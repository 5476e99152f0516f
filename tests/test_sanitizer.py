"""The persistent kernels under NVIDIA's compute-sanitizer: no access out of bounds, no race in shared memory."""

import os
import shutil
import subprocess
import sys

import pytest

CODE = """
import faulthandler
faulthandler.dump_traceback_later(190)  # where it hung
import cavs
from cavs._engines.persistent import wide_levels as _wide_levels
from cavs.kernels import H200 as _H200
from tests.odd_graphs import joined, random_binary_tree
from tests.persistent_programs import CASES, inputs_of, laid_out, values

def run(name, hidden, graphs=None, engine="persistent"):
    make, few = CASES[name]
    graphs = few if graphs is None else graphs
    F, params = make(hidden)
    values(F, params, graphs, inputs_of(name, graphs, hidden), engine)
"""
RUNS = {
    "BinaryTreeLSTM": "run('BinaryTreeLSTM', 64)",
    "ChildSumTreeLSTM": "run('ChildSumTreeLSTM', 64)",
    "scaled float16": """
from cavs._engines.persistent import lower as _lower
_lower.is_long = lambda *sizes: True
run("TreeFC", 64)
""",
    "wide levels": """
wide = laid_out(wide=lambda level, config: (_wide_levels.fitting(level, 64, _H200)[0], 16))
run("TreeFC", 256, joined([random_binary_tree(9, seed=n) for n in range(40)]), wide)
""",
    "convolution": """
import jax
import numpy as np
for shape in ((2, 9, 11, 33, 65), (8, 8, 8, 64, 64)):
    x, w = np.ones(shape[:4], np.float32), np.ones((3, 3, *shape[3:]), np.float32)
    conv = lambda x, w: cavs.conv(x, w, ((2, 0), (1, 1)), precision="highest", algorithm="winograd")
    y, pull = jax.vjp(conv, x, w)
    assert np.asarray(y).max() <= 9.1 * shape[3]
    assert all(np.isfinite(dx).all() for dx in map(np.asarray, pull(y)))
""",
}


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer, of the CUDA toolkit")
@pytest.mark.parametrize(("tool", "summary"), [("memcheck", "ERROR SUMMARY: 0 errors"), ("racecheck", "0 hazards displayed")])
@pytest.mark.parametrize("name", RUNS)
def test_kernels_are_clean(tool: str, summary: str, name: str) -> None:
    """Ours alone are checked; XLA is kept from timing its own kernels under the tool, and from CUDA graphs. Seconds each; but
    beside other tests on the same GPU the tool sometimes hung, or crashed: then nothing is known, and it is to be run alone."""
    # Under the tool XLA's parallel compilation crashes, in about one of three runs.
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_command_buffer= --xla_gpu_force_compilation_parallelism=1"
    check = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=cavs_", "--error-exitcode", "7"]
    env = os.environ | {"XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    code = CODE + RUNS[name]
    try:
        ran = subprocess.run([*check, sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    except subprocess.TimeoutExpired as hung:
        pytest.skip(f"compute-sanitizer hung: {(hung.stderr or b'')[-2000:].decode(errors='replace')}")
    if ran.returncode in (-11, 139):
        pytest.skip("compute-sanitizer crashed itself")
    assert ran.returncode == 0 and summary in ran.stdout, (ran.stdout + ran.stderr)[-3000:]
