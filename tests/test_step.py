"""`cavs.data.step`: the dispatches of a loader give the results of `jax.jit` for one batch after another."""

import ctypes
import functools
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import cavs
from cavs._step.concurrent_jit import _OPTIONS, options_of
from cavs.kernels import H200
from tests.odd_graphs import joined, random_binary_tree

GRAPHS = joined([random_binary_tree(n, seed=n) for n in (5, 9, 3, 8, 4, 6, 7, 9, 3, 10, 11)])
IDS = np.arange(GRAPHS.num_vertices, dtype=np.int32)
GRAPHS = cavs.Graphs.build(
    np.diff(GRAPHS.vertex_offsets), np.diff(GRAPHS.child_offsets), GRAPHS.children, input_id=IDS % 7, label=IDS % 3
)


def rnn(params: Any, v: cavs.Vertex) -> None:
    h = jnp.tanh(v.pull() @ params["w"] + v.gather_all(lambda h: h) @ params["u"])
    v.scatter(h)
    v.push(h)


F = cavs.VertexFunction(rnn, state=(3,))


def loss(params: Any, sched: cavs.Schedule) -> jax.Array:
    h = cavs.run(F, params, sched, params["words"][sched.input_id], select=sched.roots)
    return cavs.data.mean((h.sum(1) - sched.label[sched.roots]) ** 2)


def fun(state: Any, sched: cavs.Schedule) -> tuple[Any, Any]:
    """One step of gradient descent with momentum."""
    params, speed = state
    value, grads = jax.value_and_grad(loss)(params, sched)
    speed = jax.tree.map(lambda v, g: 0.9 * v - 0.1 * g, speed, grads)
    return (jax.tree.map(jnp.add, params, speed), speed), {"loss": value}


def initial() -> Any:
    draw = functools.partial(np.random.default_rng(0).normal, 0, 0.3)
    params = {"w": draw(size=(2, 3)), "u": draw(size=(3, 3)), "words": draw(size=(7, 2))}
    params = {name: jnp.asarray(x, jnp.float32) for name, x in params.items()}
    return params, jax.tree.map(jnp.zeros_like, params)


@pytest.fixture(scope="module")
def plain() -> tuple[Any, list[float]]:
    """The state and the losses of plain `jax.jit`."""
    state, losses, step = initial(), [], jax.jit(fun)
    for sched in cavs.data.Loader(GRAPHS, 3, steps=1, last="drop"):
        state, metrics = step(state, sched)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize(("steps", "of_gpu"), [(2, True), (4, False)])
def test_the_results_are_those_of_plain_jit(steps: int, of_gpu: bool, plain: Any) -> None:
    step, state, losses = cavs.data.step(fun), initial(), []
    loader = cavs.data.Loader(GRAPHS, 3, steps=steps, last="drop")
    if of_gpu:
        loader._delivery._settings = loader._settings._replace(target=H200)
    assert len(loader) % loader.steps, "the last stack must not be full"
    for batches in loader:
        state, metrics = step(state, batches)
        assert metrics["loss"].shape == (len(batches),)
        losses += metrics["loss"].tolist()
    assert step.compilations == 1 + of_gpu, "there full stacks have a program of their own"
    np.testing.assert_allclose(losses, plain[1], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state, plain[0])


def test_the_state_is_updated_in_place_but_not_the_callers() -> None:
    step, given, loader = cavs.data.step(fun), initial(), cavs.data.Loader(GRAPHS, [[0, 1, 2]] * 3, steps=1)
    first, second, third = loader
    state, _ = step(given, first)
    assert not any(x.is_deleted() for x in jax.tree.leaves(given))
    after, _ = step(state, second)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    again, _ = step((after[0], given[1]), third)  # a mixture: only what the step returned is given away
    assert all(x.is_deleted() for x in jax.tree.leaves(after[0]))
    assert not any(x.is_deleted() for x in jax.tree.leaves((again, given)))
    kept, _ = cavs.data.step(fun, donate=False)(given, first)
    assert not any(x.is_deleted() for x in jax.tree.leaves((kept, given)))


@pytest.mark.parametrize(("steps", "meshed"), [(1, False), (1, True), (2, False), (4, True)])
def test_keys_are_a_state_and_metrics(steps: int, meshed: bool) -> None:
    """Keys of `jax.random`: an epoch gives those of a loop over `jax.random.split`, and the caller's key stays valid."""

    @cavs.data.step
    def step(state: Any, sched: cavs.Schedule) -> tuple[Any, Any]:
        key, used = jax.random.split(state["key"])
        return {"key": key}, {"used": used, "number": cavs.data.total(sched.num_vertices)}

    given = jax.random.key(3)
    state, used, key, want = {"key": given}, [], given, []
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",)) if meshed else None
    for batches in cavs.data.Loader(GRAPHS, 3, steps=steps, mesh=mesh, last="drop"):
        state, metrics = step(state, batches)
        used += jax.random.key_data(metrics["used"]).reshape(-1, 2).tolist()
        for _ in range(len(batches) if isinstance(batches, cavs.data.Batches) else 1):
            key, one = jax.random.split(key)
            want.append(jax.random.key_data(one).tolist())
    assert used == want
    np.testing.assert_array_equal(jax.random.key_data(state["key"]), jax.random.key_data(key))
    assert not given.is_deleted()
    on_one_device = cavs.data.step(lambda state, sched: (state, 0))
    moved, _ = on_one_device(state, next(iter(cavs.data.Loader(GRAPHS, 3, steps=1))))  # from a mesh, too
    np.testing.assert_array_equal(jax.random.key_data(moved["key"]), jax.random.key_data(key))


