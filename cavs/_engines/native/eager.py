"""Engine `native`: the library computes the eager part of F for all vertices of a kind, as if they were leaves.

So no padding is computed, and gradients of parameters are lazy, as in the levels. XLA computes an eager part that reads
edges, or for which the library lacks something.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from cavs._engines.engine import Batch, Job, batch_of
from cavs._engines.native.call import NativeCall
from cavs._engines.native.gradients import gradients
from cavs._engines.native.kinds import check_lowered
from cavs._engines.scan.task import crossing_cts, kind_of, with_reuse, with_whole
from cavs._function.split import Split, split_leaf
from cavs._jaxpr.hold_back import hold_back
from cavs._jaxpr.jaxprs import Arrays, Var, is_var
from cavs._jaxpr.memo import memoized
from cavs._schedule.schedule import Schedule
from cavs._stages.batched import pull, static_variables
from cavs._stages.blocks import MANY_BYTES
from cavs._stages.cotangents import Cotangent, mask_rows, zero_cotangent
from cavs._stages.entrance import Memory
from cavs._stages.lazy import Direct, lazy_gradients
from cavs._stages.operands import Operand, in_parts
from cavs._stages.saved import Transpose
from cavs._stages.tensors import RowSpan, Values
from cavs.kernels import Unfit


@memoized
def eager_split(part: Split, number: int) -> Split | None:
    """Returns the eager part of `part` as the recurrent part of a split; `None` if XLA computes it.

    `number`: the number by which the library knows these vertices.
    """
    computed = {v for e in part.eager.eqns for v in e.outvars}
    if part.eager.reads_edges or not computed:
        return None
    split = split_leaf(dataclasses.replace(part.role, states=(), pushes=tuple(v for v in part.eager.outs if v in computed)))
    statics, cross = set(split.recurrent.statics), set(split.recurrent.cross)
    if not statics <= set(static_variables(part)) or not cross <= set(part.role.inputs):
        return None
    try:
        check_lowered(split, number)
    except Unfit:
        return None
    return split


class _Stage(NamedTuple):
    """The eager part of kind `k`, without arrays."""

    job: Job
    k: int
    own: Split

    @property
    def part(self) -> Split:
        return self.job.plan.inner[self.job.kinds[self.k]]

    @property
    def number(self) -> int:
        return len(self.job.kinds) + self.k

    def batch(self, data: jax.Array) -> Batch:
        return batch_of(self.job, Schedule(data, self.job.shape), leaves=False)

    def statics(self, values: Arrays) -> Arrays:
        """Selects the static values that the eager part reads, given the values of `static_variables(part)`."""
        env = dict(zip(static_variables(self.part), values, strict=True))
        return [env[v] for v in self.own.recurrent.statics]

    def pulled(self, inputs: Arrays, vertex: jax.Array) -> dict[Var, jax.Array]:
        variables = self.part.role.inputs
        return dict(zip(variables, pull(self.part, variables, inputs, vertex), strict=True))


def in_library(batch: Batch) -> list[int]:
    """Returns the kinds whose eager part the library computes."""
    return [k for k in range(len(batch.parts)) if _own_split(batch, k)]


def _own_split(batch: Batch, k: int) -> Split | None:
    return eager_split(batch.parts[k], len(batch.kinds) + k) if batch.rows[k].size else None


def eager_part(
    batch: Batch, k: int, statics: Arrays, inputs: Arrays, save: bool
) -> tuple[list[Values], list[Transpose]] | None:
    """Computes the eager part of kind `k` in the library; see `Engine.eager_part`. Returns `None` if XLA has to."""
    split = _own_split(batch, k)
    if split is None:
        return None
    stage = _Stage(batch.job, k, split)
    pulled = stage.pulled(inputs, batch.rows[k].vertex)

    call = NativeCall(batch, backward=False, eager=k)
    call.forward_of(stage.number, split, stage.statics(statics), [pulled[v] for v in split.recurrent.cross], save)
    kept, extras = call.saved_of(call.run(), stage.number, split, save)
    values = pulled | dict(zip(split.recurrent.extra, extras, strict=True))
    outs: list[Values] = [values[v] for v in batch.parts[k].eager.outs]
    if not save:
        return outs, []
    saved = _SavedStage(jnp.asarray(batch.sched.data), statics, inputs, kept, extras)
    return outs, [jax.tree_util.Partial(functools.partial(_back, stage), saved)]


class _SavedStage(NamedTuple):
    """What the backward of an eager part reads: the schedule's integers, what the part read, and what its forward kept."""

    data: jax.Array
    statics: Arrays
    inputs: Arrays
    kept: Arrays
    extras: Arrays


