"""Plans between the fastest and the smallest: which products run again in the backward, under a budget."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cavs._function.costs import bytes_of_var
from cavs._function.jaxprs import Var
from cavs._function.names import Names
from cavs._memory.blocks import fixed_values
from cavs._memory.footprint import peak
from cavs._memory.graph import Kept
from cavs._memory.loops import Planner, Price, Region, chunk_of

Product = tuple[str, int]  # name of a graph, place among its costly equations
_FREE = 1e-9  # bytes for each FLOP: negligible, but among equal cuts the one that recomputes less wins
_LONG = 8  # steps of a loop that may run in chunks
_POINTS = 12  # plans that `frontier` tries


@dataclass(frozen=True, eq=False)
class Point:
    """One plan.

    Attributes:
        kept: the values that the function itself keeps.
        regions: also those that steps of its loops keep.
        chunks: see `Planner`.
        fixed: see `Planner`.
    """

    kept: Kept
    regions: dict[str, Region]
    chunks: dict[str, int]
    fixed: frozenset[Var] = frozenset()

    @property
    def bytes(self) -> int:
        """Bytes that live from the forward to the backward."""
        return self.kept.bytes()

    def peak(self) -> int:
        """Predicted bytes of temporary memory."""
        return peak(self.kept)

    @property
    def flops(self) -> float:
        """FLOPs of products that run again."""
        return sum(region.times * region.kept.flops() for region in self.regions.values())

    def names(self) -> set[str]:
        """The names of values that can be kept."""
        return {name for region in self.regions.values() for name in region.kept.graph.named}

    def again(self) -> list[Product]:
        return [(name, k) for name, region in self.regions.items() for k in region.kept.repeated]


@dataclass(eq=False)
class ParetoSearch:
    """The plans of one function (a closed jaxpr), differentiated with respect to the inputs `diff`."""

    closed: Any
    diff: Sequence[int]
    line: str | None = None
    traced: dict[Any, Any] = field(default_factory=dict)
    bodies: list[Any] = field(default_factory=list)
    peaks: dict[Point, int] = field(default_factory=dict)
    known_peaks: dict[Any, int] = field(default_factory=dict)  # by the graph and what it keeps
    names: Names = ()

    def point(self, price: Price | None, chunks: dict[str, int] | None = None, fixed: frozenset[Var] = frozenset()) -> Point:
        planner = Planner(price, self.traced, self.bodies, chunks or {}, names=self.names, fixed=fixed)
        kept = planner.keep(self.closed, self.diff, "", self.line)
        point = Point(kept, planner.regions, planner.chunks, fixed)
        same = kept.graph, tuple(kept.keep)
        if same not in self.known_peaks:
            self.known_peaks[same] = point.peak()
        self.peaks[point] = self.known_peaks[same]
        return point

    def saved(self, saved: dict[str, Any]) -> Point:
        """The values that a saved plan keeps. The plan `plain` has one graph."""
        price = None if len(saved["regions"]) == 1 else lambda *_: None
        planner = Planner(price, chunks=dict(saved["chunks"]), names=self.names, saved=saved)
        kept = planner.keep(self.closed, self.diff, "", self.line)
        point = Point(kept, planner.regions, planner.chunks)
        self.peaks[point] = point.peak()
        return point

    def plain(self) -> Point:
        """The plan of `jax.grad`."""
        return self.point(None)

    def cheap(self) -> Point:
        """No product runs again."""
        return self.point(lambda *_: None)

    def points(self) -> list[Point]:
        """Returns plans, the fastest first, each with a smaller peak than the one before.

        At a price per FLOP, a minimum cut gives the best plan exactly, and every corner of the lower hull of (FLOPs, bytes)
        is the best plan at some price: the slope between two known corners finds the next one between them.
        """
        found = [self.plain(), self.cheap(), self.point(lambda name, k, flops: 0.0)]
        todo = [(found[1], found[2])]
        while todo and len(found) < _POINTS:
            a, b = todo.pop(0)
            if b.flops <= a.flops or b.bytes >= a.bytes:
                continue
            slope = (a.bytes - b.bytes) / (b.flops - a.flops)
            c = self.point(lambda name, k, flops, slope=slope: flops * slope)
            if c.bytes + slope * c.flops < (a.bytes + slope * a.flops) * (1 - 1e-9):
                found.append(c)
                # If less is kept and more memory needed, what runs again fills it: blocks are better then, see below.
                todo += [(a, c), (c, b)] if self.peaks[c] <= self.peaks[found[1]] else []
        chunks = _chunks(found[1])
        if chunks:
            inside = {chunk_of(name) for name in chunks}
            for again in (inside, inside | {""}):  # the steps of a chunk, and the function itself, too
                found.append(self.point(_allowing_in(again), chunks))
        if len(found[1].regions) == 1:  # a function without loops
            found += [self.point(lambda name, k, flops: flops * _FREE, fixed=f) for f in fixed_values(found[1].kept.graph)]
        return self._undominated(found)

    def _undominated(self, found: list[Point]) -> list[Point]:
        best: list[Point] = []
        for point in sorted(found, key=lambda p: (p.flops, self.peaks[p])):
            if not best or self.peaks[point] < self.peaks[best[-1]]:
                if best and point.flops == best[-1].flops:
                    best.pop()
                best.append(point)
        return best

    def within(self, points: Sequence[Point], budget: int) -> Point | None:
        """Returns the plan with the fewest FLOPs whose predicted peak is at most `budget`, or `None`.

        Between two neighbours of `points`, the products that only the smaller one runs again are added one by one, those of
        the first layers first: equal layers are then split into some that run again and others that do not.
        """
        first = next((i for i, p in enumerate(points) if self.peaks[p] <= budget), None)
        if not first:
            return None if first is None else points[0]
        before, fits, chunks = points[first - 1].again(), points[first], points[first].chunks
        if chunks != points[first - 1].chunks:
            before = []  # loops have other names now
        more = [x for x in fits.again() if x not in set(before)]
        low, high = 0, len(more)
        while high - low > 1:
            middle = (low + high) // 2
            point = self.point(_allowing({*before, *more[:middle]}), chunks, fits.fixed)
            if self.peaks[point] <= budget:
                high, fits = middle, min(point, fits, key=lambda p: p.flops)
            else:
                low = middle
        return fits


def _chunks(cheap: Point) -> dict[str, int]:
    """Chooses chunks for the outermost loops: states before each chunk, and one chunk's values, are least together."""
    found = {}
    for name, region in cheap.regions.items():
        state = sum(map(bytes_of_var, region.kept.graph.stored))
        if name.count("/") == 1 and region.times >= _LONG and state:
            best = math.sqrt(region.times * state / max(region.kept.bytes(), 1))
            near = [n for n in range(2, region.times // 2 + 1) if best / 1.6 <= n <= best * 1.6 and not region.times % n]
            found[name] = min(near, key=lambda n: abs(n - best)) if near else max(2, min(round(best), region.times // 2))
    return found


def _allowing(products: set[Product]) -> Price:
    return lambda name, k, flops: flops * _FREE if (name, k) in products else None


def _allowing_in(names: set[str]) -> Price:
    return lambda name, k, flops: flops * _FREE if name in names else None