def test_other_shapes_are_compiled_in_the_background() -> None:
    traced = []

    @cavs.data.step
    def step(state: Any, sched: cavs.Schedule) -> tuple[Any, Any]:
        traced.append((sched.shape.graphs, threading.current_thread().name, step.compiling))
        return jax.tree.map(lambda x: 0.9 * x, state), sched.num_vertices

    loader = cavs.data.Loader(GRAPHS, 3)
    batches = iter(loader)
    state, _ = step({"x": jnp.ones(3)}, next(batches))
    assert [(n, name == "cavs-compile") for n, name, _ in traced][:1] == [(3, False)]
    for some in batches:
        state, _ = step(state, some)
    assert [(n, name) for n, name, _ in traced[1:]] == [(2, "cavs-compile")]
    assert traced[1][2] == (2, 2) and step.compiling is None
    assert step.compilations == 2 and "2 programs" in repr(step)
    for some in loader:
        state, _ = step(state, some)
    for thread in [t for t in threading.enumerate() if t.name == "cavs-compile"]:
        thread.join(60)  # it has compiled, and may not have ended yet
        assert not thread.is_alive()
    assert len(traced) == 2


@pytest.mark.parametrize("meshed", [False, True])
def test_programs_are_compiled_ahead_and_found_by_the_calls(meshed: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",)) if meshed else None
    where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    traced = []

    @cavs.data.step
    def step(state: Any, sched: cavs.Schedule) -> tuple[Any, Any]:
        traced.append((sched.shape.graphs, threading.current_thread().name))
        return jax.tree.map(lambda x: 0.9 * x, state), cavs.data.total(sched.num_vertices)

    loader, like = cavs.data.Loader(GRAPHS, 3, mesh=mesh), {"x": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=where)}
    step.compile_ahead(like, loader.examples())
    assert step.compiling in ((1, 2), (2, 2))
    step.background.wait_for_all()
    for thread in [t for t in threading.enumerate() if t.name == "cavs-compile"]:
        thread.join(60)
    assert step.compiling is None
    state = {"x": jnp.ones(3, jnp.float32)}
    for some in loader:
        state, _ = step(state, some)
        assert step.compiling is None
    assert traced == [(3, "cavs-compile"), (2, "cavs-compile")] and step.compilations == 2


def test_a_step_passes_the_options_of_its_devices_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "cavs._step.compiled_step.options_of", lambda mesh: {} if mesh is None else {"xla_no_such_option": True}
    )
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    step = cavs.data.step(lambda state, sched: (state + 1, cavs.data.total(sched.num_vertices)))
    step(jnp.zeros(()), next(iter(cavs.data.Loader(GRAPHS, 3))))
    with pytest.raises(Exception, match="No such compile option: 'xla_no_such_option'"):
        step(jnp.zeros(()), next(iter(cavs.data.Loader(GRAPHS, 3, mesh=mesh))))


def test_options_are_for_several_gpus_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*devices: tuple[str, str, int], flags: str = "") -> set[str]:
        monkeypatch.setenv("XLA_FLAGS", flags)
        names = ("platform", "device_kind", "process_index")
        all_of_them = [SimpleNamespace(**dict(zip(names, device, strict=True))) for device in devices]
        return set(options_of(cast(Any, SimpleNamespace(devices=np.array(all_of_them)))))

    version = jax.__version_info__
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    first, second, far, cpu = ("gpu", "NVIDIA H100", 0), ("gpu", "NVIDIA H100", 0), ("gpu", "NVIDIA H100", 1), ("cpu", "cpu", 0)
    symmetric, several = "xla_gpu_experimental_enable_nccl_symmetric_buffers", found(first, second)
    assert symmetric in several and len(several) == 4
    assert found(first, second, flags=f"--{symmetric}=false") == several - {symmetric}
    assert not found(first) and not found(first, far) and not found(cpu, cpu) and not found(first, ("gpu", "AMD", 0))
    assert not options_of(None)
    if version >= (0, 11):
        jax.jit(lambda x: x, compiler_options=_OPTIONS)(1.0)  # they exist
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert not found(first, second)


