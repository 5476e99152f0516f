"""Calls of functions with rules of their own under `jax.vmap` and under differentiation.

`jax.custom_jvp` and `jax.custom_vmap` say such rules, too, but not for long: where JAX splits a `lax.scan` into what is known
and what is not, it drops them (0.10, 0.11), and a second derivative then meets a kernel, which has none. And kernels have
effects, which `jax.custom_jvp` refuses. A primitive keeps its rules until it is lowered.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Self, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp

# Private: JAX stages other primitives with all their parameters in a cache, which would keep what the rules refer to alive, and
# has no public name for the rule by which references to memory become values before a program is lowered.
from jax._src.interpreters import partial_eval
from jax._src.state import discharge
from jax.core import ShapedArray, Tracer
from jax.experimental import jet
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from cavs._graphs.pytree import PyTree
from cavs._jaxpr.jaxprs import Arrays, Jaxpr, all_equations, opened
from cavs._jaxpr.mesh_types import unchecked, untyped
from cavs._jaxpr.settings import always_compiled, promoting

Tangents: TypeAlias = list[jax.Array | None]  # `None` for zeros, and for integers
Flat: TypeAlias = Callable[..., Arrays]

MSG_TRANSPOSE = (
    "jax.linear_transpose: got a function that calls cavs.run or another function of cavs that has a derivative; expected one "
    "of JAX alone. Write jax.vjp(fn, x)[1], which is the transpose of a linear fn."
)
MSG_JET = (
    "jax.experimental.jet: got a function that calls cavs.run or another function of cavs that has a derivative; expected one "
    "of JAX alone. Write a jax.jvp of a jax.jvp for second derivatives, and so on."
)

ruled_p = jex.Primitive("call_with_rules")
ruled_p.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class Rules:
    """A function of flat arrays, and its rules."""

    run: Flat  # the function
    push: Callable[[Arrays, Tangents], tuple[Arrays, Tangents]]  # `push(primals, tangents) -> (results, their tangents)`
    # `batch(map, dims, operands) -> results` with the batch in front, where `map(fn, in_axes)` is `jax.vmap`.
    batch: Callable[[Callable[..., Flat], list[int | None], Arrays], Arrays]
    # Whether JAX is not to check the types of values inside of a `shard_map`. Results then vary as the operands do.
    sealed: bool = False
    # The function that `jax.export` gets instead, as other processes cannot run `run`; `None` if they can.
    exported: Flat | None = None

    @classmethod
    def plain(cls, run: Flat, **more: Any) -> Self:
        """Returns the rules of a function whose equations JAX differentiates and batches. `more`: other fields."""
        push = functools.partial(pushed, run)
        return cls(run, push, lambda over, dims, operands: over(run, tuple(dims))(*operands), **more)

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Returns the context in which JAX traces and lowers the function."""
        return unchecked() if self.sealed else contextlib.nullcontext()


R = TypeVar("R", bound=Rules)


def rules_in(jaxpr: Jaxpr, kind: type[R]) -> Iterator[R]:
    """Yields the rules of one kind of all calls in a jaxpr, also in the bodies of its equations."""
    calls = (eqn.params["rules"] for eqn in all_equations(jaxpr.eqns) if eqn.primitive is ruled_p)
    return (rules for rules in calls if isinstance(rules, kind))


def call(rules: Rules, *operands: jax.Array) -> Arrays:
    """Calls the function. It may not close over tracers."""
    return ruled_p.bind(*operands, call=None, rules=rules)