def _back(
    stage: _Stage, saved: _SavedStage, cts: list[Cotangent], where: Mapping[Var, Operand] | None = None
) -> tuple[list[Cotangent], list[Cotangent], list[Cotangent]]:
    """Maps cotangents of `part.eager.outs` to cotangents of statics, pulled rows and rows of edges.

    `where`: tensors with slack that have some of these cotangents as rows, so that the library needs no copy.
    """
    part, split, batch = stage.part, stage.own, stage.batch(saved.data)
    rows = batch.rows[stage.k].as_leaves
    vertex = jnp.asarray(rows.vertex)
    size = sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in split.recurrent.cross) * rows.size
    if size > MANY_BYTES:  # gathered again, rather than alive from the forward to the backward
        cotangents = [jnp.asarray(ct) for ct in cts if ct.dtype != jax.dtypes.float0]
        vertex = hold_back([vertex], cotangents, jnp.integer)[0]
    pulled, of_out = stage.pulled(saved.inputs, vertex), dict(zip(part.eager.outs, cts, strict=True))
    crossing = [pulled[v] for v in split.recurrent.cross]
    memory = Memory([], stage.statics(saved.statics), crossing=crossing, kept=saved.kept, extras=saved.extras)
    kind = kind_of(stage.number, split, rows, [of_out[v] for v in split.recurrent.extra], memory)
    known = {v: kind.extra_cts[i] for i, v in split.reverse.extra_cts.items()}
    kind = with_reuse(kind._replace(stored=[v for v in kind.stored if v not in known]), own=False)
    call = NativeCall(batch, backward=True, eager=stage.k)
    call.backward_of(kind, memory.statics, crossing, saved.kept, saved.extras)
    stored = known | dict(zip(kind.stored, call.cuts_of(call.run(), kind), strict=True))
    cuts = with_whole(kind, {v: mask_rows(x, rows.real) if v in kind.reused else x for v, x in stored.items()})
    places = {v: Operand(x, None, 0) for v, x in stored.items()}
    places |= in_parts(kind.cuts.parts, places)
    places |= {v: where[x] for i, v in split.reverse.extra_cts.items() if where and (x := split.recurrent.extra[i]) in where}
    direct = Direct(gradients, places)
    totals = lazy_gradients(split, rows, RowSpan(0, rows.size, 0, 0), memory, cuts, direct=direct)
    of_static = {v: totals[i] for i, v in enumerate(split.recurrent.statics) if i in totals}
    of_static = [of_static.get(v, zero_cotangent(x)) for v, x in zip(static_variables(part), saved.statics, strict=True)]
    crossed = crossing_cts(split, cuts)
    of_pulled = []
    for v, x in pulled.items():
        own_cts = [jnp.asarray(ct) for d in (crossed, of_out) if v in d and (ct := d[v]).dtype != jax.dtypes.float0]
        of_pulled.append(functools.reduce(jnp.add, own_cts) if own_cts else zero_cotangent(x))
    of_edges = [zero_cotangent(jax.ShapeDtypeStruct((0, *v.aval.shape), v.aval.dtype)) for v in part.role.edges if is_var(v)]
    return of_static, of_pulled, of_edges
