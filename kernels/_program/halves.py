"""Where products are of numbers of 16 bits, what they read is stored so, too: a row comes from L2 in half the time.

A product would round what it reads in any case; of a sum of rows each term is rounded instead.
"""

import dataclasses
from typing import Any

from cavs.kernels._program.fit import ACROSS, REDUCTIONS, is_product
from cavs.kernels._program.specs import Level, Place, Rows, is_var, tensors_of


def add_halves(level: Level, dtype: Any) -> None:
    """Gives a level its `halves`: of each tensor that it stores and that products read, one of `dtype` for the products.

    Where nothing else reads a scratch tensor, it is stored in `dtype` alone.
    """
    half = {tensor: tensor + ".half" for tensor in sorted(level.exchanged())}
    alone = half.keys() & level.scratch.keys() - _read_as_values(level)
    level.scratch |= {half[name]: (*level.scratch[name][:2], dtype) for name in half if name in level.scratch}
    for name in alone:
        del level.scratch[name]
    level.halves |= {twin: name for name, twin in half.items()}
    for phase in level.phases:
        for p in phase.products:
            p.operands = [[tuple(_in_half(r, half) for r in source) for source in operand] for operand in p.operands]
        for places in phase.stores.values():
            twins = [Place(half[place.tensor], place.base) for place in places if place.tensor in half]
            places[:] = [place for place in places if place.tensor not in alone] + twins


def _in_half(r: Rows, half: dict[str, str]) -> Rows:
    return dataclasses.replace(r, tensor=half.get(r.tensor, r.tensor))


def _read_as_values(level: Level) -> set[str]:
    """Tensors that a phase reads other than as the operand of a product."""
    found: set[str] = set()
    for phase in level.phases:
        values: set[Any] = {v for v in phase.stores if v not in phase.eqns}
        for e in phase.eqns.values():
            across = e.primitive.name in ACROSS or e.primitive.name in REDUCTIONS
            if not is_product(e, level.level):
                values |= {x for x in e.invars if is_var(x) and (across or x not in phase.eqns)}
        for x in values & (phase.inputs.keys() | level.sources.keys()):
            found |= tensors_of(phase.inputs.get(x) or level.sources[x])
    return found
