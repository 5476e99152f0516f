"""Copies of 16 bits of the tensors that products of 16 bits read: a row then takes half the time to arrive from L2.

A product rounds what it reads in any case. In a sum of rows, each term is rounded instead of the sum.
"""

import dataclasses

import numpy as np

from cavs.kernels._program.names import Tensor
from cavs.kernels._program.operations import LevelProgram, Operation, Phase, Product, Store


def with_halves(program: LevelProgram, dtype: np.dtype) -> LevelProgram:
    """Adds a copy in `dtype` of each tensor that the program stores and products read; the products read the copy.

    A scratch tensor that only products read is stored in `dtype` alone. A copy that the program stores itself stays as it is.
    """
    half = {t: dataclasses.replace(t, half=True) for t in sorted(program.exchanged())}
    read = {tensor for phase in program.phases for tensor in phase.reads()}
    alone = half.keys() & program.scratch.keys() - read
    stored = program.stored()
    scratch = {t: s for t, s in program.scratch.items() if t not in alone}
    scratch |= {half[t]: dataclasses.replace(program.scratch[t], dtype=dtype) for t in half if t in program.scratch}
    return dataclasses.replace(
        program,
        phases=tuple(_converted(phase, half, alone, stored) for phase in program.phases),
        scratch=scratch,
        halves={twin: t for t, twin in half.items()},
    )


def _converted(phase: Phase, half: dict[Tensor, Tensor], alone: set[Tensor], stored: set[Tensor]) -> Phase:
    """A phase whose products read the tensors of 16 bits, and whose stores write those that are not `stored` yet."""
    rest = tuple(_product(op, half) if isinstance(op, Product) else op for op in phase.operations if not isinstance(op, Store))
    stores: list[Operation] = []
    for value in dict.fromkeys(store.value for store in phase.stores):
        places = [store.place for store in phase.stores if store.value is value]
        missing = [place for place in places if place.tensor in half and half[place.tensor] not in stored]
        twins = [dataclasses.replace(place, tensor=half[place.tensor]) for place in missing]
        stores += [Store(value, place) for place in (*(p for p in places if p.tensor not in alone), *twins)]
    return dataclasses.replace(phase, operations=(*rest, *stores))


def _product(product: Product, half: dict[Tensor, Tensor]) -> Product:
    operands = tuple(
        tuple(tuple(dataclasses.replace(row, tensor=half.get(row.tensor, row.tensor)) for row in source) for source in operand)
        for operand in product.operands
    )
    return dataclasses.replace(product, operands=operands)
