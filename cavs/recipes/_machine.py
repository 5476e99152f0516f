"""The devices of a run, and its processes."""

import contextlib
import os
import sys
from collections.abc import Iterator

import jax
from jax.sharding import Mesh

from cavs.recipes._options import Mistake, RunOptions

HEARTBEAT = 20  # seconds without an answer after which a process counts as dead
MSG_DISTRIBUTED = (
    "--distributed: got {!r}; expected HOST:PORT,N,I: the address of process 0, the number of processes, and the number of "
    "this one from 0, such as --distributed node1:1234,2,0; or auto, in a cluster that JAX knows, such as Slurm."
)


def mesh_of(options: RunOptions) -> Mesh | None:
    """The devices of a run as a mesh of one axis; `None` for one device.

    Raises:
        Mistake: JAX sees fewer devices, or a batch cannot be divided among them.
    """
    there, processes = jax.device_count(), jax.process_count()
    count = options.devices or there
    if count > there or processes > 1 and count != there:
        at_most = "at most " if processes == 1 else ""
        raise Mistake(
            f"--devices: got {count}; expected {at_most}{there}, the devices that JAX sees ({jax.default_backend()}). Write "
            "--devices 0 for all of them. For several on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count=4."
        )
    if count == 1:
        return None
    if options.batch % count:
        batch = -(-options.batch // count) * count
        raise Mistake(f"--batch: got {options.batch} for {count} devices; expected a multiple. Write --batch {batch}.")
    if options.memory != "none":
        raise Mistake(f"--memory: got {options.memory!r} with {count} devices; expected one device. Omit one of them.")
    return Mesh(jax.devices()[:count], ("data",))


@contextlib.contextmanager
def connected(to: str | None) -> Iterator[None]:
    """A context in which JAX knows the devices of all processes of a run. It must begin before JAX is used.

    If an error ends the context, the process ends at once: JAX would wait for processes that may no longer exist.

    Raises:
        Mistake: `to` is not an address, or JAX cannot connect to it.
    """
    if to is None:
        yield
        return
    parts = to.split(",")
    numbers = len(parts) == 3 and ":" in parts[0] and all(x.isdecimal() for x in parts[1:])
    if to != "auto" and not (numbers and int(parts[2]) < int(parts[1])):
        raise Mistake(MSG_DISTRIBUTED.format(to))
    given = () if to == "auto" else (parts[0], int(parts[1]), int(parts[2]))
    try:
        jax.distributed.initialize(*given, heartbeat_timeout_seconds=HEARTBEAT)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        raise Mistake(f"{MSG_DISTRIBUTED.format(to)} {error}") from error
    try:
        yield
    except Mistake as error:
        print(f"cavs train: {error}", file=sys.stderr, flush=True)
        os._exit(error.code)
