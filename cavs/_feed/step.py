"""`step`: a training step of one batch becomes one dispatch of several, on one device or many."""

import atexit
import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from cavs._feed.batches import Batches
from cavs._feed.host_memory import keeps_much, return_unused
from cavs._graphs.pytree import PyTree
from cavs._run.concurrent_jit import Concurrent, in_turn
from cavs._run.manual_axes import varying

UNROLL = 4  # training steps in one CUDA graph
OneStep: TypeAlias = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]

MSG_VARYING = (
    "step: {what}: got values that differ between devices; expected the same on all. Let the loss be that of the whole batch: "
    "write cavs.data.mean(losses) for losses.mean(), before jax.grad, and cavs.data.total(x) for other sums."
)


class Step:
    """A compiled training step. Created by [`cavs.data.step`][].

    Attributes:
        compiling: (k, n) while the k-th of n programs is being compiled, else `None`.
    """

    def __init__(self, fun: OneStep, unroll: int | None, donate: bool):
        functools.update_wrapper(self, fun)
        self._fun, self._unroll, self._donate = fun, unroll, donate
        self._jitted = Concurrent(self._run, donate_argnums=0 if donate else ())
        self._mine: frozenset[int] = frozenset()
        self._last: PyTree = None
        self._known: set[Hashable] = set()
        self._background = _Background()
        self.compiling: tuple[int, int] | None = None

    def __call__(self, state: PyTree, batches: PyTree) -> tuple[PyTree, PyTree]:
        key = _key(batches)
        new = key not in self._known
        if new:
            self.compiling = self.compiling or (len(self._known) + 1, len(self._known) + 1)
            self._background.wait(key)
        state, metrics = self._jitted(self._owned(state, batches), batches)
        if new:
            self._known.add(key)
            self.compiling = None
            return_unused()
            self._compile_others(state, batches)
        self._last, self._mine = state, frozenset(map(id, jax.tree.leaves(state)))
        return state, metrics

    def lower(self, state: PyTree, batches: PyTree) -> Any:
        """As the method of what `jax.jit` returns."""
        return self._jitted.lower(state, batches)

    @property
    def compilations(self) -> int:
        """The number of programs that were compiled: one for each shape of batches and number of steps."""
        return len(self._known)

    def __repr__(self) -> str:
        now = "" if self.compiling is None else f", compiling ({self.compiling[0]} of {self.compiling[1]})"
        return f"Step({getattr(self, '__name__', 'function')}, {self.compilations} programs{now})"

    def _owned(self, state: PyTree, batches: PyTree) -> PyTree:
        """The state on the device or devices, in arrays that may be donated: those of the caller stay valid."""
        if state is self._last:
            return state
        mesh = batches.mesh if isinstance(batches, Batches) else None
        where = None if mesh is None else NamedSharding(mesh, PartitionSpec())

        def owned(x: Any) -> Any:
            if id(x) in self._mine and isinstance(x, jax.Array):
                return x
            here = isinstance(x, jax.Array) and (where is None or x.sharding == where)
            if here and not self._donate:
                return x
            if where is None and isinstance(x, jax.Array | np.ndarray):
                return jax.device_put(x, may_alias=False)  # which compiles nothing
            if here:
                return x.copy()
            return jnp.array(x) if where is None else jax.device_put(np.asarray(x), where)

        return jax.tree.map(owned, state)

    def _run(self, state: PyTree, batches: PyTree) -> tuple[PyTree, PyTree]:
        if not isinstance(batches, Batches):
            return ordered(self._fun)(state, batches)
        many = functools.partial(self._many, stacked=batches.count is not None)
        if batches.mesh is None:
            return ordered(many)(state, batches.tree)

        def local(state: PyTree, tree: PyTree) -> tuple[PyTree, PyTree]:
            out = many(state, tree)
            for what, part in zip(("state", "metrics"), out, strict=True):
                if any(varying(x) for x in jax.tree.leaves(part)):
                    raise ValueError(MSG_VARYING.format(what=what))
            return out

        return ordered(divided(local, batches))(state, batches.tree)

    def _many(self, state: PyTree, tree: PyTree, stacked: bool) -> tuple[PyTree, PyTree]:
        if stacked:
            unroll = (UNROLL if jax.default_backend() == "gpu" else 1) if self._unroll is None else self._unroll
            return lax.scan(self._fun, state, tree, unroll=unroll)
        state, metrics = self._fun(state, tree)
        return state, jax.tree.map(lambda x: jnp.asarray(x)[None], metrics)

    def _compile_others(self, state: PyTree, batches: PyTree) -> None:
        """Compiles in the background what the loader will yield in this epoch, while training goes on."""
        loader = batches.loader if isinstance(batches, Batches) else None
        others = {} if loader is None else {_key(x): x for x in loader.examples()}
        todo = {key: x for key, x in others.items() if key not in self._known and key not in self._background}
        if todo:
            like = jax.tree.map(_struct, state)
            count = len(self._known) + len(todo)
            self._background.start({key: functools.partial(self._compile, like, x) for key, x in todo.items()}, self, count)
            if jax.default_backend() == "cpu":
                jax.block_until_ready(state)  # the step has allocated its temporaries
                # Memory that a compilation allocates would move the arrays of each later step to new addresses.
                for key in todo if keeps_much() else ():
                    self._background.wait(key)

    def _compile(self, state: PyTree, batches: PyTree) -> None:
        self._jitted.lower(state, batches).compile()  # a later call finds the code
        return_unused()


