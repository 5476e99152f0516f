"""`Step`: a compiled training step. One dispatch runs the batches that a loader yields together, on one device or many."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex
from jax.sharding import Mesh, PartitionSpec

from cavs._feed.batches import Batches, check_bits, struct_of
from cavs._feed.loader import Loader
from cavs._function.arrays import as_arrays
from cavs._graphs.counted import counted
from cavs._graphs.graphs import Graphs
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.mesh_types import varying
from cavs._run.tune import Tuned, launches_in, settle, tasks_of, tune_tasks, unable
from cavs._schedule.schedule import Schedule
from cavs._step.background import Background
from cavs._step.concurrent_jit import Concurrent, in_turn, options_of, shapes_of
from cavs._step.donated_state import DonatedState, deleted_named
from cavs._step.host_memory import keeps_much, return_unused
from cavs.kernels import Target

OneStep: TypeAlias = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


def over_batches(fun: OneStep, state: PyTree, batches: Batches, *, different: str, unroll: int = 1) -> tuple[PyTree, PyTree]:
    """Runs `fun(state, batch)` over batches, one after another. Returns the state, and the metrics with an axis of batches.

    `different`: the text of the error if the state or the metrics (`what`) differ between the devices of a mesh. `unroll`: as
    in `lax.scan`.
    """
    if batches.filled is not None:
        assert batches.count is not None
        return _run_filled(fun, state, batches.stack, batches.filled, batches.count)

    def many(state: PyTree, tree: PyTree) -> tuple[PyTree, PyTree]:
        if batches.count is not None:
            return lax.scan(fun, state, tree, unroll=unroll)
        state, metrics = fun(state, tree)
        return state, jax.tree.map(lambda x: jnp.asarray(x)[None], metrics)

    return many(state, batches.stack) if batches.mesh is None else _divided(many, state, batches, different)


def _run_filled(fun: OneStep, state: PyTree, stack: PyTree, filled: jax.Array, length: int) -> tuple[PyTree, PyTree]:
    """Runs `fun` over the first `filled` batches of a stack of `length` batches. Metrics of the others are zeros."""

    def at(i: jax.Array) -> PyTree:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), stack)

    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stack)
    trace = jax.make_jaxpr(fun, return_shape=True)
    closed, shapes = trace(state, like)  # traced once, for its shapes and for the loop
    if any(x.dtype != new.dtype for x, new in zip(jax.tree.leaves(state), jax.tree.leaves(shapes[0]), strict=True)):
        # A Python number, which takes the type that the function gives it, as in `lax.scan`.
        state = jax.tree.map(lambda x, new: x if x.dtype == new.dtype else x.astype(new.dtype), state, shapes[0])
        closed, shapes = trace(state, like)
    run, treedef = jex.jaxpr_as_fun(closed), jax.tree.structure(shapes)
    zeros = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), shapes[1])

    def one(i: jax.Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        state, metrics = jax.tree.unflatten(treedef, run(*jax.tree.leaves((carry[0], at(i)))))
        return state, jax.tree.map(lambda into, x: lax.dynamic_update_index_in_dim(into, x, i, 0), carry[1], metrics)

    return lax.fori_loop(0, filled, one, (state, zeros))


def _divided(fun: OneStep, state: PyTree, batches: Batches, different: str) -> tuple[PyTree, PyTree]:
    """Runs `fun` on each device of the mesh of `batches`, with the part of `batches.stack` of that device."""
    assert batches.mesh is not None
    (axis,) = batches.mesh.axis_names
    position = 0 if batches.count is None else 1

    def local(state: PyTree, tree: PyTree) -> tuple[PyTree, PyTree]:
        out = fun(state, jax.tree.map(lambda x: x.reshape(*x.shape[:position], *x.shape[position + 1 :]), tree))
        for what, part in zip(("state", "metrics"), out, strict=True):
            if any(map(varying, jax.tree.leaves(part))):
                raise ValueError(different.format(what=what))
        return out

    replicated, divided = PartitionSpec(), PartitionSpec(*(None,) * position, axis)
    return jax.shard_map(local, mesh=batches.mesh, in_specs=(replicated, divided), out_specs=replicated)(state, batches.stack)


UNROLL = 4  # training steps in one CUDA graph
State = TypeVar("State")
Metrics = TypeVar("Metrics")  # of one batch; a dispatch returns the same types, with an axis of steps

MSG_VARYING = (
    "step: {what}: got values that differ between devices; expected the same on all. Let the loss be that of the whole batch: "
    "write cavs.data.mean(losses) for losses.mean(), before jax.grad, and cavs.data.total(x) for other sums."
)
MSG_NO_LAUNCHES = (
    "Step.tune: got a step without launches of engine 'persistent'; expected one, to time its layouts. cavs.explain(F) tells "
    "which engine runs, and why."
)


class Step(Generic[State, Metrics]):
    """A compiled training step. Created by [`cavs.data.step`][]; a call `step(state, batches)` is one dispatch.

    Attributes:
        compiling: (k, n) while the k-th of n programs is being compiled, else `None`.
        background: what `compile_ahead` and the first call compile on a thread.
        tuned: the launches whose layouts were not on record before the first call. `str` of one says what was timed.
    """

    __wrapped__: OneStep  # which `functools.update_wrapper` sets

    def __init__(
        self, fun: OneStep, unroll: int | None, donate: bool, compiler_options: Mapping[str, Any] | None, tune: float = 0
    ):
        functools.update_wrapper(self, fun)
        self._fun, self._unroll, self._donate = checked(fun), unroll, donate
        self._options = dict(compiler_options or {})
        self._jitted: dict[Mesh | None, Concurrent] = {}
        self._donated = DonatedState(donate)
        self._known: set[Hashable] = set()
        self.background = Background()
        self.compiling: tuple[int, int] | None = None
        self.tuned: list[Tuned] = []
        self._seconds = tune

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are created anew, and compile for themselves."""
        return type(self), (self.__wrapped__, self._unroll, self._donate, self._options, self._seconds)

    def __call__(self, state: State, batches: PyTree) -> tuple[State, Metrics]:
        if not isinstance(batches, Batches):  # whose loader has checked them
            check_bits(batches, "step: batches")
        key = shapes_of(batches)
        new = key not in self._known
        if new:
            _check(state, batches)
        foreground = new and key not in self.background
        if foreground:
            self.compiling = self.compiling or (len(self._known) + 1, len(self._known) + 1)
        elif new:
            self.background.wait(key)
        try:
            with deleted_named("step: state"):
                state, program = self._donated.of(state, _mesh(batches)), self._program(batches)
                if foreground:
                    launches = self._settle(program, state, batches, timed=not self._known)
                    self.tuned = self.tuned if self._known else launches
                state, metrics = program(state, batches)
        finally:
            self.compiling = None if foreground else self.compiling
        if new:
            self._known.add(key)
            return_unused()
            self._compile_others(state, batches)
        self._donated.returned(state, _mesh(batches))
        if isinstance(batches, Batches) and batches.filled is not None and (n := len(batches)) != batches.count:
            metrics = jax.tree.map(lambda x: x[:n], metrics)
        return state, metrics

    def lower(self, state: PyTree, batches: PyTree) -> Any:
        """Like `lower` of what `jax.jit` returns."""
        return self._program(batches).lower(state, batches)

    def tune(self, state: State, batches: PyTree, seconds: float = 120) -> list[Tuned]:
        """Times layouts of the persistent kernels for all launches of the step, and keeps the fastest, as [`cavs.tune`][] does.

        Args:
            state: the state.
            batches: batches of the loader. The first one is timed, on random parameters and inputs.
            seconds: after so long, no other layouts are compiled; at least eight are timed for each launch.

        Returns:
            The launches. `str` of one is a line, and its method `table` returns all layouts with their times.

        Raises:
            ValueError: engine `persistent` does not run in this step, or on this device.
        """
        if reason := unable(Target.here()):
            raise ValueError(f"Step.tune: it times launches of engine 'persistent', but {reason}.")
        tasks = tasks_of(launches_in(self._program(batches).trace(state, batches).jaxpr.jaxpr), batches)
        if not tasks:
            raise ValueError(MSG_NO_LAUNCHES)
        return tune_tasks(tasks.values(), Target.here(), seconds)

    def _settle(self, program: Concurrent, state: PyTree, batches: PyTree, timed: bool) -> list[Tuned]:
        """Puts the layouts of a program's launches on record before it is compiled, if they are not and the user wants it.

        `timed`: whether to time layouts, which may change those of programs that are compiled already.
        """
        if not self._seconds or unable(Target.here()):
            return []
        return settle(program.trace(state, batches).jaxpr.jaxpr, batches, Target.here(), self._seconds if timed else 0)

    def _program(self, batches: PyTree) -> Concurrent:
        """Returns what compiles and runs the step for the devices of these batches."""
        mesh = _mesh(batches)
        if mesh not in self._jitted:
            options = options_of(mesh) | self._options
            program = Concurrent(self._run, donate_argnums=0 if self._donate else (), compiler_options=options)
            self._jitted.setdefault(mesh, program)  # another thread may have been faster
        return self._jitted[mesh]

    @property
    def compilations(self) -> int:
        """The number of programs that were compiled: one for each shape of batches and number of steps."""
        return len(self._known)

    def __repr__(self) -> str:
        now = "" if self.compiling is None else f", compiling ({self.compiling[0]} of {self.compiling[1]})"
        return f"Step({getattr(self, '__name__', 'function')}, {counted(self.compilations, 'program')}{now})"

    def _run(self, state: PyTree, batches: PyTree) -> tuple[PyTree, PyTree]:
        fun = self._fun
        if isinstance(batches, Batches):
            unroll = (UNROLL if Target.here().is_gpu else 1) if self._unroll is None else self._unroll
            fun = functools.partial(over_batches, fun, different=MSG_VARYING, unroll=unroll)
        # XLA for GPUs runs independent kernels at the same time, but launches of engine `persistent` need the whole chip.
        return (in_turn(fun) if Target.here().is_gpu else fun)(state, batches)

    def compile_ahead(self, state: PyTree, examples: Sequence[PyTree]) -> None:
        """Compiles the programs of later calls on a thread, in the order of `examples`. A call waits until its own is there.

        No layouts are timed for them, as the GPU may be training. To tune, call the step with one batch before.

        Args:
            state: the state, or `jax.ShapeDtypeStruct`s.
            examples: batches of the shapes to come, or `jax.ShapeDtypeStruct`s.
        """
        like = jax.tree.map(struct_of, state)
        todo = {key: x for x in examples if (key := shapes_of(x)) not in self._known and key not in self.background}

        def lowered(batches: PyTree) -> Callable[[], None]:
            self._settle(self._program(batches), like, batches, timed=False)  # the GPU may be training
            program = self.lower(like, batches)

            def compile_it() -> None:
                program.compile()  # a later call finds the code
                return_unused()

            return compile_it

        work = {key: functools.partial(lowered, x) for key, x in todo.items()}
        if work:
            self.background.start(work, functools.partial(setattr, self, "compiling"), len(self._known) + len(work))

    def _compile_others(self, state: PyTree, batches: PyTree) -> None:
        """Compiles in the background what the loader will yield in this epoch, while training goes on."""
        loader = batches.loader if isinstance(batches, Batches) else None
        self.compile_ahead(state, [] if loader is None else loader.examples())
        if Target.here().is_cpu and self.compiling:
            jax.block_until_ready(state)  # the step has allocated its temporaries
            if keeps_much():  # memory that a compilation allocates would move the arrays of each later step to new addresses
                self.background.wait_for_all()


