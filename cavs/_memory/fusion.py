"""Which values of a list of operations have buffers, which buffers they are computed from, and what may overwrite them.

XLA fuses cheap equations with what reads them, so most values never exist in memory. A value has a buffer if a product, a loop,
a kernel, a scatter or a sort makes or reads it. A buffer is read by an operation directly or through fused equations.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax

from cavs._function.jaxprs import is_var
from cavs._memory.operations import Operation

Sources = frozenset[Any]


def stored_values(operations: Sequence[Operation], made: dict[Any, Operation]) -> set[Any]:
    """The values among `made` that have a buffer."""
    readers: Counter[Any] = Counter()
    for o in operations:
        readers.update(set(o.reads))
    stored = read_whole(operations, made)
    for o in operations:
        if o.facts.alone or o.facts.twice and readers[o.outvars[0]] > 1:
            stored.update(o.outvars)
    return stored & made.keys()


def read_whole(operations: Sequence[Operation], made: dict[Any, Operation]) -> set[Any]:
    """The values that an operation reads from a buffer, so it is not fused with what computes them."""
    return {behind_views(o.invars[i], made, o.facts.views) for o in operations for i in o.facts.stored if is_var(o.invars[i])}


def behind_views(x: Any, made: dict[Any, Operation], views: Collection[str]) -> Any:
    while x in made and made[x].facts.name in views and made[x].reads:
        x = made[x].reads[0]
    return x


def uses(operations: Sequence[Operation], outs: set[Any], stored: set[Any]) -> tuple[dict[Any, Sources], dict[int, list[Any]]]:
    """For each value the buffers that it is computed from, and the buffers that each operation is the last to read."""
    sources: dict[Any, Sources] = {}
    last: dict[Any, int] = {}
    joined: dict[Any, Sources] = {}
    for i, o in enumerate(operations):
        for x in o.reads:
            if x not in sources:
                sources[x] = frozenset([x])
        read = _union([sources[x] for x in o.reads])
        if jax.default_backend() != "cpu":  # an update joins arrays again, rather than reading the result
            if o.facts.is_update:
                read = read.union(*(joined[x] for x in read if x in joined))
            elif o.facts.name == "concatenate":
                joined[o.outvars[0]] = read
        if o.facts.is_barrier:
            sources.update({v: sources[x] if is_var(x) else frozenset() for x, v in zip(o.invars, o.outvars, strict=True)})
            last.update(dict.fromkeys(read, i))
        elif any(v in stored for v in o.outvars):
            sources.update({v: frozenset([v]) for v in o.outvars})
            last.update(dict.fromkeys(read, i))
            last.update(dict.fromkeys(o.outvars, i))
        else:
            sources.update(dict.fromkeys(o.outvars, read))
    last.update(dict.fromkeys((s for x in outs for s in sources.get(x, ())), len(operations)))
    ends: dict[int, list[Any]] = {}
    for x, i in last.items():
        ends.setdefault(i, []).append(x)
    return sources, ends


def _union(sets: Sequence[Sources]) -> Sources:
    return sets[0] if len(sets) == 1 else frozenset().union(*sets)


def in_place(operations: Sequence[Operation], stored: set[Any]) -> dict[Any, Sources]:
    """For each value the buffers that it reads only at its own place: a fusion that makes it can overwrite them."""
    found: dict[Any, Sources] = {}
    for o in operations:
        for x in o.reads:
            if x not in found:
                found[x] = frozenset([x])
        alike = o.reads if o.facts.is_view else [x for i in o.facts.alike if is_var(x := o.invars[i])]
        read = _union([found[x] for x in alike]) if alike else frozenset()
        found.update({v: frozenset([v]) if v in stored else read for v in o.outvars})
    return found


def overwritable(o: Operation, sources: dict[Any, Sources], dying: dict[Any, Operation | None]) -> Iterator[Any]:
    """The buffers among `dying` that an operation, the last to read them, may overwrite with its results.

    On a GPU a fusion overwrites no result of a product or of a loop: XLA shares the buffer of an operand only if it is all that
    another operation returns, and these return tuples, a product with the workspace of its library.
    """
    tuples = not o.facts.alone and jax.default_backend() != "cpu"
    places = (x for i in o.facts.overwritable if is_var(x := o.invars[i]))
    for x in (x for place in places for x in dying if x in sources[place]):
        maker = dying[x]
        if not (tuples and maker is not None and maker.facts.costly):
            yield x
