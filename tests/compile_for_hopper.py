"""Compiles the persistent kernels of some programs for an H200, on a machine without one; run by `test_chip`.

Prints one line of JSON: registers, spilled bytes, tensor products and instructions of each kernel.
"""

import dataclasses
import glob
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

DUMP = Path(sys.argv[1])
os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": str(DUMP)}

from tests.hopper_compiler import CUDA, compiled  # noqa: E402, I001

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import cavs  # noqa: E402
from cavs import vertex_programs as vp  # noqa: E402
from cavs._engines.persistent import wide_levels  # noqa: E402
from cavs._engines.persistent.chip import Layouts  # noqa: E402
from cavs._engines.persistent.engine import Persistent  # noqa: E402
from cavs.kernels import H200, Target  # noqa: E402
from tests.markdown import ROOT, blocks  # noqa: E402
from tests.odd_graphs import random_binary_tree  # noqa: E402


def compile_step(
    program: vp.LSTM | vp.BinaryTreeLSTM | vp.NaryTreeLSTM, graphs: cavs.Graphs, width: int, engine: Persistent | None = None
) -> None:
    """Compiles a forward and a backward pass of a vertex program."""
    compile_gradient(program.vertex_function(), jax.eval_shape(program.init, jax.random.key(0)), graphs, width, engine)


def compile_gradient(
    F: cavs.VertexFunction, params: object, graphs: cavs.Graphs, width: int, engine: Persistent | None = None
) -> None:
    """Compiles a forward and a backward pass of F, for parameters of these shapes and inputs of a width."""
    Target.here = staticmethod(lambda: H200)
    sched = cavs.schedule(graphs, scripts=True)

    def gradient(params: object, data: object, x: jax.Array) -> object:
        loss = lambda p: cavs.run(F, p, cavs.Schedule(data, sched.shape), x, engine=engine or "persistent").sum()  # noqa: E731
        return jax.grad(loss)(params)

    shapes = (
        params,
        jax.ShapeDtypeStruct(sched.data.shape, jnp.int32),
        jax.ShapeDtypeStruct((sched.shape.vertices, width), jnp.float32),
    )
    compiled(gradient, *shapes)


compile_step(vp.BinaryTreeLSTM(512, 64), cavs.from_parents([[2, 2, 4, 4, -1]] * 64), 64)
compile_step(vp.LSTM(256, 64), cavs.from_lengths([20] * 16), 64)
with jax.default_matmul_precision("BF16_BF16_F32"):
    compile_step(vp.NaryTreeLSTM(256, 64), cavs.from_parents([[2, 2, 4, 4, -1]] * 64), 64)
fields = {"hb": 16, "groups": 4, "rows": 8, "warpgroups": 2, "tight": False, "split": 2, "registers": False}
divided = Persistent(layouts=Layouts(lambda level, forward, config: dataclasses.replace(config, **fields)))
compile_step(vp.BinaryTreeLSTM(256, 64), cavs.from_parents([[2, 2, 4, 4, -1]] * 64), 64, divided)
streaming = Persistent(
    layouts=Layouts(
        lambda level, forward, config: dataclasses.replace(config, **fields | {"resident": False, "tight": not forward})
    )
)
compile_step(vp.LSTM(256, 64), cavs.from_lengths([20] * 16), 64, streaming)
compile_step(vp.BinaryTreeLSTM(256, 64), random_binary_tree(600, seed=1), 64)  # one tree, whose rows all groups share
wide = Persistent(layouts=Layouts(wide=lambda level, narrow: (wide_levels.fitting(level, 128, H200)[0], 64)))
compile_step(vp.TreeFC(512), cavs.from_parents([[2, 2, 4, 4, -1]] * 64), 512, wide)
# The level of kernels/README.md, in the layout that it shows.
page: dict[str, Any] = {}
for block in blocks("python", (ROOT / "kernels" / "README.md").read_text()):
    exec(block, page)
shown = Persistent(
    layouts=Layouts(lambda level, forward, config: dataclasses.replace(page["narrow"], precision=config.precision))
)
compile_gradient(page["F"], page["params"], cavs.from_parents([[2, 2, 4, 4, -1]] * 64), 64, shown)


def longest_chain(text: str) -> int:
    """Returns how many `mma.sync` add to the same sum one after another, at most."""
    depth: dict[str, int] = {}
    for made, added in re.findall(r"mma\.sync\S+ \{(%r\d+),[^}]*\}, \{[^}]*\}, \{[^}]*\}, \{(%r\d+),", text):
        depth[made] = depth.get(added, 0) + 1
    return max(depth.values(), default=0)


found = {}
for n, path in enumerate(sorted(glob.glob(f"{DUMP}/*.ptx"))):
    text = Path(path).read_text()
    if "mma.sync" in text or "wgmma" in text:
        command = [f"{CUDA}/bin/ptxas", "-arch=sm_90a", "-v", path, "-o", os.devnull]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers, spilled = (re.search(p, said) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
        found[f"{Path(path).stem} {n}"] = {
            "registers": int(registers[1]) if registers else 256,
            "spilled": int(spilled[1]) if spilled else -1,
            "products": text.count("mma.sync") + text.count("wgmma.mma_async"),
            "chain": longest_chain(text),
            "wide": "wgmma" in text,
            "prefetches": text.count("prefetch.global"),
            "exchanges": text.count("st.shared::cluster"),
            "instructions": sorted(set(re.findall(r"\b[a-z]+(?:\.\w+)+(?=\s)", text))),
        }
print(json.dumps(found))