def as_call(rules: Callable[[Callable[[Callable[..., PyTree]], Flat]], Rules]) -> Callable[..., PyTree]:
    """Returns a call with rules as a function of pytrees of arrays by position.

    `rules`: the rules of flat functions. It is given a function that flattens functions of these pytrees.
    """

    def called(*args: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(args)
        shapes: list[Any] = []
        outs = call(rules(lambda fn: flat(fn, tree, shapes)), *leaves)
        return shapes[0].unflatten(outs)

    return called


def replaceable(
    fn: Callable[..., PyTree], other: Callable[..., PyTree], batched: bool = False, local: bool = False
) -> Callable[..., PyTree]:
    """Returns `fn`, for which `other`, the same function, runs where it is differentiated and under `jax.vmap`.

    Both take pytrees of arrays by position, and close over no tracers. If `fn` can be `batched`, it runs under `jax.vmap`. If
    it is `local`, it can run in this process alone, and `other` is exported.
    """

    return as_call(lambda flat: _replaceable(flat(promoting(fn)), flat(promoting(other)), batched, local))


def _replaceable(run: Flat, other: Flat, batched: bool, local: bool) -> Rules:
    def batch(over: Callable[..., Flat], dims: list[int | None], operands: Arrays) -> Arrays:
        instead = over(other, tuple(dims))
        return call(_replaceable(over(run, tuple(dims)), instead, True, local), *operands) if batched else instead(*operands)

    return Rules(run, functools.partial(pushed, other), batch, exported=other if local else None)


def sealed(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns `fn` for use inside a `jax.shard_map` that checks types. Inside of `fn`, JAX does not check them.

    Its arguments are pytrees of arrays that vary along the same mesh axes. So do all results.
    """

    return as_call(lambda flat: _sealed(flat(fn)))


def _sealed(run: Flat) -> Rules:
    def push(primals: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
        in_places = [i for i, t in enumerate(tangents) if t is not None]
        out_places: list[int] = []

        def tangents_alone(*operands: jax.Array) -> Arrays:
            in_tangents = dict(zip(in_places, operands[len(primals) :], strict=True))
            _, out_tangents = pushed(run, list(operands[: len(primals)]), [in_tangents.get(i) for i in range(len(primals))])
            out_places[:] = [i for i, t in enumerate(out_tangents) if t is not None]
            return [t for t in out_tangents if t is not None]

        # Two calls: where tangents are batched, as in `jax.jacfwd`, the results must not be. XLA merges most of what both
        # compute: a Hessian-vector product of a Tree-LSTM has 33 products, and 30 with one call.
        outs = call(_sealed(run), *primals)
        moved = call(_sealed(tangents_alone), *primals, *(t for t in tangents if t is not None))
        tangent_of = dict(zip(out_places, moved, strict=True))
        return outs, [tangent_of.get(i) for i in range(len(outs))]

    return Rules(run, push, lambda over, dims, operands: call(_sealed(over(run, tuple(dims))), *operands), sealed=True)


def flat(fn: Callable[..., PyTree], tree: Any, shapes: list[Any]) -> Flat:
    """Returns `fn` as a function of the leaves of its arguments. `shapes` becomes the structure of its results."""

    def of_leaves(*leaves: jax.Array) -> Arrays:
        outs, shapes[:] = (flattened := jax.tree.flatten(fn(*tree.unflatten(leaves))))[0], [flattened[1]]
        return outs

    return of_leaves


def pushed(fn: Flat, primals: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
    """Returns the results of `fn`, and their tangents."""
    in_tangents = {i: t for i, t in enumerate(tangents) if t is not None}

    def of(values: dict[int, jax.Array]) -> Arrays:
        return fn(*(values.get(i, x) for i, x in enumerate(primals)))

    outs, out_tangents = jax.jvp(of, [{i: primals[i] for i in in_tangents}], [in_tangents])
    return outs, [None if t.dtype == jax.dtypes.float0 else t for t in out_tangents]


def mapping(axis: Any) -> Callable[..., Flat]:
    """Returns `jax.vmap` over the axis of a batch: a function of a function, and of the axes of its arguments."""
    return lambda fn, in_axes: jax.vmap(fn, in_axes, 0, axis.name, axis.size, axis.spmd_name)


def _run(*operands: jax.Array, call: Any, rules: Rules) -> Arrays:
    run = rules.run if call is None else jex.jaxpr_as_fun(call)
    with rules.context():
        return run(*(untyped(operands) if rules.sealed else operands))


def _stage(trace: Any, source: Any, *tracers: Any, call: Any, rules: Rules) -> Any:
    call = retraced(rules, tracers) if call is None else call
    # Not `default_process_primitive`, whose cache of types would keep the rules, and with them F and its compiled code.
    types, effects = types_of(*(x.aval for x in tracers), call=call, rules=rules)
    return trace.emit_eqn(tracers, types, ruled_p, {"call": call, "rules": rules}, effects, source)


def retraced(rules: Rules, operands: Sequence[Any]) -> Any:
    """Returns the function as a jaxpr, without what nobody reads, which lowering would not remove inside."""
    if rules.sealed:
        operands = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in operands]
    with rules.context():
        jaxpr, consts = opened(jax.make_jaxpr(rules.run)(*operands))
    assert not any(isinstance(x, Tracer) for x in consts), "a function with rules closes over tracers"
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return jex.ClosedJaxpr(jaxpr, consts)


def types_of(*operands: Any, call: Any, rules: Rules) -> tuple[list[ShapedArray], Any]:
    jaxpr, _ = opened(retraced(rules, operands) if call is None else call)
    types: Any = [x.aval for x in jaxpr.outvars]
    if rules.sealed:
        mesh, manual = operands[0].sharding.mesh, operands[0].manual_axis_type
        shardings = [NamedSharding(mesh, PartitionSpec(*[None] * x.ndim)) for x in types]
        types = [x.update(sharding=sharding, manual_axis_type=manual) for x, sharding in zip(types, shardings, strict=True)]
    # References that begin and end inside are no effect: `lower_fun` turns them into arrays.
    effects = {effect for effect in jaxpr.effects if type(effect).__name__ != "InternalMutableArrayEffect"}
    return types, effects


def _push(primals: Sequence[jax.Array], tangents: Sequence[Any], *, call: Any, rules: Rules) -> tuple[Arrays, list[Any]]:
    del call
    outs, out_tangents = rules.push([jnp.asarray(x) for x in primals], [None if type(t) is ad.Zero else t for t in tangents])
    types = [jax.typeof(x).to_tangent_aval() for x in outs]
    return outs, [ad.Zero(aval) if t is None else t for aval, t in zip(types, out_tangents, strict=True)]


def _batch(
    axis: Any, operands: Sequence[jax.Array], dims: Sequence[int | None], *, call: Any, rules: Rules
) -> tuple[Arrays, list[int | None]]:
    if all(d is None for d in dims):
        outs = ruled_p.bind(*operands, call=call, rules=rules)
        return outs, [None] * len(outs)
    # The constants of a jaxpr may be arrays of NumPy.
    outs = rules.batch(mapping(axis), list(dims), [jnp.asarray(x) for x in operands])
    return outs, [0] * len(outs)


def _refuse(message: str) -> Callable[..., NoReturn]:
    def rule(*_: Any, **params: Any) -> NoReturn:
        raise NotImplementedError(message)

    return rule


def _without_references(context: Any, *operands: Any, call: Any, rules: Rules) -> tuple[list[None], Arrays]:
    """Inlines the call, after all transformations, with the references that kernels create and free inside as values."""
    del rules
    pure = cast(Any, discharge).discharge_state(call, strip_memory_space=context.strip_memory_space)
    return [None] * len(operands), jex.jaxpr_as_fun(pure)(*operands)


def _lower(context: Any, *operands: Any, call: Any, rules: Rules) -> Any:
    if rules.exported is not None and context.module_context.lowering_parameters.for_export:
        call, rules = None, dataclasses.replace(rules, run=rules.exported)
    with rules.context():  # equations inside may trace when they are lowered
        return mlir.lower_fun(_run)(context, *operands, call=call, rules=rules)


ruled_p.def_impl(always_compiled(_run))
ruled_p.to_lojax = _run  # JAX first lowers what it calls high, such as the calls of `custom_root`, wherever it is inside
ruled_p.def_effectful_abstract_eval(types_of)
partial_eval.custom_staging_rules[ruled_p] = _stage
ad.primitive_jvps[ruled_p] = _push
batching.fancy_primitive_batchers[ruled_p] = _batch
mlir.register_lowering(ruled_p, _lower, cacheable=False)
ad.primitive_transposes[ruled_p] = _refuse(MSG_TRANSPOSE)
jet.jet_rules[ruled_p] = _refuse(MSG_JET)
if jax.__version_info__ >= (0, 11):  # which kernels need
    discharge.register_discharge_rule(ruled_p)(cast(Any, _without_references))
