"""Comparisons of floats whose results would change if one operand were rounded differently."""

from collections.abc import Mapping, Sequence

import numpy as np

from cavs.kernels._program.jaxprs import Eqn, Var, aval, is_var

COMPARISONS = frozenset("eq ne lt le gt ge".split())


def computed_once(eqns: Sequence[Eqn]) -> set[Var]:
    """Returns the floats that are compared with values that follow from them, such as a maximum of theirs.

    They must be computed in one place. Compilers round the same arithmetic differently among other equations (they turn a
    product and a sum into one instruction, for instance). If the values were computed again for the comparison, the maximum
    might equal none of them, and its gradient would go nowhere.
    """
    producer = {v: e for e in eqns for v in e.outvars}
    compared: set[Var] = set()
    for e in eqns:
        read = [x for x in e.invars if is_var(x)]
        if e.primitive.name in COMPARISONS and len(read) == 2 and np.issubdtype(aval(read[0]).dtype, np.floating):
            a, b = read
            if _follows(a, b, producer) or _follows(b, a, producer):
                compared |= {a, b}
    return compared


def _follows(x: Var, other: Var, producer: Mapping[Var, Eqn]) -> bool:
    """Whether equations compute `x` from `other`."""
    todo, seen = [x], {x}
    while todo:
        e = producer.get(todo.pop())
        new = [y for y in e.invars if is_var(y) and y not in seen] if e else []
        seen.update(new)
        todo += new
    return other in seen
