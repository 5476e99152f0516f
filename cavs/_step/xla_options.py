"""Options of XLA for training steps, and what each was measured to gain."""

import os
from typing import Any

import jax
from jax.sharding import Mesh

# On GPUs, independent kernels run at the same time.
BESIDE = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
# Loops are part of the CUDA graph, too. Otherwise the host starts each iteration of engine `scan` and waits for its end: on one
# H200 (2026-11-24), a Tree-LSTM step of engine `scan` at hidden 512 and batch 64 takes 1.26 ms, and 1.96 ms without this. With
# launches of engine `persistent` it is slower: 0.42 instead of 0.30 ms (batch 1: 0.24 and 0.10). The list replaces that of XLA.
_IN_GRAPHS = ("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION", "CONDITIONAL", "WHILE")
LOOPS_IN_GRAPHS = {"xla_gpu_enable_command_buffer": ",".join(_IN_GRAPHS)}
# On a CPU, a quarter of the time that XLA takes to compile engine `scan` are the higher levels of LLVM's optimisation, from
# which no program that was measured gains: a step of a Tree-LSTM, hidden 64, batch 64, compiles in 2.5 s instead of 3.4 and
# takes 8.7 ms instead of 9.4; LSTM, GRU, Child-Sum Tree-LSTM and DAGNN take 0.93 to 1.003 times as long (2 cores, 2026-11-25).
# A level in XLA_FLAGS is the user's choice.
ON_CPU = {"xla_backend_optimization_level": 1}

# How XLA and NCCL sum the gradients of several GPUs of one host. Two NVIDIA H100s, 2026-11-25, a training step of a Tree-LSTM
# with 64 trees per GPU. At hidden 512 (7.4 MB of gradients) it takes 0.513 ms without these options, 0.514 if gradients are
# not joined, 0.489 with symmetric buffers, and 0.468 with both. At hidden 1024 (29 MB) it takes 1.114 ms without them, 1.093
# with both, and 1.059 if gradients are summed in parts of at most 17 MB, one of which then overlaps with the products of the
# others. At hidden 512, two parts instead of one are slower (0.498).
_OPTIONS: dict[str, Any] = {
    # Each GPU loads and stores the memory of the others. NCCL registers the buffers once, and falls back to its usual kernels
    # on machines where it cannot.
    "xla_gpu_experimental_enable_nccl_symmetric_buffers": True,
    # Otherwise XLA copies all gradients into one array before they are summed, and back afterwards.
    "xla_disable_hlo_passes": "all-reduce-contiguous",
    "xla_gpu_all_reduce_combine_threshold_bytes": 17_000_000,
    # XLA's own kernels, for single arrays of at most 4 MB, do not overlap with anything.
    "xla_gpu_experimental_use_collective_kernels": "",
}


def options_of(mesh: Mesh | None) -> dict[str, Any]:
    """Returns the options of XLA for a step on the devices of a mesh, without those that the user set in `XLA_FLAGS`."""
    devices = [] if mesh is None else list(mesh.devices.flat)
    nvidia = all(device.platform == "gpu" and device.device_kind.startswith("NVIDIA") for device in devices)
    one_host = len(devices) > 1 and len({device.process_index for device in devices}) == 1
    if not (one_host and nvidia and jax.__version_info__ >= (0, 11)):  # they were tried with this version of XLA
        return {}
    return {name: value for name, value in _OPTIONS.items() if name not in os.environ.get("XLA_FLAGS", "")}
