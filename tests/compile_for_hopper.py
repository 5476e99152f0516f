"""Compiles the persistent kernels of some programs for an H200, on a machine without one; run by `test_chip`.

Prints one line of JSON: registers, spilled bytes, tensor products and instructions of each kernel. Needs jax-cuda13-plugin,
jax-cuda13-pjrt, nvidia-cuda-nvcc, nvidia-nvvm and nvidia-nvjitlink; no driver.
"""

import ctypes
import dataclasses
import glob
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

DUMP = Path(sys.argv[1])
SPEC = importlib.util.find_spec("nvidia.cu13")
CUDA = list(SPEC.submodule_search_locations)[0] if SPEC and SPEC.submodule_search_locations else "/usr/local/cuda"
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={CUDA} --xla_gpu_autotune_level=0",
    "MOSAIC_GPU_DUMP_PTX": "1",
    "MOSAIC_GPU_DUMP_TO": str(DUMP),
}

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh  # noqa: E402

import cavs  # noqa: E402
from cavs import vertex_programs as vp  # noqa: E402
from cavs._engines import widest  # noqa: E402
from cavs._engines.chip import Layouts  # noqa: E402
from cavs._engines.persistent import Persistent  # noqa: E402
from cavs.kernels import persistent  # noqa: E402
from tests.markdown import ROOT, blocks  # noqa: E402

# What XLA must know of the card (a GpuTargetConfigProto).
H200 = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
 memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 151397597184
 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
 registers_per_core_limit: 65536 registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
 thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
 device_address_bits: 64 name: "NVIDIA H200" driver_version: "13.0.0" runtime_version: "13.0.0"
 compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0" }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 patch: 0 } device_description_str: "NVIDIA H200"
"""


def compile_step(
    program: vp.LSTM | vp.BinaryTreeLSTM | vp.NaryTreeLSTM, graphs: cavs.Graphs, width: int, engine: Persistent | None = None
) -> None:
    """Compiles a forward and a backward pass of a vertex program."""
    compile_gradient(program.vertex_function(), jax.eval_shape(program.init, jax.random.key(0)), graphs, width, engine)


def compile_gradient(
    F: cavs.VertexFunction, params: object, graphs: cavs.Graphs, width: int, engine: Persistent | None = None
) -> None:
    """Compiles a forward and a backward pass of F, for parameters of these shapes and inputs of a width."""
    persistent.supported = lambda: None
    sched = cavs.schedule(graphs, scripts=True)

    def gradient(params: object, data: object, x: jax.Array) -> object:
        loss = lambda p: cavs.run(F, p, cavs.Schedule(data, sched.shape), x, engine=engine or "persistent").sum()  # noqa: E731
        return jax.grad(loss)(params)

    mesh = topologies.make_mesh(TOPOLOGY, (1,), ("x",))
    place = NamedSharding(mesh, PartitionSpec())
    shapes = (
        params,
        jax.ShapeDtypeStruct(sched.data.shape, jnp.int32),
        jax.ShapeDtypeStruct((sched.shape.vertices, width), jnp.float32),
    )
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), shapes)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(gradient).trace(*shapes).lower(lowering_platforms=("cuda",))
    lowered.compile()


for library in ("libnvJitLink.so.13", "libnvrtc.so.13"):
    if os.path.exists(f"{CUDA}/lib/{library}"):
        ctypes.CDLL(f"{CUDA}/lib/{library}", mode=ctypes.RTLD_GLOBAL)
TOPOLOGY = topologies.get_topology_desc(platform="cuda", topology_name="h200", target_config=H200, topology="1x1x1")

compile_step(vp.BinaryTreeLSTM(512, 64), cavs.from_parents([[2, 2, 4, 4, -1]] * 64), 64)
compile_step(vp.LSTM(256, 64), cavs.from_lengths([20] * 16), 64)
with jax.default_matmul_precision("BF16_BF16_F32"):
    compile_step(vp.NaryTreeLSTM(256, 64), cavs.from_parents([[2, 2, 4, 4, -1]] * 64), 64)
fields = {"hb": 16, "groups": 4, "clustered": False, "rows": 8, "warpgroups": 2, "tight": False, "split": 2}
divided = Persistent(layouts=Layouts(lambda level, forward, config: dataclasses.replace(config, **fields)))
compile_step(vp.BinaryTreeLSTM(256, 64), cavs.from_parents([[2, 2, 4, 4, -1]] * 64), 64, divided)
wide = Persistent(layouts=Layouts(wide=lambda level, narrow: (widest.fitting(level, 128)[0], 64)))
compile_step(vp.TreeFC(512), cavs.from_parents([[2, 2, 4, 4, -1]] * 64), 512, wide)
# The level of kernels/README.md, in the layout that it shows.
page: dict[str, Any] = {}
for block in blocks("python", (ROOT / "kernels" / "README.md").read_text()):
    exec(block, page)
shown = Persistent(
    layouts=Layouts(lambda level, forward, config: dataclasses.replace(page["narrow"], precision=config.precision))
)
compile_gradient(page["F"], page["params"], cavs.from_parents([[2, 2, 4, 4, -1]] * 64), 64, shown)
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
            "wide": "wgmma" in text,
            "prefetches": text.count("prefetch.global"),
            "exchanges": text.count("st.shared::cluster"),
            "instructions": sorted(set(re.findall(r"\b[a-z]+(?:\.\w+)+(?=\s)", text))),
        }
print(json.dumps(found))
