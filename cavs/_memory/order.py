"""The order in which XLA for GPUs runs operations.

XLA's memory scheduler visits the operands of an operation before it, one after the other, from the results of a program on.
It tries two other orders as well, but of ours this one needs the least memory nearly always.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cavs._function.jaxprs import is_var
from cavs._memory.fusion import uses
from cavs._memory.operations import Operation


def ordered(operations: Sequence[Operation], outs: Sequence[Any], stored: set[Any]) -> list[Operation]:
    """Returns operations in the order of XLA.

    Args:
        operations: the operations in an order in which they can run.
        outs: what is read after the last of them.
        stored: the values that have buffers. What makes no such value is fused with what reads it.
    """
    made = {v: i for i, o in enumerate(operations) for v in o.outvars}
    direct = {i: [made[x] for x in o.reads if x in made] for i, o in enumerate(operations)}
    before, last = _kernels(operations, outs, stored)
    order = _visited(before, [*last, *before])
    return [operations[i] for i in _visited(direct, [*order, *direct])]


def _visited(before: Mapping[int, Sequence[int]], last: Sequence[int]) -> list[int]:
    """The numbers in `last` in their order, each after those before it."""
    found: dict[int, None] = {}
    todo = list(reversed(last))
    opened: set[int] = set()
    while todo:
        i = todo[-1]
        if i in found or i in opened:
            found[todo.pop()] = None
        else:
            opened.add(i)
            todo += [j for j in reversed(before[i]) if j not in found]
    return list(found)


def _kernels(operations: Sequence[Operation], outs: Sequence[Any], stored: set[Any]) -> tuple[dict[int, list[int]], list[int]]:
    """The numbers of operations that are not fused, with those that must run before them; and of those that make `outs`."""
    sources, _ = uses(operations, set(outs), stored)
    found: dict[int, list[int]] = {}
    behind: dict[Any, dict[int, None]] = {}  # for each value, those that must have run before it is there
    readers: dict[Any, dict[int, None]] = {}
    effect: dict[int, None] = {}
    for i, o in enumerate(operations):
        before = {j: None for x in o.reads for j in behind.get(x, {})}
        if not o.facts.is_barrier and not o.eqn.effects and not any(v in stored for v in o.outvars):
            behind.update(dict.fromkeys(o.outvars, before))
            continue
        if o.facts.alone:  # what it overwrites must have been read
            over = (x for k in o.facts.overwritable if is_var(x := o.invars[k]))
            before |= {j: None for x in over for s in sources[x] for j in readers.get(s, {})}
        if o.eqn.effects:
            before |= effect
            effect = {i: None}
        for s in frozenset().union(*(sources[x] for x in o.reads)):
            readers.setdefault(s, {})[i] = None
        found[i] = list(before)
        behind.update(dict.fromkeys(o.outvars, {i: None}))
    return found, [j for x in outs for j in behind.get(x, {})]
