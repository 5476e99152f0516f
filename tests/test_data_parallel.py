"""Training on several devices: the losses are those of one device, in one process and in two."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cavs
from tests import devices_script as script

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[subprocess.Popen]]]:
    """Two processes of four devices each, which run while the other tests of this file do their work."""
    folder = tmp_path_factory.mktemp("devices")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    started = []
    for number in range(2):
        command = [sys.executable, "-m", "tests.devices_script", str(number), str(port), str(folder), "train"]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    yield folder, started
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((1,), ("data",))


def test_run_works_where_the_types_of_devices_are_checked(processes: Any, mesh: jax.sharding.Mesh) -> None:
    program = cavs.vertex_programs.ChildSumTreeLSTM(hidden=3, inputs=2)
    F, graphs = program.vertex_function(), cavs.from_parents([[2, 2, -1], [1, 3, 3, -1]])
    params, sched = program.init(jax.random.key(0)), cavs.schedule(graphs)
    x = sched.pad(np.random.default_rng(0).normal(size=(7, 2)).astype(np.float32))

    def loss(params: Any, data: jax.Array, x: jax.Array) -> jax.Array:
        h = cavs.run(F, params, cavs.Schedule(data[0], sched.shape), x[0])
        return cavs.data.mean(h**2)

    args = params, sched.data[None], x[None]
    both = jax.value_and_grad(loss, argnums=(0, 2))
    divided = jax.shard_map(
        both,
        mesh=jax.sharding.Mesh(mesh.devices, mesh.axis_names),
        in_specs=(P(), P("data"), P("data")),
        out_specs=(P(), (P(), P("data"))),
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), jax.jit(divided)(*args), jax.jit(both)(*args))


@pytest.mark.parametrize("what", ["metrics", "state"])
def test_a_loss_of_one_device_is_refused(what: str, mesh: jax.sharding.Mesh) -> None:
    def fun(state: jax.Array, sched: cavs.Schedule) -> Any:
        local = state * sched.num_vertices
        return (state, local) if what == "metrics" else (local, cavs.data.total(local))

    (batches, *_) = cavs.data.Loader(script.data(), 8, mesh=mesh)
    with pytest.raises(ValueError, match=f"step: {what}: got values that differ between devices; .* write cavs.data.mean"):
        cavs.data.step(fun)(jnp.float32(1), batches)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batches": 8}, r"last: got 'short' with a last batch of 1 graph for 2 devices; .* Write last='drop', or last='pad'"),
        ({"batches": 7}, "batches: got 7 for 2 devices; expected a multiple of their number. Write batches=8."),
    ],
)
def test_batches_that_devices_cannot_share_are_refused(options: dict, text: str) -> None:
    two = jax.sharding.Mesh(np.array(jax.devices() * 2), ("data",))
    with pytest.raises(ValueError, match=text):
        cavs.data.Loader(cavs.from_lengths([3] * 9), **options, mesh=two)


def test_the_losses_are_those_of_one_device(processes: tuple[Path, list[subprocess.Popen]]) -> None:
    folder, started = processes
    for process in started:
        errors = process.communicate(timeout=300)[1]
        assert process.returncode == 0, errors
    first, second = (json.loads((folder / f"{number}.json").read_text()) for number in range(2))
    assert first["together"] == second["together"]  # 2 devices of each process
    losses, state = first["alone"]
    assert len(losses) >= script.STEPS and losses[-1] < 0.5 * losses[0]
    for where in ("four", "together", "in turn"):  # 4 devices of one process, and of two; 4 and 1
        np.testing.assert_allclose(first[where][0][: len(losses)], losses, atol=1e-6)
        for got, want in zip(first[where][1], state, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-6)
    assert first["evaluated"] == [2.0 * int(np.maximum(script.data().label, 0).sum())] * 4
    assert "step: state: got a leaf ['w'] that is divided over 4 devices" in first["refusal"]
