"""Tangents of which only the transpose is known, and values whose tangents have no transpose.

A derivative in reverse mode is a pair: results with what the backward reads, and the backward. JAX asks for tangents first, and
transposes them later. In between it may batch them, trace them into a `lax.scan`, move them into a `jax.checkpoint`, or do all of
this in any order. `jax.custom_vjp` has a primitive for such tangents, too, but that cannot be batched.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
from jax.core import ShapedArray
from jax.extend import core as jex
from jax.interpreters import ad, batching, mlir

from cavs._graphs.pytree import PyTree

Cotangents: TypeAlias = list[jax.Array | None]  # `None` is zero
Pull: TypeAlias = Callable[[list[jax.Array], Cotangents], Cotangents]

# JAX remembers the types of equations by their parameters, for as long as its caches live, except for primitives of this name.
# It would keep each `pull` alive, and all that it refers to.
transposable_p = jex.Primitive("custom_lin")
transposable_p.multiple_results = True


def transposable(
    pull: Pull, saved: Sequence[jax.Array], tangents: Sequence[jax.Array], types: Sequence[ShapedArray], refusal: str
) -> list[jax.Array]:
    """Returns tangents that can be transposed, and not be computed.

    Args:
        pull: the transpose, `pull(saved, cotangents of the results) -> cotangents of tangents`. `None` in either list is zero.
        saved: the arrays that it reads.
        tangents: those on which the results depend.
        types: of the results.
        refusal: the text of the `TypeError` if something computes the results: under `jax.jvp`, for instance.
    """
    return transposable_p.bind(*saved, *tangents, pull=pull, count=len(saved), types=tuple(types), refusal=refusal)


def _refuse(*_: Any, refusal: str, **__: Any) -> NoReturn:
    raise TypeError(refusal)


def _transpose(cts: Sequence[Any], *operands: Any, pull: Pull, count: int, **_: Any) -> Cotangents:
    found = pull(list(operands[:count]), [None if type(ct) is ad.Zero else ct for ct in cts])
    return [None] * count + found


def _batch(
    axis: Any, operands: Sequence[Any], dims: Sequence[int | None], *, pull: Pull, count: int, types: Any, refusal: str
) -> tuple[list[jax.Array], list[int]]:
    saved = tuple(dims[:count])

    def of_batch(given: list[jax.Array], cts: Cotangents) -> Cotangents:
        mapped = jax.vmap(pull, (list(saved), 0), 0, axis.name, axis.size, axis.spmd_name)
        return mapped(given, cts)

    # The transpose of the broadcast of a common argument sums over the batch.
    tangents = [batching.bdim_at_front(x, d, axis.size) for x, d in zip(operands[count:], dims[count:], strict=True)]
    stacked = [jex.unmapped_aval(axis.size, 0, t, axis.explicit_mesh_axis) for t in types]
    outs = transposable(of_batch, operands[:count], tangents, stacked, refusal)  # type: ignore[arg-type]
    return outs, [0] * len(outs)


transposable_p.def_impl(_refuse)
transposable_p.def_abstract_eval(lambda *_, types, **__: list(types))
ad.primitive_jvps[transposable_p] = _refuse
ad.primitive_transposes[transposable_p] = _transpose
batching.fancy_primitive_batchers[transposable_p] = _batch
mlir.register_lowering(transposable_p, lambda ctx, *operands, **params: _refuse(**params))
