"""`concurrent_jit`: XLA runs independent kernels at the same time, but not launches of engine `persistent` that need the chip.

A training step is two launches and some forty small kernels around them: products, updates, bookkeeping. A GPU that runs them
one after another is mostly idle. As branches of a CUDA graph they overlap. On one H200 (2026-11-21), a Tree-LSTM step at hidden
512 and batch 64 takes 364 us, and 391 us with `jax.jit`; at hidden 256, 236 and 259 us; at batch 1, 140 and 147 us.

XLA knows which kernels are independent. It does not know that two launches must not run at the same time: the thread blocks
of a launch wait for each other, so all of them must be on the chip. The step is therefore traced, and each launch is made to
depend on the launch before it, or on the pair of launches before it that share the chip (`_step.pairs`).
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cavs._engines.persistent.launch_calls import Half, is_mark
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.empty import evaluated_by
from cavs._jaxpr.equations import bind, values
from cavs._jaxpr.jaxprs import CALLS, Eqn, Jaxpr, body_of, opened, scan_parts
from cavs._run.manual_axes import checked_axes, devices
from cavs._step.pairs import halves_of, has_launches, rules_of
from cavs.kernels import Target, begin_p, end_p

P = ParamSpec("P")
R = TypeVar("R")
_NEVER = np.iinfo(np.int32).min  # no launch leaves this in its flag; XLA does not know


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


@overload
def concurrent_jit(fun: Callable[P, R], /, **options: Any) -> "Concurrent[P, R]": ...
@overload
def concurrent_jit(fun: None = None, /, **options: Any) -> "Callable[[Callable[P, R]], Concurrent[P, R]]": ...
def concurrent_jit(fun: Callable[..., PyTree] | None = None, /, **options: Any) -> Any:
    """Compiles a training step like `jax.jit`, but on a GPU independent kernels run at the same time.

    ```python
    @cavs.concurrent_jit(donate_argnums=(0, 1))
    def step(params, state, sched, words, labels):
        value, grads = jax.value_and_grad(loss)(params, sched, words, labels)
        ...
    ```

    It returns the same as `jax.jit`. Use it for the outermost function, which takes its derivatives inside: JAX refuses it
    under another `jax.jit` or `jax.grad`. On a CPU it compiles faster than `jax.jit`. There, and on a GPU that two launches of
    engine `persistent` share, sums may round differently. It has not been tried on TPUs.

    Args:
        fun: the function, as for `jax.jit`. Without it, a decorator is returned.
        options: the keyword arguments of `jax.jit`.

    Returns:
        The compiled function, with the methods `lower` and `trace` of what `jax.jit` returns.

    Raises:
        TypeError: `fun` is not callable.
        NotImplementedError: when traced, if engine `"persistent"` runs inside a transformation other than `jit`, `grad`,
            `checkpoint`, `scan`, `while_loop`, `cond` and `shard_map`.
    """
    if fun is None:
        return functools.partial(concurrent_jit, **options)
    if not callable(fun):
        raise TypeError(
            f"concurrent_jit: fun: got a {type(fun).__name__}; expected a function. Write cavs.concurrent_jit(step)."
        )
    return Concurrent(in_turn(fun), **options)


class Concurrent(Generic[P, R]):
    """A function compiled with XLA's options for a GPU or for a CPU.

    On a GPU, loops become part of CUDA graphs if no launch of engine `persistent` is inside. For each structure and shapes of
    arguments, the first call traces the function to find out.

    `fun`: the function, with its launches `in_turn`.
    """

    def __init__(self, fun: Callable[P, R], **options: Any):
        functools.update_wrapper(self, fun)
        compiler_options = options.pop("compiler_options", None) or {}
        self._launching: Any = jax.jit(fun, compiler_options=BESIDE | compiler_options, **options)
        self._looping: Any = jax.jit(fun, compiler_options=BESIDE | LOOPS_IN_GRAPHS | compiler_options, **options)
        self._on_cpu = self._launching
        if not any(name in os.environ.get("XLA_FLAGS", "") for name in ON_CPU):
            self._on_cpu = jax.jit(fun, compiler_options=ON_CPU | compiler_options, **options)
        self._chosen: dict[Hashable, Any] = {}

    @functools.cached_property
    def _target(self) -> Target:  # known at the first call: a decorator must not start JAX
        return Target.here()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._jitted(args, kwargs)(*args, **kwargs)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Like `lower` of what `jax.jit` returns."""
        return self._jitted(args, kwargs).lower(*args, **kwargs)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Like `trace` of what `jax.jit` returns."""
        return self._launching.trace(*args, **kwargs)

    def _cache_size(self) -> int:
        return sum(jitted._cache_size() for jitted in {self._on_cpu, self._launching, self._looping})

    def _jitted(self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> Any:
        if self._target.is_cpu:
            return self._on_cpu
        if not self._target.is_gpu:
            return self._launching
        key = shapes_of((args, kwargs))
        if key not in self._chosen:
            jaxpr = self.trace(*args, **kwargs).jaxpr  # both functions share what JAX traces
            self._chosen[key] = self._launching if has_launches(jaxpr.eqns) else self._looping
        return self._chosen[key]


def shapes_of(tree: PyTree) -> Hashable:
    """Returns the structure of a pytree, and the shapes and dtypes of its leaves, or their types."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, *((getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves)


