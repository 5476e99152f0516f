"""The order in which a kernel runs the operations of a phase."""

from collections.abc import Iterator

from cavs.kernels._program.jaxprs import Var, is_var
from cavs.kernels._program.operations import Equation, Operation, Phase, Store


def in_order(phase: Phase, stores: tuple[Store, ...]) -> Iterator[Operation]:
    """Yields the operations that each store needs, and the store, for one store after another.

    The products of a phase run before; a `Product` is yielded where its result is first needed.
    """
    producers: dict[Var, Operation] = {}
    for op in phase.operations:
        if isinstance(op, Equation):
            producers |= dict.fromkeys(op.eqn.outvars, op)
        elif not isinstance(op, Store):
            producers[op.value] = op
    done: set[Operation] = set()

    def needed(value: Var) -> Iterator[Operation]:
        op = producers[value]
        if op in done:
            return
        if isinstance(op, Equation):
            for x in op.eqn.invars:
                if is_var(x):
                    yield from needed(x)
        done.add(op)
        yield op

    for store in stores:
        yield from needed(store.value)
        yield store