def test_means_outside_of_a_step() -> None:
    x = jnp.arange(6.0)
    assert float(cavs.data.mean(x)) == 2.5 and float(cavs.data.total(x > 2)) == 3
    assert float(cavs.data.mean(x, where=x > 2)) == 4 and float(cavs.data.mean(x, where=x > 9)) == 0
    half = jnp.ones(301, jnp.bfloat16) * 3  # bfloat16 cannot count to 301
    assert cavs.data.mean(half, where=half > 0) == 3 and cavs.data.mean(half, where=half > 0).dtype == jnp.bfloat16
    assert cavs.data.mean(x > 2) == 0.5 and cavs.data.mean(jnp.full(300, 2, jnp.uint8)) == 2
    assert cavs.data.mean(jnp.full(70_000, 100, jnp.float16)) == 100  # whose sum, and number, are infinite in float16
    for where, got in (((x > 2)[:3], r"bool\[3\]"), (x, r"float\d+\[6\]"), ((x > 2)[:, None], r"bool\[6, 1\]")):
        with pytest.raises(ValueError, match=rf"mean: where: got {got}; expected bool\[6\], as x has. Write where=labels"):
            cavs.data.mean(x, where=where)


def test_a_step_is_of_a_function() -> None:
    with pytest.raises(TypeError, match=r"step: fun: got a int; expected a function of 2 arguments, \(state, batch\)"):
        cavs.data.step(3)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"step: fun: got <lambda>\(state\); expected a function of 2 arguments, \(state, batch\)"
    ):
        cavs.data.step(lambda state: state)  # type: ignore[arg-type]
    assert cavs.data.step(unroll=2)(fun).__name__ == "fun"


@pytest.mark.parametrize("steps", [1, 2, None])
def test_swapped_arguments_and_other_states_are_named(steps: int | None) -> None:
    graphs = cavs.from_lengths([1, 2])
    loader = cavs.data.Loader(graphs, 1, steps=steps)
    batches, counting = next(iter(loader)), cavs.data.step(lambda state, sched: (state, 0.0))
    with pytest.raises(TypeError, match=r"step: state: got a (Batches|Schedule); expected the state. Write state, out = step"):
        counting(batches, jnp.zeros(()))
    for given in (loader, graphs):
        with pytest.raises(
            TypeError, match="step: batches: got a (Loader|Graphs); expected what a loader yields. Write for batch"
        ):
            counting(jnp.zeros(()), given)
    for other, told in (
        (lambda s: {"w": s["w"]}, "of structure"),
        (lambda s: {**s, "u": s["u"][:2]}, r"\['u'\] is float\d+\[2\]"),
    ):
        with pytest.raises(TypeError, match=f"step: <lambda>: returned a state .*{told}.*; expected"):
            cavs.data.step(lambda state, sched, f=other: (f(state), 0.0))({"w": jnp.zeros(2), "u": jnp.zeros(3)}, batches)


def test_a_step_passes_options_to_xla() -> None:
    step = cavs.data.step(lambda state, sched: (state + 1, {}), compiler_options={"xla_no_such_option": True})
    with pytest.raises(Exception, match="No such compile option: 'xla_no_such_option'"):
        step(jnp.zeros(()), next(iter(cavs.data.Loader(GRAPHS, 3))))
    with pytest.raises(TypeError, match="step: compiler_options: got 3; expected a dict or None. Write compiler_options="):
        cavs.data.step(fun, compiler_options=cast(Any, 3))


KEEPS = """
import ctypes
import tempfile
import threading

import cavs
from cavs._step import host_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096

assert cavs.data.keep_host_memory()
host_memory.MUCH = resident() + (100 << 20)
assert not host_memory.keeps_much()
blocks = [libc.malloc(1 << 20) for _ in range(200)]
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
libc.malloc(64)  # above them
for block in blocks:
    libc.free(block)
assert host_memory.keeps_much()
host_memory.return_unused()
assert not host_memory.keeps_much()

there = threading.Barrier(12)
def allocate():
    there.wait()
    libc.free(libc.malloc(1 << 16))
    there.wait()
threads = [threading.Thread(target=allocate) for _ in range(12)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    assert file.read().count(b"<heap nr=") == host_memory.ARENAS
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="glibc only")
def test_memory_is_kept_until_it_is_returned() -> None:
    """In a process of its own, as `keep_host_memory` changes its process."""
    done = subprocess.run([sys.executable, "-c", KEEPS], capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr


ENDS_EARLY = """
import time
from cavs._step.background import (Background,)

def lower():
    time.sleep(0.3)
    return lambda: None

Background().start({1: lower, 2: lower}, lambda _: None, 2)
"""


def test_a_program_that_ends_while_others_are_lowered_prints_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_EARLY], capture_output=True, text=True, check=True)
    assert ended.stdout + ended.stderr == ""
