"""`cavs train --devices` and `--distributed`: the devices of a run, and its processes. The first process writes the files."""

import contextlib
import os
import sys
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cavs._graphs.pytree import PyTree
from cavs._train.config import Config, TrainError

AXIS = "data"
HEARTBEAT = 20  # seconds without an answer after which a process counts as dead
LONGEST_TEXT = 4096  # bytes of a text that processes exchange

MSG_DISTRIBUTED = (
    "--distributed: got {!r}; expected HOST:PORT,N,I: the address of process 0, the number of processes, and the number of "
    "this one from 0, such as --distributed node1:1234,2,0; or auto, in a cluster that JAX knows, such as Slurm."
)


def mesh_of(config: Config) -> Mesh | None:
    """The devices of a run as a mesh of one axis; `None` for one device.

    Raises:
        TrainError: JAX sees fewer devices, or a batch cannot be divided among them.
    """
    there, processes = jax.device_count(), jax.process_count()
    count = config.devices or there
    if count > there or processes > 1 and count != there:
        at_most = "at most " if processes == 1 else ""
        raise TrainError(
            f"--devices: got {count}; expected {at_most}{there}, the devices that JAX sees ({jax.default_backend()}). Write "
            "--devices 0 for all of them. For several on a CPU, set XLA_FLAGS=--xla_force_host_platform_device_count=4."
        )
    if count == 1:
        return None
    if config.batch % count:
        batch = -(-config.batch // count) * count
        raise TrainError(f"--batch: got {config.batch} for {count} devices; expected a multiple. Write --batch {batch}.")
    if config.memory != "none":
        raise TrainError(
            f"--memory: got {config.memory!r} with {count} devices; expected one device. Omit --memory or --devices."
        )
    return Mesh(np.array(jax.devices()[:count]), (AXIS,))


def replicated(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Puts a pytree of arrays on all devices of a mesh."""
    if mesh is None:
        return tree
    where = NamedSharding(mesh, PartitionSpec())
    there = lambda x: isinstance(x, jax.Array) and x.sharding == where  # noqa: E731
    return jax.tree.map(lambda x: x if there(x) else jax.device_put(np.asarray(x), where), tree)


def shaped(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """`jax.ShapeDtypeStruct`s of what `replicated` returns."""
    if mesh is None:
        return tree
    where = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def writes() -> bool:
    """Whether this process writes the files of the run and prints."""
    return jax.process_index() == 0


def told(text: str | None) -> str:
    """Broadcasts the text of process 0. The other processes may pass `None`. All processes must call this."""
    if jax.process_count() == 1:
        assert text is not None
        return text
    data = (text or "").encode()[:LONGEST_TEXT]
    sent = np.frombuffer(data.ljust(LONGEST_TEXT, b"\0"), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(sent), np.uint8)).rstrip(b"\0").decode()


def wait_for_all(what: str) -> None:
    """Waits until all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def lost(error: BaseException) -> bool:
    """Whether an exception of JAX says that another process of the run has ended."""
    return jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError)


@contextlib.contextmanager
def connected(to: str | None) -> Iterator[None]:
    """A context in which JAX knows the devices of all processes of a run. It must begin before JAX is used.

    If an error ends the context, the process ends at once: JAX would wait for processes that may no longer exist.

    Raises:
        TrainError: `to` is not an address, or JAX cannot connect to it.
    """
    if to is None:
        yield
        return
    if to == "auto":
        given: tuple[str | int, ...] = ()
    else:
        parts = to.split(",")
        if (
            len(parts) != 3
            or ":" not in parts[0]
            or not all(x.isdecimal() for x in parts[1:])
            or int(parts[2]) >= int(parts[1])
        ):
            raise TrainError(MSG_DISTRIBUTED.format(to))
        given = parts[0], int(parts[1]), int(parts[2])
    try:
        jax.distributed.initialize(*given, heartbeat_timeout_seconds=HEARTBEAT)  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        raise TrainError(f"{MSG_DISTRIBUTED.format(to)} {error}") from error
    try:
        yield
    except TrainError as error:
        print(f"cavs train: {error}", file=sys.stderr, flush=True)
        os._exit(error.code)
