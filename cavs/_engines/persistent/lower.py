"""One direction of F's recurrent part as a `LevelProgram`: what a launch of engine `persistent` computes, reads and writes.

A level of the forward computes F's recurrent equations, a level of the backward the rest of the joint program
(`_function.split`).
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.core import ShapedArray

from cavs._engines.persistent.bounds import bound, bounds, gathered_states, state_bounds
from cavs._engines.persistent.chip import candidates, estimated, launch_cost
from cavs._engines.persistent.device_equations import in_domain, multiplied, rewritten, with_scaled_products, zeros_in_domain
from cavs._engines.persistent.replaced import Replaced, halved_states, reading_replaced, replaced_by_cuts
from cavs._engines.persistent.wide_levels import wide_launch
from cavs._function.children import REDUCTIONS
from cavs._function.domains import EDGE, ROW, STATIC, Domain, Domains, domain_of
from cavs._function.plan import FunctionPlan
from cavs._function.split import Split
from cavs._jaxpr.equations import depends, needed
from cavs._jaxpr.jaxprs import Atom, Eqn, Var, is_var
from cavs._jaxpr.memo import memoized
from cavs._schedule.schedule import Shape
from cavs.kernels import (
    H200,
    PRECISIONS,
    ConstantRead,
    Index,
    IndexRole,
    LevelProgram,
    ParentSum,
    RowAddress,
    RowRead,
    Source,
    Target,
    Tensor,
    TensorRole,
    Unfit,
    asked_precision,
    check_accesses,
    contracted_axis,
    cut,
    is_product,
    of_tf32_bits,
    program_text,
    replacement,
    with_halves,
)

# Indices of a launch's scalars, after `kernels._program.arrays.NUM_LEVELS`, `NUM_ROWS` and `NUM_EDGES`: offsets of rows.
STATE_ROW, PAD, EDGE_PAD, SLOTS = 3, 4, 5, 6
EDGE_CHILD, EDGE_COUNT = Index(IndexRole.EDGE_CHILD), Index(IndexRole.EDGE_COUNT)
PARENT, PARENT_SLOT = Index(IndexRole.PARENT), Index(IndexRole.PARENT_SLOT)
PARENT_FIRST, PARENT_COUNT = Index(IndexRole.PARENT_FIRST), Index(IndexRole.PARENT_COUNT)
PUSHED_ROW, NUM_CHILDREN = Index(IndexRole.PUSHED_ROW), Tensor(TensorRole.NUM_CHILDREN)
# What parents write for their children. It is read only by indices, so its padding rows may hold anything.
OF_PARENTS = (TensorRole.TO_SLOT, TensorRole.TO_EDGE)
# The estimated microseconds of a launch in tf32 from which on scaled float16 is used. A launch then takes 0.7 of the time, but
# finding the largest number and copying the leaves take about 20 us. One H100, 2026-11-28, Tree-FC: with hidden 1024 and batch
# 64 (257 us estimated), the launch takes 159 -> 113 us and a step 436 -> 405; with 512 and 16 (96), 27 -> 21 and 97 -> 98.
_LONG = 200.0


@dataclasses.dataclass(frozen=True)
class LaunchOutput:
    """A tensor that a launch writes."""

    value: Var  # the variable whose values it holds
    domain: Domain  # ROW or EDGE
    base: int | None  # the scalar that is added to its rows, if any
    copies: int  # how many rows it has for each row of the batch


class Way(NamedTuple):
    """A direction of the recurrent part."""

    forward: bool  # whether it is the forward
    forest: bool  # whether no vertex has two parents
    keep: bool  # whether a forward keeps values for a backward
    scaled: bool = False  # whether a forward scales what its products read; see `scaled_forward_of`


class Recurrence:
    """One direction of the recurrent part of an inner role as a `LevelProgram`, with what its launch reads and writes.

    Raises `Unfit` if the kernels cannot compute it.
    """

    def __init__(
        self,
        part: Split,
        way: Way,  # the direction, and what it must do
        pushed: frozenset[int],  # states to whose cotangents pushes contribute; others get cotangents only from parents
        largest: list[float],  # bounds of the states; see `_engines.persistent.bounds.state_bounds`
        replaced: Replaced,  # which kept values the forward stores side by side, for the backward to replace
        scaled: frozenset[int] = frozenset(),  # the states whose copies of 16 bits are multiplied by `factor`, if any
    ):
        self.replaced, self.scaled = replaced, scaled
        self.halved: list[int] = []  # the states whose copies of 16 bits the forward keeps; empty for a backward
        # A static scalar: a power of two, at most 1, that brings these states into the range of float16. It is not computed by
        # `static_eqns`.
        self.factor = Var(ShapedArray((), np.dtype(np.float32))) if scaled else None
        self.part, self.forward, self.pushed = part, way.forward, pushed
        self.kept: list[Var] = part.forward.keep if way.keep else []
        self.operands: list[Var] = [] if way.forward else _summed_operands(part)
        self.written: dict[Tensor, LaunchOutput] = {}
        needed = self._needed()
        values = [*part.role.states, *part.recurrent.extra, *part.recurrent.cross]
        if any(0 in x.aval.shape for x in (*values, *(x for e in needed for x in (*e.invars, *e.outvars)))):
            raise Unfit("it computes with values of width 0")
        eqns, domains = rewritten(needed, part.joint.domain)
        places = self._places(eqns, domains)
        known = {v: largest[i] for v, i in gathered_states(part).items()}
        self.precision = _precision(eqns, domains, bounds(eqns, known))
        precision, inverses = PRECISIONS[self.precision], dict[Var, Var]()
        if precision.instead_of:
            eqns, domains, inverses = with_scaled_products(eqns, domains, self.factor)
            self._store_scaled(places, eqns, domains)
        moving = [e for e in eqns if domains.get(e.outvars[0], STATIC) != STATIC]
        self.static_eqns = [e for e in eqns if domains.get(e.outvars[0], STATIC) == STATIC]
        weights = {e.invars[1] for e in moving if e.primitive.name == "dot_general"}
        read = dict.fromkeys((*(x for e in moving for x in e.invars if is_var(x)), *inverses.values()))
        self.statics = [x for x in read if domains.get(x, STATIC) == STATIC]
        self.weights = [x for x in self.statics if x in weights]
        # Tensors that a level reads after an earlier level of the same launch wrote them.
        exchanged = frozenset(Tensor(TensorRole.STATE, i) for i in range(len(part.forward.states) if way.forward else 0))
        program = cut(moving, domains, self._sources(way.forest), places, exchanged, precision.chunk)
        if not way.forward:
            self.replaced = replaced_by_cuts(part, program)
            program = reading_replaced(program, self.replaced)
        scales = {w: self.constant(v) for w, v in inverses.items()}
        program = dataclasses.replace(program, scales=scales)
        self.program: LevelProgram = with_halves(program, precision.dtype) if precision.dtype is not None else program
        check_accesses(self.program, self.overwritten)

    def __str__(self) -> str:
        """The phases and operations of a level, as text."""
        return f"{'forward' if self.forward else 'backward'}, products in {self.precision}\n{program_text(self.program)}"

    def constant(self, v: Var) -> Tensor:
        """Returns the name of the constant that holds a static value."""
        return Tensor(TensorRole.STATIC, self.statics.index(v))

    @property
    def overwritten(self) -> dict[Tensor, Tensor]:
        """Maps tensors of kept values to the cut cotangents that the launch may store in their place."""
        return {Tensor(TensorRole.REPLACED, m): Tensor(TensorRole.CUT, m) for m in ([] if self.forward else self.replaced)}

    @property
    def arity(self) -> int:
        """The number of slots that children fill."""
        return max((k for k, _ in self.part.recurrent.slots), default=-1) + 1

    def _needed(self) -> list[Eqn]:
        """Returns the equations that this direction's outputs need."""
        part = self.part
        if self.forward:
            return needed(part.joint.program.eqns, [*part.forward.states, *part.forward.extra, *self.kept])[0]
        outputs = [*part.reverse.ct_slots.values(), *part.reverse.ct_child.values(), *part.reverse.cuts, *self.operands]
        return needed(part.joint.program.eqns, outputs, part.joint.available)[0]

    def _sources(self, forest: bool) -> dict[Var, Source]:
        """Maps each input to where the launch reads it."""
        part = self.part
        out: dict[Var, Source] = {v: ConstantRead(Tensor(TensorRole.STATIC, n)) for n, v in enumerate(self.statics)}
        out |= {v: RowRead(Tensor(TensorRole.CROSSING, n)) for n, v in enumerate(part.forward.cross)}
        for v, (slot, i) in zip(part.forward.slots, part.recurrent.slots, strict=True):
            out[v] = RowRead(Tensor(TensorRole.STATE, i), Index(IndexRole.KID, slot))
        for v, i in zip(part.forward.child, part.recurrent.child, strict=True):
            out[v] = RowRead(Tensor(TensorRole.STATE, i), EDGE_CHILD)
        out[part.forward.num_children] = RowRead(NUM_CHILDREN)
        return out if self.forward else self._backward_sources(out, forest)

    def _backward_sources(self, out: dict[Var, Source], forest: bool) -> dict[Var, Source]:
        """Adds where the backward reads values of the forward, and cotangents."""
        part = self.part
        for n, v in enumerate(part.forward.extra):
            if is_var(v):
                out.setdefault(v, RowRead(Tensor(TensorRole.EXTRA, n)))
        for i, v in enumerate(part.forward.states):
            if is_var(v) and domain_of(v, part.joint.domain) != STATIC:
                out.setdefault(v, RowRead(Tensor(TensorRole.STATE, i), base=STATE_ROW))
        for n, v in enumerate(part.forward.keep):
            out[v] = RowRead(Tensor(TensorRole.KEPT, n), base=EDGE_PAD if part.joint.domain.get(v) == EDGE else PAD)
        for i, v in part.reverse.state_cts.items():
            by_slot = any(part.recurrent.slots[j][1] == i for j in part.reverse.ct_slots)
            by_edge = any(part.recurrent.child[j] == i for j in part.reverse.ct_child)
            parts = [(Tensor(TensorRole.TO_SLOT, i), PARENT_SLOT)] * by_slot
            parts += [(Tensor(TensorRole.TO_EDGE, i), PARENT)] * by_edge
            ends = (None, None) if forest else (PARENT_FIRST, PARENT_COUNT)
            direct = (Tensor(TensorRole.PUSHED, i), PUSHED_ROW) if i in self.pushed else None
            out[v] = ParentSum(direct, tuple(parts), *ends)
        for i, v in part.reverse.extra_cts.items():
            out[v] = RowRead(Tensor(TensorRole.EXTRA_COTANGENT, i))
        return out

    def _places(self, eqns: list[Eqn], domains: Domains) -> dict[Var, list[RowAddress]]:
        """Maps each output to where it is stored. Extends `eqns` and `domains`, so that constants have a value per vertex."""
        places: dict[Var, list[RowAddress]] = {}

        def put(x: Atom, tensor: Tensor, base: int | None, copies: int = 1, domain: Domain = ROW, offset: int = 0) -> None:
            v = in_domain(x, domain, domains, eqns)
            places.setdefault(v, []).append(RowAddress(tensor, base, offset))
            if tensor.role is not TensorRole.STATE:
                self.written[tensor] = LaunchOutput(v, domain, base, copies)

        part = self.part
        if self.forward:
            for i, v in enumerate(part.forward.states):
                put(v, Tensor(TensorRole.STATE, i), STATE_ROW)
            for n, (v, domain) in enumerate(zip(part.forward.extra, part.extra_domain, strict=True)):
                put(v, Tensor(TensorRole.EXTRA, n), None, domain=domain)
            together = {n: (m, column) for m, columns in self.replaced.items() for n, column in columns.items()}
            for n, v in enumerate(self.kept):
                base, domain = EDGE_PAD if domains.get(v) == EDGE else PAD, domains.get(v, STATIC)
                if n in together:
                    put(v, Tensor(TensorRole.REPLACED, together[n][0]), None, domain=domain, offset=together[n][1])
                else:
                    put(v, Tensor(TensorRole.KEPT, n), base, domain=domain)
            for m in self.replaced:
                tensor = Tensor(TensorRole.REPLACED, m)
                self.written[tensor] = dataclasses.replace(self.written[tensor], value=part.reverse.cuts[m])
            return places
        for j, v in part.reverse.ct_slots.items():
            slot, i = part.recurrent.slots[j]
            put(v, Tensor(TensorRole.TO_SLOT, i), SLOTS + slot, self.arity)
        for slot, i, like in self._unread_slots():
            put(zeros_in_domain(like, ROW, domains, eqns), Tensor(TensorRole.TO_SLOT, i), SLOTS + slot, self.arity)
        for j, v in part.reverse.ct_child.items():
            put(v, Tensor(TensorRole.TO_EDGE, part.recurrent.child[j]), None, domain=EDGE)
        for n, v in enumerate(part.reverse.cuts):
            put(v, Tensor(TensorRole.CUT, n), None, domain=part.reverse.cut_domain[v])
        for n, v in enumerate(self.operands):
            put(v, Tensor(TensorRole.OPERAND, n), None, domain=domains.get(v, STATIC))
        return places

    def _store_scaled(self, places: dict[Var, list[RowAddress]], eqns: list[Eqn], domains: Domains) -> None:
        """Adds copies of 16 bits of the states that are `scaled`. Extends `places`, `eqns` and `domains`."""
        for v, addresses in [*places.items()]:
            states = [a for a in addresses if a.tensor.role is TensorRole.STATE and a.tensor.number in self.scaled]
            if states and self.factor is not None:
                twins = [dataclasses.replace(a, tensor=dataclasses.replace(a.tensor, half=True)) for a in states]
                places[multiplied(v, self.factor, domains, eqns)] = twins

    def _unread_slots(self) -> list[tuple[int, int, ShapedArray]]:
        """Returns (slot, state, its type) for each slot in which a state is not read although another slot reads it.

        A child in such a slot reads the cotangent, which must therefore be zero.
        """
        part = self.part
        read = {part.recurrent.slots[j]: v.aval for j, v in part.reverse.ct_slots.items()}
        types = {i: shape for (_, i), shape in read.items()}
        return [(slot, i, shape) for i, shape in types.items() for slot in range(self.arity) if (slot, i) not in read]