def in_turn(fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns `fun` with each launch, or pair of launches, made to depend on those before it."""

    return evaluated_by(lambda jaxpr, consts, args: _run(jaxpr, consts, args, None)[0], fun)


@dataclasses.dataclass
class _Turns:
    """The launches that have had their turn while a jaxpr is evaluated."""

    before: jax.Array | None  # the flag of the launches before; `None` if there were none
    halves: Iterator[Half | None]  # for each launch to come, how it runs beside another one; `None` if it runs alone
    first: jax.Array | None = None  # the flag of the first launch of a pair, until the second one has had its turn
    on_half: list[jax.Array] = dataclasses.field(default_factory=list)  # what launches of pairs returned


def _run(
    jaxpr: Jaxpr, consts: Sequence[jax.Array], args: Sequence[jax.Array], before: jax.Array | None
) -> tuple[list[jax.Array], jax.Array | None]:
    """Evaluates a jaxpr after a launch.

    Returns the results, and the flag of the last launch. `before`: the flag of the launch; `None` if there was none.
    """
    turns = _Turns(before, iter(halves_of(jaxpr)))
    outs = _evaluate(jaxpr, consts, args, turns)
    return outs, turns.before


def _evaluate(jaxpr: Jaxpr, consts: Sequence[jax.Array], args: Sequence[jax.Array], turns: _Turns) -> list[jax.Array]:
    """Evaluates a jaxpr after the launches that have had their turn."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        operands = values(eqn.invars, env)
        with eqn.ctx.manager, _scope(eqn.source_info.name_stack):
            if eqn.primitive is begin_p:  # the mark stays, for `has_launches`
                after = [] if turns.before is None else [jnp.where(turns.before == _NEVER, 1, 0)]
                outs = bind(eqn, [sum(after, operands[0])])
            elif eqn.primitive is end_p:
                outs, turns.before = operands, operands[0][0]
            elif rules_of(eqn) and (half := next(turns.halves)):
                outs = _on_half(half, operands, turns)
                turns.on_half += outs
            elif is_mark(eqn) and any(operands[0] is x for x in turns.on_half):
                outs = operands  # its layout is not the marked one, and none of those that are measured
            elif eqn.primitive.name in CALLS and has_launches([eqn]):
                with _scope(eqn.params.get("name", "")):
                    outs = _evaluate(*body_of(eqn), operands, turns)
            elif eqn.primitive.name == "shard_map":
                outs, turns.before = _in_shard_map(eqn, operands, turns.before)
            elif has_launches([eqn]):
                outs, turns.before = _inside(eqn, operands, turns.before)
            else:
                outs = bind_unchecked(eqn, operands) or bind(eqn, operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return values(jaxpr.outvars, env)


def _on_half(half: Half, operands: list[jax.Array], turns: _Turns) -> list[jax.Array]:
    """Runs a launch of a pair. Both follow the launches before them; those that come later follow both."""
    outs, flag = _run(*opened(jax.make_jaxpr(half.run)(*operands)), operands, turns.before)
    assert flag is not None
    if turns.first is None:
        turns.first = flag
    else:
        turns.before, turns.first = jnp.minimum(turns.first, flag), None  # `_NEVER` if one of them is
    return outs


def _inside(eqn: Eqn, operands: list[jax.Array], before: jax.Array | None) -> tuple[list[jax.Array], jax.Array | None]:
    """Evaluates an equation that contains launches. They run after the launch `before` and before those that follow."""
    name, params = eqn.primitive.name, eqn.params
    flag = jnp.int32(0) if before is None else before
    if name in ("checkpoint", "remat2"):
        checkpointed = jax.checkpoint(
            lambda flag, *args: _run(*body_of(eqn), args, flag), prevent_cse=params["prevent_cse"], policy=params["policy"]
        )
        return checkpointed(flag, *operands)
    if name == "cond":
        branches = [lambda flag, *args, b=b: _run(*opened(b), args, flag) for b in params["branches"]]
        return lax.switch(operands[0], branches, flag, *operands[1:])
    if name == "scan":
        consts, init, xs = scan_parts(params, operands)

        def one(carry: PyTree, x: list[jax.Array]) -> PyTree:
            outs, flag = _run(*body_of(eqn), [*consts, *carry[1], *x], carry[0])
            return (flag, outs[: len(init)]), outs[len(init) :]

        options = {k: params[k] for k in ("length", "reverse", "unroll")}
        (flag, last), ys = lax.scan(one, (flag, init), xs, **options)
        return [*last, *ys], flag
    if name == "while":
        ends = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_cond, of_body, init = operands[: ends[0]], operands[ends[0] : ends[1]], operands[ends[1] :]
        outs, flag = lax.while_loop(
            lambda carry: _run(*opened(params["cond_jaxpr"]), [*of_cond, *carry[0]], None)[0][0],
            lambda carry: _run(*opened(params["body_jaxpr"]), [*of_body, *carry[0]], carry[1]),
            (init, flag),
        )
        return outs, flag
    raise NotImplementedError(
        f'concurrent_jit: cavs.run by engine "persistent" is inside `{name}`, where its launches '
        'cannot be put in turn. Write jax.jit for this function, or engine="scan" in run.'
    )


def _scope(name: object) -> contextlib.AbstractContextManager[object]:
    """Enters the name under which profiles show an equation."""
    return jax.named_scope(str(name)) if str(name) else contextlib.nullcontext()


def _in_shard_map(eqn: Eqn, operands: list[jax.Array], before: jax.Array | None) -> tuple[list[jax.Array], jax.Array | None]:
    """Binds the equation of a `shard_map` again, without checks.

    JAX has checked the body when it was traced. It cannot check it again: equations do not say that a part was `unchecked`.
    """
    params, body = eqn.params, eqn.params["jaxpr"]
    if before is None and has_launches(body.eqns):
        before = jnp.int32(0)
    flag = None if before is None else PartitionSpec()
    mapped = jax.shard_map(
        lambda operands, before: _run(body, (), operands, before),
        mesh=params["mesh"],
        in_specs=(list(params["in_specs"]), flag),
        out_specs=(list(params["out_specs"]), flag),
        axis_names=frozenset(params.get("newly_manual_axes", params["mesh"].axis_names)),
        check_vma=False,
    )
    return mapped(operands, before)


def bind_unchecked(eqn: Eqn, operands: list[jax.Array]) -> list[jax.Array]:
    """Binds an equation of a checked trace again where JAX does not check, if it is one that changes types; else []."""
    if not devices()[0] or checked_axes():
        return []
    match eqn.primitive.name:
        case "pvary":
            return operands
        case "psum_invariant":
            return [lax.psum(x, eqn.params["axes"]) for x in operands]
        case "all_gather_invariant":
            axis, tiled = eqn.params["all_gather_dimension"], eqn.params["tiled"]
            return [lax.all_gather(x, eqn.params["axis_name"], axis=axis, tiled=tiled) for x in operands]
    return []


def options_of(mesh: Mesh | None) -> dict[str, Any]:
    """Returns the options of XLA for a step on the devices of a mesh, without those that the user set in `XLA_FLAGS`."""
    devices = [] if mesh is None else list(mesh.devices.flat)
    nvidia = all(device.platform == "gpu" and device.device_kind.startswith("NVIDIA") for device in devices)
    one_host = len(devices) > 1 and len({device.process_index for device in devices}) == 1
    if not (one_host and nvidia and jax.__version_info__ >= (0, 11)):  # they were tried with this version of XLA
        return {}
    return {name: value for name, value in _OPTIONS.items() if name not in os.environ.get("XLA_FLAGS", "")}
