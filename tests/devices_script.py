"""Run by `test_data_parallel`: one of two processes of four devices each. They train on two of each, and alone on four or one.

Arguments: the number of the process, the port of process 0, a folder for results, and what to do ("train" or "die").
"""

import json
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

import cavs

STEPS = 20


def rnn(params, v):
    h = jnp.tanh(v.pull() @ params["w"] + v.gather_all(lambda h: h) @ params["u"])
    v.scatter(h)
    v.push(h)


F = cavs.VertexFunction(rnn, state=(3,))


def loss(params, sched):
    """A mean over the vertices that have a label: their numbers differ between devices."""
    h = cavs.run(F, params, sched, params["words"][sched.input_id]).sum(1)
    return cavs.data.mean((h - sched.label) ** 2, where=sched.label >= 0)


def fun(state, sched):
    params, speed = state
    value, grads = jax.value_and_grad(loss)(params, sched)
    speed = jax.tree.map(lambda v, g: 0.9 * v + g, speed, grads)
    return (jax.tree.map(lambda p, v: p - 0.05 * v, params, speed), speed), value


def data() -> cavs.Graphs:
    rng = np.random.default_rng(0)
    graphs = cavs.from_lengths(rng.integers(1, 12, 32))
    ids = rng.integers(0, 7, (2, graphs.num_vertices), np.int32)
    lengths = np.diff(graphs.vertex_offsets)
    return cavs.from_lengths(lengths, input_id=ids[0], label=ids[1] % 4 - 1)


def losses(*meshes, steps=None, die_at=None):
    """The losses of `STEPS` steps of batches of 8 graphs, and the parameters. Epochs run on the meshes in turn."""
    draw = np.random.default_rng(1).normal
    params = {k: draw(0, 0.5, s).astype(np.float32) for k, s in (("w", (2, 3)), ("u", (3, 3)), ("words", (7, 2)))}
    state, found, step = (params, jax.tree.map(np.zeros_like, params)), [], cavs.data.step(fun)
    loaders = [cavs.data.Loader(data(), 8, mesh=mesh, steps=steps) for mesh in meshes]
    while len(found) < STEPS:
        loader, mesh = loaders[number := len(found) // 4 % len(meshes)], meshes[number]
        loader.restore(loader.state() | {"epoch": len(found) // 4, "batch": 0})
        for batches in loader:
            state, values = step(state, batches)
            assert {len(x.sharding.device_set) for x in jax.tree.leaves(state)} == {1 if mesh is None else mesh.size}
            found += np.asarray(values).tolist()
            if die_at is not None and len(found) >= die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return found, [np.asarray(x).tolist() for x in jax.tree.leaves(state)]


def refusal(mesh: jax.sharding.Mesh) -> str:
    """The error of a step whose state is divided over a mesh. The state went to one device silently."""
    state = {"w": jax.device_put(np.ones((8, 2)), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")))}
    try:
        cavs.data.step(lambda state, sched: (state, 0))(state, cavs.schedule(data()))
    except ValueError as error:
        return str(error)
    return ""


def evaluated(devices: list[jax.Device]) -> list[float]:
    """Sums on a mesh, of parameters that other devices have, or the same in another order. JAX refused them."""
    replicated = [
        jax.sharding.NamedSharding(mesh_of(some), jax.sharding.PartitionSpec()) for some in (devices[::-1], devices[:2])
    ]
    loader = cavs.data.Loader(data(), 8, mesh=mesh_of(devices))
    sums = lambda params, sched: {"sum": params * cavs.data.total(jnp.maximum(sched.label, 0))}  # noqa: E731
    places = (*replicated, devices[1], None)
    return [cavs.data.evaluate(sums, jax.device_put(jnp.float32(2), place), loader)["sum"] for place in places]


def mesh_of(devices: list[jax.Device]) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(devices), ("data",))


def main() -> None:
    number, port, folder, what = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, number, heartbeat_timeout_seconds=10)
    assert len(jax.local_devices()) == 4
    everywhere = mesh_of([d for process in range(2) for d in jax.local_devices(process)[:2]])
    if what == "die":
        losses(everywhere, die_at=8 if number else None)
        return
    found = {"together": losses(everywhere, steps=2)}
    if not number:
        state = {**cavs.data.Loader(data(), 8, mesh=everywhere).state(), "batch": 2}
        cavs.data.Loader(data(), 8).restore(state)  # on one device, the same batches follow
        found["alone"] = losses(None)
        found["four"] = losses(mesh_of(jax.local_devices()))
        found["refusal"] = refusal(mesh_of(jax.local_devices()))
        found["evaluated"] = evaluated(jax.local_devices())
        found["in turn"] = losses(mesh_of(jax.local_devices()), None)
    with open(f"{folder}/{number}.json", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