def _summed_operands(part: Split) -> list[Var]:
    """Operands of parameter gradients that depend on sums over children. The kernel computes them again, in a fixed order."""
    sums = [v for e in part.joint.program.eqns if e.primitive in REDUCTIONS for v in e.outvars]
    wanted = [v for v in part.reverse.operands if v not in part.joint.available]
    return [v for v in dict.fromkeys(wanted) if v in depends(part.joint.program.eqns, set(sums))]


def recurrence_of(
    plan: FunctionPlan, name: str | None, forward: bool, forest: bool = True, keep: bool = True, target: Target = H200
) -> Recurrence:
    """Returns one direction of the inner role of a kind. Raises `Unfit` if the kernels cannot compute it.

    `forest`: whether no vertex has two parents. `keep`: whether a forward keeps values for a backward. `target`: the GPU, whose
    layouts decide the precision of products.
    """
    outcome = _recurrence_of(plan, name, Way(forward, forest or (forward and not keep), keep or not forward), target)
    if isinstance(outcome, str):
        raise Unfit(outcome)
    return outcome


def scaled_forward_of(plan: FunctionPlan, name: str | None, forest: bool, keep: bool, target: Target) -> Recurrence | None:
    """Returns the forward with products in float16 where F bounds what vertices with children scatter, but not the leaves.

    What products read is scaled by a power of two, such that the largest number of the leaves is in the range of float16.
    Returns `None` if F bounds the leaves, too, or does not bound the others, or if products read anything but states.
    """
    outcome = _recurrence_of(plan, name, Way(True, forest or not keep, keep, scaled=True), target)
    return None if isinstance(outcome, str) else outcome