def checked(fun: Any) -> Any:
    """Returns `fun`, with a check that it returns metrics, and a state of the structure, shapes and dtypes of the old one."""
    name = getattr(fun, "__name__", "fun")

    @functools.wraps(fun)
    def one(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        out = fun(state, batch)
        if not isinstance(out, tuple | list) or len(out) != 2:
            got = counted(len(out), "result") if isinstance(out, tuple | list) else f"a {type(out).__name__}"
            raise TypeError(f"step: {name}: returned {got}; expected the new state and the metrics. Write return state, loss.")
        new, metrics = out
        before, after = jax.tree.structure(state), jax.tree.structure(new)
        if before != after:
            raise TypeError(f"step: {name}: returned a state of structure {after}; expected that of the old state, {before}.")
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(new), strict=True):
            was, now = (f"{jnp.result_type(a)}{list(np.shape(a))}" for a in (x, y))
            # An old state may be a Python number, whose dtype JAX converts.
            weak = np.shape(x) == np.shape(y) and getattr(x, "weak_type", isinstance(x, int | float))
            if was != now and not weak:
                write = f" Write x.astype({jnp.result_type(x).name!r})." if np.shape(x) == np.shape(y) else ""
                raise TypeError(
                    f"step: {name}: returned a state whose {jax.tree_util.keystr(path) or 'array'} is {now}; expected {was}, "
                    f"as in the old state.{write}"
                )
        return new, as_arrays(metrics, f"step: {name}: metrics", "Keep texts outside of the step.")

    return one


def _check(state: PyTree, batches: PyTree) -> None:
    """Raises `TypeError` if the arguments of a step are swapped, or the loader itself."""
    if isinstance(state, Batches | Schedule):
        raise TypeError(
            f"step: state: got a {type(state).__name__}; expected the state. Write state, out = step(state, batches)."
        )
    if isinstance(batches, Loader | Graphs):
        got, loader = type(batches).__name__, "loader" if isinstance(batches, Loader) else "cavs.data.Loader(graphs, 64)"
        raise TypeError(
            f"step: batches: got a {got}; expected what a loader yields. Write for batches in {loader}: "
            "state, out = step(state, batches)."
        )


def _mesh(batches: PyTree) -> Mesh | None:
    return batches.mesh if isinstance(batches, Batches) else None