def ordered(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Orders the launches of engine `persistent` on a GPU, where XLA would run independent kernels at the same time."""
    return in_turn(fun) if jax.default_backend() == "gpu" else fun


def divided(fun: Callable[..., PyTree], batches: Batches) -> Callable[..., PyTree]:
    """Runs `fun(state, tree)` on each device of the mesh of `batches`, with the part of `batches.tree` of that device.

    The state and what `fun` returns are the same on all devices.
    """
    assert batches.mesh is not None
    (axis,) = batches.mesh.axis_names
    before = 0 if batches.count is None else 1

    def local(state: PyTree, tree: PyTree) -> PyTree:
        return fun(state, jax.tree.map(lambda x: x.reshape(*x.shape[:before], *x.shape[before + 1 :]), tree))

    spec, every = PartitionSpec(), PartitionSpec(*(None,) * before, axis)
    return jax.shard_map(local, mesh=batches.mesh, in_specs=(spec, every), out_specs=spec)


class _Background:
    """Compilations on a thread, one after another."""

    def __init__(self) -> None:
        # Locked until the program is compiled. Not `threading.Event`s: if Ctrl-C interrupts one, its lock may stay locked.
        self._compiling: dict[Hashable, threading.Lock] = {}
        self._stop = False

    def __contains__(self, key: Hashable) -> bool:
        return key in self._compiling

    def start(self, work: dict[Hashable, Callable[[], None]], step: Step, count: int) -> None:
        """Starts the thread, which ends after the last of `work`."""
        locks = {key: threading.Lock() for key in work}
        for lock in locks.values():
            lock.acquire()
        self._compiling |= locks
        first = count - len(work) + 1

        def run() -> None:
            for number, (key, compile_it) in enumerate(work.items()):
                step.compiling = first + number, count
                try:
                    if not self._stop:
                        compile_it()
                except Exception:  # the call of the step raises the error, too
                    pass
                finally:
                    locks[key].release()
            step.compiling = None

        thread = threading.Thread(target=run, name="cavs-compile", daemon=True)

        def end() -> None:  # an interpreter that ends in the middle of a compilation may crash
            self._stop = True
            thread.join()

        atexit.register(end)
        thread.start()

    def wait(self, key: Hashable) -> None:
        """Waits for a compilation that was started."""
        if key in self._compiling:
            with self._compiling[key]:
                pass


def _key(batches: PyTree) -> Hashable:
    leaves, treedef = jax.tree.flatten(batches)
    return treedef, *((x.shape, x.dtype) for x in leaves)


def _struct(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type, sharding=x.sharding if x.committed else None)


def step(fun: OneStep | None = None, /, *, unroll: int | None = None, donate: bool = True) -> Any:
    """Turns the training step of one batch into the fastest one for this machine, to run over a [`cavs.data.Loader`][].

    ```python
    @cavs.data.step
    def step(state, sched):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, sched)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), value

    for batches in loader:
        state, values = step(state, batches)                          # values: (n,), of n training steps
    ```

    One call is one dispatch. It runs all batches that the loader yields together, one after another (`jax.lax.scan`), updates
    the state in place (donation), lets a GPU run independent kernels at the same time, and runs on all devices of the loader's
    mesh (`jax.shard_map`). The results are those of `jax.jit(fun)` for one batch after another, up to rounding.

    While the first batches train, the programs for the other shapes of the epoch are compiled in the background.

    With a mesh, `fun` runs on each device with the graphs of that device. The loss must be that of the whole batch: write
    [`cavs.data.mean`][] for `jnp.mean`. Gradients of it are summed over the devices by JAX.

    Args:
        fun: `fun(state, batch)` returns the new state and metrics, two pytrees of arrays. The new state has the shapes and
            dtypes of the old one.
        unroll: training steps in one iteration of the scan. `None`: 4 on a GPU, which makes them one CUDA graph, else 1.
        donate: whether to update the state in place. A state that another function created is copied first, so it stays valid;
            one that the step returned is not valid after the next call.

    Returns:
        `step(state, batches)`, which returns the new state and the metrics of all steps, with a leading axis of steps. A single
        batch, as a loader with `steps=1` yields it, gives metrics without this axis. Without `fun`, a decorator is returned.

    Raises:
        TypeError: `fun` is not callable.
        ValueError: when called on several devices, if the metrics or the new state differ between them.
    """
    if fun is None:
        return functools.partial(step, unroll=unroll, donate=donate)
    if not callable(fun):
        raise TypeError(f"step: fun: got a {type(fun).__name__}; expected a function fun(state, batch). Write @cavs.data.step.")
    return Step(fun, unroll, donate)