def forward_of(plan: FunctionPlan, name: str | None, shape: Shape, keep: bool, target: Target) -> Recurrence:
    """Returns the forward of the inner role of a kind on schedules of a shape; see `recurrence_of`.

    Its products are in scaled float16 where that saves time.
    """
    plain = recurrence_of(plan, name, True, shape.forest, keep, target)
    scaled = scaled_forward_of(plan, name, shape.forest, keep, target)
    return scaled if scaled is not None and is_long(plain, shape, target) else plain


def is_long(recurrence: Recurrence, shape: Shape, target: Target) -> bool:
    """Returns whether a launch takes long, unless wide levels have a launch of their own, which multiplies in tf32.

    The cost model says so alone: records of layouts may change before a run is resumed.
    """
    fitting = candidates(recurrence.program, recurrence.precision, target)
    if not fitting:
        return True
    config = estimated(recurrence.program, fitting, shape)
    wide, _ = wide_launch(recurrence.program, config, target, shape)
    return wide is None and launch_cost(recurrence.program, config, shape) > _LONG


@memoized
def _recurrence_of(plan: FunctionPlan, name: str | None, way: Way, target: Target) -> Recurrence | str:
    """Returns the recurrence, or why the kernels cannot compute it: an error would keep the frames of all callers alive."""
    try:
        return _scaled(plan, name, way, target) if way.scaled else _recurrence(plan, name, way, target)
    except Unfit as e:
        return str(e)


