"""Compiles for an H200 on a machine without one. Import it before JAX, in a process of its own.

Needs jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc, nvidia-nvvm and nvidia-nvjitlink; no driver.
"""

import ctypes
import importlib.util
import os
from collections.abc import Callable
from typing import Any

SPEC = importlib.util.find_spec("nvidia.cu13")
CUDA = list(SPEC.submodule_search_locations)[0] if SPEC and SPEC.submodule_search_locations else "/usr/local/cuda"
os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={CUDA} --xla_gpu_autotune_level=0"}

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh  # noqa: E402

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


def compiled(fn: Callable[..., Any], *shapes: Any, options: dict[str, Any] | None = None) -> jax.stages.Compiled:
    """Compiles a function of arrays of these shapes, with options of the compiler."""
    place = NamedSharding(topologies.make_mesh(TOPOLOGY, (1,), ("x",)), PartitionSpec())
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), shapes)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jax.jit(fn).trace(*shapes).lower(lowering_platforms=("cuda",))
    return lowered.compile(options)


for library in ("libnvJitLink.so.13", "libnvrtc.so.13"):
    if os.path.exists(f"{CUDA}/lib/{library}"):
        ctypes.CDLL(f"{CUDA}/lib/{library}", mode=ctypes.RTLD_GLOBAL)
TOPOLOGY = topologies.get_topology_desc(platform="cuda", topology_name="h200", target_config=H200, topology="1x1x1")
