"""`Target`: the device that programs are made for, as one value. `Target.here` is the only place that asks JAX for it.

To run the persistent kernels on another GPU, describe it here, and add its layouts to `kernels/tuned`.
"""

import dataclasses
import functools
from typing import Any

import jax

HOPPER = "9.0"  # the compute capability for which the kernels are written


@dataclasses.dataclass(frozen=True, eq=False)  # a key of caches: one value for each device, compared by identity
class Target:
    """The device that programs are made for.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        device_kind: The name of the device, under which `kernels/tuned` records layouts.
        capability: The compute capability of an NVIDIA GPU, or "".
        multiprocessors: The number of multiprocessors. A launch has at most as many thread blocks, because all of them must be
            resident at once. Without a GPU, that of an H200 or an H100 SXM, for `cavs.explain`.
        shared_memory: The bytes of shared memory that a thread block can have.
    """

    platform: str
    device_kind: str = ""
    capability: str = ""
    multiprocessors: int = 132
    shared_memory: int = 227 * 1024

    @property
    def is_cpu(self) -> bool:
        """Whether programs run on the host."""
        return self.platform == "cpu"

    @property
    def is_gpu(self) -> bool:
        """Whether programs run on a GPU, of any maker."""
        return self.platform == "gpu"

    @property
    def is_hopper(self) -> bool:
        """Whether the device is a GPU for which the persistent kernels are written."""
        return self.is_gpu and self.capability == HOPPER

    @staticmethod
    def here() -> "Target":
        """Returns the device on which JAX runs programs."""
        return _described(jax.devices()[0])


H200 = Target("gpu", "NVIDIA H200", HOPPER)


@functools.lru_cache(maxsize=64)
def _described(device: Any) -> Target:
    here = Target(device.platform, device.device_kind, str(getattr(device, "compute_capability", "")))
    return dataclasses.replace(here, multiprocessors=getattr(device, "core_count", here.multiprocessors))