def _recurrence(plan: FunctionPlan, name: str | None, way: Way, target: Target) -> Recurrence:
    part, backward, replaced = plan.inner[name], None, Replaced()
    if way.forward and way.keep:
        with contextlib.suppress(Unfit):  # if only the backward does not fit, its own error says so
            backward = recurrence_of(plan, name, False, way.forest, target=target)
            replaced = backward.replaced if part.forward.keep else replaced
    recurrence = Recurrence(part, way, _pushed(plan), state_bounds(plan), replaced)
    if PRECISIONS[recurrence.precision].instead_of and not _of_two_rows(recurrence, target):
        recurrence = Recurrence(part, way, _pushed(plan), [math.inf] * len(plan.state_avals), replaced)
    if backward is not None:
        recurrence.halved = halved_states(part, recurrence.program, backward.program)
    return recurrence


def _scaled(plan: FunctionPlan, name: str | None, way: Way, target: Target) -> Recurrence:
    """Returns what `scaled_forward_of` does. Raises `Unfit` in place of `None`."""
    plain = _recurrence_of(plan, name, way._replace(scaled=False), target)
    if isinstance(plain, str):
        raise Unfit(plain)
    reason = "its products cannot be in scaled float16"
    states, largest = _states_of_products(plain.program), state_bounds(plan, leaves=False)
    if PRECISIONS[plain.precision].instead_of or not states or any(largest[i] == math.inf for i in states):
        raise Unfit(reason)
    scaled = Recurrence(plan.inner[name], way, _pushed(plan), largest, plain.replaced, states)
    if scaled.factor not in scaled.statics or _states_of_products(scaled.program) != states or not _of_two_rows(scaled, target):
        raise Unfit(reason)
    return scaled


