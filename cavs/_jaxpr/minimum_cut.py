"""The cheapest values of a forward computation to keep for its backward: a minimum cut, in which equations may run again.

Each value and each equation counts once, no matter how many read it, as in Echo's footprint accounting (Echo, section IV-B).
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from cavs._jaxpr.costs import bytes_of_var
from cavs._jaxpr.jaxprs import Eqn, Var, is_var

_UNIT = 4096  # capacities are integers, in 1/4096 byte
_ENDLESS = 1 << 62


def minimum_cut(
    eqns: Sequence[Eqn],
    needed: Iterable[Var],
    price: Callable[[int], float | None],
    free: Collection[Var] = (),
    stored: Sequence[Var] = (),
    size: Callable[[Var], float] = bytes_of_var,
) -> list[Var]:
    """Chooses which values to keep so that all `needed` values follow from them.

    Minimises the sizes of the kept values plus the prices of the equations that run again. A value is kept (its "in" on the
    source's side, its "out" on the sink's), or computed again (both on the sink's side: the equation is paid for, and its
    inputs must be available), or not there.

    Args:
        eqns: the forward computation, in order.
        needed: the values that the backward reads.
        price: from the index of an equation to its price in bytes; None: it must not run again.
        free: results of equations that the backward has in any case. Inputs are free unless they are `stored`.
        stored: inputs that cost their size if they are kept, such as the carry of a loop.
        size: the bytes of a value if it is kept.

    Returns:
        The values to keep. Of the minimum cuts, the one nearest the needed values, which computes least again.
    """
    flow = _Flow()
    source, sink = flow.node(), flow.node()
    inside: dict[Var, int] = {}
    outside: dict[Var, int] = {}
    needed, free = set(needed), set(free)

    def value(v: Var, node: int) -> None:
        inside[v], outside[v] = node, flow.node()
        flow.edge(node, outside[v], int(size(v) * _UNIT))
        if v in needed:
            flow.edge(outside[v], sink, _ENDLESS)

    for v in stored:
        value(v, flow.node())
        flow.edge(source, inside[v], _ENDLESS)
    passed = _passed_on(eqns, needed, free, size)
    runs = [flow.node() for _ in eqns]
    for i in reversed(range(len(eqns))):
        runs[i] = runs[passed.get(i, i)]
    for i, eqn in enumerate(eqns):
        run, cost = runs[i], price(i)
        flow.edge(source, run, _ENDLESS if cost is None else int(cost * _UNIT))
        for x in dict.fromkeys(x for x in eqn.invars if is_var(x) and x in outside):  # not in the order of a set, which varies
            flow.edge(outside[x], run, _ENDLESS)
        results = [v for v in eqn.outvars if v not in free and i not in passed]
        for v in results:
            value(v, run if len(results) == 1 else flow.node())
            if inside[v] != run:
                flow.edge(run, inside[v], _ENDLESS)
    after = flow.reaches(source, sink)
    return [v for v in outside if outside[v] in after and inside[v] not in after]


def _passed_on(
    eqns: Sequence[Eqn], needed: Collection[Var], free: Collection[Var], size: Callable[[Var], float]
) -> dict[int, int]:
    """Returns the equations whose result only one other equation reads, and that equation, if its result is no larger.

    The former is never worth keeping: the latter could be kept instead. So both equations run again, or none of them.
    """
    readers: dict[Var, list[int]] = {}
    for i, eqn in enumerate(eqns):
        for x in dict.fromkeys(x for x in eqn.invars if is_var(x)):
            readers.setdefault(x, []).append(i)
    only = [eqn.outvars[0] if len(eqn.outvars) == 1 and eqn.outvars[0] not in free else None for eqn in eqns]
    passed: dict[int, int] = {}
    for i, v in enumerate(only):
        if v is not None and v not in needed and len(by := readers.get(v, ())) == 1:
            if (result := only[by[0]]) is not None and size(result) <= size(v):
                passed[i] = by[0]
    return passed


class _Flow:
    """A maximum flow (Dinic, 1970): shortest paths in phases, each phase blocked by a depth-first search without recursion."""

    def __init__(self) -> None:
        self.edges: list[list[int]] = []  # of each node, indices into `to` and `room`; edge i and i ^ 1 are opposite
        self.to: list[int] = []
        self.room: list[int] = []

    def node(self) -> int:
        self.edges.append([])
        return len(self.edges) - 1

    def edge(self, a: int, b: int, capacity: int) -> None:
        for start, end, room in ((a, b, capacity), (b, a, 0)):
            self.edges[start].append(len(self.to))
            self.to.append(end)
            self.room.append(room)

    def reaches(self, source: int, sink: int) -> set[int]:
        """Runs the flow. Returns the nodes from which the sink can still be reached."""
        while (level := self._levels(source)) and level[sink] >= 0:
            self._block(source, sink, level)
        seen, queue = {sink}, deque([sink])
        while queue:
            for i in self.edges[queue.popleft()]:
                a = self.to[i]
                if self.room[i ^ 1] > 0 and a not in seen:
                    seen.add(a)
                    queue.append(a)
        return seen

    def _levels(self, source: int) -> list[int]:
        edges, to, room = self.edges, self.to, self.room  # local names: these loops take most of the time of a plan
        level = [-1] * len(edges)
        level[source] = 0
        queue = deque([source])
        while queue:
            a = queue.popleft()
            for i in edges[a]:
                if room[i] > 0 and level[to[i]] < 0:
                    level[to[i]] = level[a] + 1
                    queue.append(to[i])
        return level

    def _block(self, source: int, sink: int, level: list[int]) -> None:
        edges, to, room = self.edges, self.to, self.room
        at, path, node = [0] * len(edges), [], source
        while True:
            if node == sink:
                amount = min(room[i] for i in path)
                for i in path:
                    room[i] -= amount
                    room[i ^ 1] += amount
                first = next(k for k, i in enumerate(path) if not room[i])
                node = to[path[first] ^ 1]
                del path[first:]
                continue
            ways, deeper = edges[node], level[node] + 1
            while at[node] < len(ways):
                i = ways[at[node]]
                if room[i] > 0 and level[to[i]] == deeper:
                    break
                at[node] += 1
            else:
                if not path:
                    return
                i = path.pop()
                node = to[i ^ 1]
                at[node] += 1
                continue
            path.append(i)
            node = to[i]
