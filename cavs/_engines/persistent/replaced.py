"""Chooses how kept values are stored: side by side where a cut cotangent replaces them, and states in 16 bits.

A backward launch stores a cut cotangent over rows that it has read for the last time. A thread block reads and writes its own
columns of a row, so the values need not have the order or the shape of the cotangent, only its bytes: the forward stores them
side by side in a tensor that is as wide.
"""

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np

from cavs._engines.persistent.bounds import gathered_states
from cavs._function.domains import EDGE
from cavs._function.evaluate import matrix_product
from cavs._function.keeping import lazy_reads
from cavs._function.split import Split
from cavs._jaxpr.jaxprs import Atom, Var, is_var
from cavs.kernels import LevelProgram, Load, Phase, RowRead, Tensor, TensorRole, aval, stored_dtype

Replaced = dict[int, dict[int, int]]  # cut cotangent -> kept value -> the column at which the value begins
_MOST = 8  # values of which all subsets are tried
_ROUNDED_TERM_BY_TERM = ("add", "add_any", "concatenate", "stack", "reshape")  # of a sum of rows, products round each term


def replaced_by_cuts(part: Split, program: LevelProgram) -> Replaced:
    """Returns the kept values that fill the rows of a cut cotangent, and are not read once it is there.

    `program`: its backward, which reads kept value n as `TensorRole.KEPT` n and stores cut cotangent m as `TensorRole.CUT` m.
    """
    reverse, domain, later = part.reverse, part.joint.domain, lazy_reads(part.joint)
    last_load = _last_loads(program)
    first_store = {store.place.tensor: i for i, phase in reversed([*enumerate(program.phases)]) for store in phase.stores}
    spare = {
        n: v
        for n, v in enumerate(part.forward.keep)
        if v not in later and Tensor(TensorRole.KEPT, n) in last_load and _fits(v, program)
    }
    replaced: Replaced = {}
    for m, cut in enumerate(reverse.cuts):
        stored = first_store.get(Tensor(TensorRole.CUT, m))
        edge = reverse.cut_domain[cut] == EDGE
        free = [
            n
            for n, v in spare.items()
            if stored is not None and last_load[Tensor(TensorRole.KEPT, n)] <= stored and (domain.get(v) == EDGE) == edge
        ]
        chosen = _filling(free, {n: _size(spare[n]) for n in free}, _size(cut)) if _fits(cut, program) else None
        if chosen:
            starts = itertools.accumulate((_size(spare[n]) for n in chosen), initial=0)
            replaced[m] = dict(zip(chosen, starts, strict=False))
            spare = {n: v for n, v in spare.items() if n not in chosen}
    return replaced


def reading_replaced(program: LevelProgram, replaced: Replaced) -> LevelProgram:
    """Returns the backward that reads these kept values side by side, from `TensorRole.REPLACED` m."""
    place = {
        Tensor(TensorRole.KEPT, n): (Tensor(TensorRole.REPLACED, m), column // program.valid)
        for m, columns in replaced.items()
        for n, column in columns.items()
    }
    return dataclasses.replace(program, phases=tuple(_moved(phase, place) for phase in program.phases))


def _moved(phase: Phase, place: Mapping[Tensor, tuple[Tensor, int]]) -> Phase:
    def moved(op: object) -> object:
        if isinstance(op, Load) and isinstance(op.source, RowRead) and op.source.tensor in place:
            tensor, part = place[op.source.tensor]
            return dataclasses.replace(op, source=RowRead(tensor, part=part))
        return op

    return dataclasses.replace(phase, operations=tuple(map(moved, phase.operations)))


def _last_loads(program: LevelProgram) -> dict[Tensor, int]:
    """Maps each tensor that only early loads of own rows read to the last phase that loads it.

    They come before all stores of a phase. `kernels._program.check` asserts this of each program.
    """
    last_load: dict[Tensor, int] = {}
    read_elsewhere: set[Tensor] = set()
    for i, phase in enumerate(program.phases):
        read_elsewhere |= phase.operands()
        for op in phase.operations:
            source = getattr(op, "source", None)
            if isinstance(op, Load) and op.early and isinstance(source, RowRead) and source.index is None:
                last_load[source.tensor] = i
            elif isinstance(source, RowRead):
                read_elsewhere.add(source.tensor)
    return {tensor: i for tensor, i in last_load.items() if tensor not in read_elsewhere}


def _fits(v: Var, program: LevelProgram) -> bool:
    """Returns whether a value is float32 in whole unit vectors. A scalar has no columns."""
    return stored_dtype(aval(v)) == np.float32 and _size(v) > 1 and _size(v) % program.valid == 0


def _size(v: Var) -> int:
    return int(np.prod(aval(v).shape))


def _filling(values: list[int], sizes: Mapping[int, int], total: int) -> tuple[int, ...] | None:
    """Returns the fewest values whose sizes add up to `total`."""
    for count in range(1, min(len(values), _MOST) + 1):
        for subset in itertools.combinations(values[:_MOST], count):
            if sum(sizes[n] for n in subset) == total:
                return subset
    return None


def halved_states(part: Split, forward: LevelProgram, backward: LevelProgram) -> list[int]:
    """Returns the states of which lazy gradients read the copy of 16 bits that the forward writes.

    The launch of the forward keeps copies of 16 bits of what its products read (`kernels._program.halves`). If the backward
    reads a state for nothing but products x^T dY, which round x to as many bits anyway, the copy is all that must stay.
    """
    state_of = gathered_states(part)
    copied = {i for i in state_of.values() if Tensor(TensorRole.STATE, i, half=True) in forward.halves}
    later = lazy_reads(part.joint)
    read = {i for i in copied if any(v in later for v, j in state_of.items() if i == j)}
    exact = {i for i in read if Tensor(TensorRole.STATE, i) in backward.tensors()}
    exact |= {i for i, v in enumerate(part.forward.states) if is_var(v) and v in later}
    makers = {v: e for e in part.joint.program.eqns for v in e.outvars}

    def states(x: Atom, product: bool) -> None:
        """Adds to `exact` the states that `x` reads, except in sums that a product reads."""
        if not is_var(x):
            return
        if x in state_of:
            exact.update(() if product else {state_of[x]})
        elif x in makers and x not in part.joint.available:
            eqn = makers[x]
            for y in eqn.invars:
                states(y, product and eqn.primitive.name in _ROUNDED_TERM_BY_TERM)

    for use in part.reverse.uses:
        for x in use.operands.values():
            states(x, matrix_product(use.eqn, part.role.domain) is not None)
    return sorted(read - exact)