def _states_of_products(program: LevelProgram) -> frozenset[int]:
    """Returns the states whose rows products read; none if they read anything else, too."""
    read = {row.tensor for p in program.products() for operand in p.operands for rows in operand for row in rows}
    states = frozenset(tensor.number for tensor in read if tensor.role is TensorRole.STATE and tensor.number is not None)
    return states if len(read) == len(states) else frozenset()


def _pushed(plan: FunctionPlan) -> frozenset[int]:
    return frozenset(range(len(plan.state_avals)) if plan.push_states is None else plan.push_states)


def _of_two_rows(recurrence: Recurrence, target: Target) -> bool:
    """Returns whether float16 products sum at most two rows, whose sum float16 holds, and have a layout."""
    program = recurrence.program
    sums = [operand for p in program.products() for operand in p.operands]
    return all(len(rows) <= 2 for rows in sums) and bool(candidates(program, recurrence.precision, target))


def _precision(eqns: Sequence[Eqn], domains: Domains, limits: dict[Var, float]) -> str:
    """Returns the precision of products: what JAX would use on this GPU for the precision that F asks for.

    If all operands have bounds (`limits`) within the range of a faster precision that is as exact, that one.
    """
    products = [e for e in eqns if is_product(e, domains)]
    in_float32 = all(x.aval.dtype == "float32" for e in products for x in e.invars)  # others do not fit the engine
    requested = asked_precision(e.params["precision"] for e in products)
    faster = replacement(requested)
    if faster is None or not products or not in_float32:
        return requested.name
    summed = [e.invars[1].aval.shape[contracted_axis(e)] for e in products]
    small = all(bound(e.invars[0], limits) <= faster.largest and of_tf32_bits(e.params["precision"]) for e in products)
    return faster.name if small and all(k % faster.chunk == 0 for k in summed) else requested.name
