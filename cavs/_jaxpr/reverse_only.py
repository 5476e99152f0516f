"""Tangents whose transpose is defined on its own, and values whose tangents have no transpose.

A derivative in reverse mode is a pair: results with what the backward reads, and the backward. JAX asks for tangents first, and
transposes them later. In between it may batch them, trace them into a `lax.scan`, move them into a `jax.checkpoint`, or all of
this in any order. `jax.custom_vjp` has a primitive for such tangents, too, which cannot be batched, nor computed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jax
from jax.core import ShapedArray
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir, partial_eval

from cavs._jaxpr.jaxprs import Jaxpr, all_equations
from cavs._jaxpr.ruled import Arrays, Tangents, mapping, pushed

Cotangents: TypeAlias = list[jax.Array | None]  # `None` is zero

linear_p = jex.Primitive("linear")
linear_p.multiple_results = True


class Linear(NamedTuple):
    """A linear function, and its transpose."""

    # `push(args, tangents) -> tangents of results`. `None` once it was linearized: JAX then only transposes it.
    push: Callable[[Arrays, Arrays], Arrays] | None
    pull: Callable[[Arrays, Cotangents], Cotangents]  # `pull(saved, cotangents of results) -> cotangents of tangents`
    args: int  # how many arrays `push` reads
    saved: int  # how many `pull` reads
    types: tuple[ShapedArray, ...]  # of the tangents of results
    refusal: str  # the text of the `TypeError` if there is no `push`

    def split(self, operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Splits a list with an entry for each operand into arguments, saved arrays, and tangents."""
        first, last = self.args, self.args + self.saved
        return list(operands[:first]), list(operands[first:last]), list(operands[last:])


def linear(of: Linear, args: Arrays, saved: Arrays, tangents: Arrays) -> Arrays:
    """Returns the tangents of results."""
    return linear_p.bind(*args, *saved, *tangents, of=of)


def _run(*operands: jax.Array, of: Linear) -> Arrays:
    if of.push is None:
        raise TypeError(of.refusal)
    args, _, tangents = of.split(operands)
    return of.push(args, tangents)


def _push(primals: Sequence[jax.Array], tangents: Sequence[Any], *, of: Linear) -> tuple[Arrays, Tangents]:
    """Returns the derivative of the tangents, for second derivatives in forward mode."""

    def fn(*operands: jax.Array) -> Arrays:
        return _run(*operands[: of.args], *saved, *operands[of.args :], of=of)

    args, saved, inputs = of.split(primals)
    by_args, _, by_inputs = of.split([None if type(t) is ad.Zero else t for t in tangents])
    return pushed(fn, [*args, *inputs], [*by_args, *by_inputs])


def _transpose(cts: Sequence[Any], *operands: Any, of: Linear) -> Cotangents:
    if all(type(ct) is ad.Zero for ct in cts):
        return [None] * len(operands)
    tangent_cts = of.pull(of.split(operands)[1], [None if type(ct) is ad.Zero else ct for ct in cts])
    return [None] * (of.args + of.saved) + tangent_cts


def _batch(axis: Any, operands: Sequence[jax.Array], dims: Sequence[int | None], *, of: Linear) -> tuple[Arrays, list[int]]:
    (args, saved, inputs), (at_args, at_saved, at_inputs), over = of.split(operands), of.split(dims), mapping(axis)

    def push(args: Arrays, tangents: Arrays) -> Arrays:
        assert of.push is not None
        return over(of.push, (at_args, 0))(args, tangents)

    def pull(saved: Arrays, cts: Cotangents) -> Cotangents:
        return list(over(of.pull, (at_saved, 0))(saved, cts))

    # The transpose of the broadcast of a common argument sums over the batch.
    inputs = [batching.bdim_at_front(x, d, axis.size) for x, d in zip(inputs, at_inputs, strict=True)]
    types: Any = tuple(jex.unmapped_aval(axis.size, 0, t, axis.explicit_mesh_axis) for t in of.types)
    outs = linear(of._replace(push=of.push and push, pull=pull, types=types), args, saved, inputs)
    return outs, [0] * len(outs)


def _partial_eval(trace: Any, *tracers: Any, of: Linear) -> Any:
    args, saved, tangents = of.split(tracers)
    if all(x.is_known() for x in args) and not all(x.is_known() for x in tangents):  # tangents will be transposed, not computed
        of, tracers = of._replace(push=None, args=0), (*saved, *tangents)
    return trace.default_process_primitive(linear_p, tracers, {"of": of})


linear_p.def_impl(_run)
linear_p.def_abstract_eval(lambda *_, of: list(of.types))
ad.primitive_jvps[linear_p] = _push
ad.primitive_transposes[linear_p] = _transpose
batching.fancy_primitive_batchers[linear_p] = _batch
partial_eval.custom_partial_eval_rules[linear_p] = _partial_eval
mlir.register_lowering(linear_p, mlir.lower_fun(_run), cacheable=False)


# --- what has no second derivative in reverse mode
# An identity whose tangent can be computed, and not be transposed: `refusal` is the text of the `TypeError`.
forward_only_p = jex.Primitive("forward_only")


def refusal_in(jaxpr: Jaxpr) -> str | None:
    """Returns the text of a `forward_only` in a jaxpr, or in one inside it."""
    return next((eqn.params["refusal"] for eqn in all_equations(jaxpr.eqns) if eqn.primitive is forward_only_p), None)


def _refuse(*_: Any, refusal: str) -> NoReturn:
    raise TypeError(refusal)


forward_only_p.def_impl(lambda x, **_: x)
forward_only_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(forward_only_p, _refuse)
ad.primitive_transposes[forward_only_p] = _refuse  # for cotangents of zero, too: the loops behind it would refuse them
batching.primitive_batchers[forward_only_p] = lambda args, dims, **params: (forward_only_p.bind(*args, **params), dims[0])
mlir.register_lowering(forward_only_p, lambda ctx, x, **_: [x])
