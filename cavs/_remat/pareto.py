"""Plans between the fastest and the smallest: which products run again in the backward, within a budget.

Plans are ordered by an estimate of their memory; those that may be the answer are compiled.
"""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from cavs._jaxpr.costs import bytes_of_var
from cavs._jaxpr.derivative import type_of, vjp_at
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.jaxprs import Var
from cavs._jaxpr.names import Names
from cavs._memory.fit import MOST_COMPILED, compiled_step, seconds_of_step
from cavs._remat.blocks import fixed_values
from cavs._remat.graph import Kept, with_derivative
from cavs._remat.liveness import estimated_peak
from cavs._remat.loops import Planner, Price, Region, chunk_of
from cavs._remat.rows import in_blocks_of_rows
from cavs._run.manual_axes import devices

Product = tuple[str, int]  # name of a graph, place among its costly equations
_FREE = 1e-9  # bytes for each FLOP: negligible, but among equal cuts the one that recomputes less wins
_PRICES = (0.5, 1, 2, 4)  # bytes for each FLOP, in blocks: times the mean of all products
_LONG = 8  # steps of a loop that may run in chunks
_POINTS = 12  # plans that are traced
_SMALLEST = 2  # plans of which the smallest is found by compiling


@dataclass(frozen=True, eq=False)
class Point:
    """One plan.

    Attributes:
        kept: the values that the function itself keeps. The memory depends on them alone: its loops keep what they keep.
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

    @property
    def flops(self) -> float:
        """FLOPs of products that run again."""
        return sum(region.times * region.kept.flops() for region in self.regions.values())

    def names(self) -> set[str]:
        """Returns the names of values that can be kept."""
        return {name for region in self.regions.values() for name in region.kept.graph.named}

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as JSON can hold it."""
        return {"regions": {name: region.kept.as_json() for name, region in self.regions.items()}, "chunks": self.chunks}

    def again(self) -> list[Product]:
        return [(name, k) for name, region in self.regions.items() for k in region.kept.repeated]


@dataclass(eq=False)
class ParetoSearch:
    """The plans of one function (a closed jaxpr), differentiated with respect to the inputs `diff`.

    Attributes:
        names: what the user asks for by name.
        options: of the compiler.
        offload: whether values may be kept in the memory of the host, where that is faster.
        plans: all that were traced, by what they keep.
        peaks: their estimated peaks.
        compiled: the bytes of temporary memory of those that were compiled; by `None` that of `jax.grad`.
        known: see `Planner`.
        steps: the compiled plans, if they may run.
    """

    closed: Any
    diff: Sequence[int]
    names: Names = ()
    options: dict[str, Any] = field(default_factory=dict)
    offload: bool = False
    plans: dict[str, Point] = field(default_factory=dict)
    peaks: dict[Kept, int] = field(default_factory=dict)
    compiled: dict[Kept | None, int] = field(default_factory=dict)
    known: list[Any] = field(default_factory=list)
    steps: dict[Kept, Any] = field(default_factory=dict)

    def point(self, price: Price | None, chunks: dict[str, int] | None = None, fixed: frozenset[Var] = frozenset()) -> Point:
        """Returns the plan at a price for running products again."""
        return self._planned(Planner(price, self.known, chunks or {}, names=self.names, fixed=fixed))

    def on_host(self, share: float) -> Point:
        """Returns the plan that runs no product again, and keeps a share of its bytes in the memory of the host."""
        return self._planned(Planner(lambda *_: None, self.known, names=self.names, host=share))

    def saved(self, saved: dict[str, Any]) -> Point:
        """Returns a saved plan. In `plain` alone, masks are bytes.

        Raises:
            ValueError: it is that of another function, or of other shapes.
        """
        price = (lambda *_: None) if saved["regions"][""]["in_bits"] else None
        point = self._planned(Planner(price, self.known, dict(saved["chunks"]), names=self.names, saved=saved))
        if json.dumps(point.as_json()) != json.dumps(saved):
            raise ValueError(
                "recompute: plan: got the plan of another function, or of arguments of other shapes; expected one that "
                "recompute(fn).plan(...).save(path) wrote for these. Write recompute(fn) to plan again."
            )
        return point

    @functools.cached_property
    def in_blocks(self) -> Any:
        """The function, with the loss of its largest product by blocks of rows, if it has such a loss."""
        return self.closed if devices()[0] else in_blocks_of_rows(self.closed)

    def _planned(self, planner: Planner) -> Point:
        closed = self.closed if planner.price is None else self.in_blocks
        point = Point(planner.keep(closed, self.diff, ""), planner.regions, planner.chunks, frozenset(planner.fixed))
        point = self.plans.setdefault(json.dumps(point.as_json()), point)  # of several traces, the first
        if point.kept not in self.peaks:
            self.peaks[point.kept] = estimated_peak(point.kept)
        return point

    def measure(self, point: Point | None) -> int:
        """Returns the bytes of temporary memory of the function and its gradient, as XLA allocates them. Compiles a plan once.

        Inside a `shard_map`, where a part of a program cannot be compiled alone, they are estimated.

        Args:
            point: the plan; `None` for the function as it is, with `jax.grad`.
        """
        kept = None if point is None else point.kept
        if devices()[0]:
            return self.peaks[kept or self.plain().kept]
        if kept not in self.compiled:
            planned = jex.jaxpr_as_fun(self.closed) if kept is None else with_derivative(self.closed, lambda _: kept)

            def both(*args: Any) -> Any:
                outs, pull_back = vjp_at(planned, args, self.diff)
                return outs, pull_back([jnp.ones_like(x) for x in outs if is_float(x)])

            shapes = tuple(map(type_of, self.closed.jaxpr.invars))
            step, self.compiled[kept] = compiled_step(jax.jit(both), shapes, self.options)
            if self.offload and kept is not None:
                self.steps[kept] = step
        return self.compiled[kept]

    def _faster_on_host(self, best: Point | None, budget: int) -> Point | None:
        """Returns a plan that fits the budget and ran faster than `best`, with values on the host, or `best`."""
        kept = self.cheap().bytes
        share = (self.measure(self.cheap()) - budget) / max(kept, 1)
        for more in (1.1, 1.5):
            point = self.on_host(min(more * share, 1.0))
            if self.measure(point) <= budget:
                shapes = [type_of(v) for v in self.closed.jaxpr.invars]
                seconds = [seconds_of_step(self.steps[p.kept], shapes) for p in (point, best) if p is not None]
                return point if seconds[0] == min(seconds) else best
        return best

    def plain(self) -> Point:
        """Returns the plan of `jax.grad`."""
        return self.point(None)

    def cheap(self) -> Point:
        """No product runs again."""
        return self.point(lambda *_: None)

    def points(self) -> list[Point]:
        """Returns plans, the fastest first, each with a smaller peak than the one before.

        At a price per FLOP, a minimum cut gives the best plan exactly, and every corner of the lower hull of (FLOPs, bytes)
        is the best plan at some price: the slope between two known corners finds the next one between them.
        """
        return self._undominated(self._found)

    @functools.cached_property
    def _found(self) -> list[Point]:
        """Plans without those that `_within` tries for one budget: the smallest one is the same for all budgets."""
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
                todo += [(a, c), (c, b)] if self.peaks[c.kept] <= self.peaks[found[1].kept] else []
        if chunks := _chunks(found[1]):
            inside = {chunk_of(name) for name in chunks}
            found.append(self.point(lambda name, k, flops: flops * _FREE if name in inside else None, chunks))
        if len(found[1].regions) == 1:  # a function without loops
            mean = (found[1].bytes - found[2].bytes) / max(found[2].flops, 1)
            for price in (_FREE, *(mean * x for x in _PRICES)):
                by_price = lambda name, k, flops, price=price: flops * price  # noqa: E731
                found += [self.point(by_price, fixed=f) for f in fixed_values(found[1].kept.graph)]
        return list({p.kept: p for p in found}.values())

    def _undominated(self, found: list[Point]) -> list[Point]:
        best: list[Point] = []
        for point in sorted(found, key=lambda p: (p.flops, self.peaks[p.kept])):
            if not best or self.peaks[point.kept] < self.peaks[best[-1].kept]:
                if best and point.flops == best[-1].flops:
                    best.pop()
                best.append(point)
        return best

    def fastest(self, budget: int) -> Point | None:
        """Returns the plan of the fewest FLOPs that was compiled and fits, or `None`. Compiles at most `MOST_COMPILED`.

        The estimates are corrected by the plan that was compiled last.
        """
        best, point = None, self.cheap()
        if self.measure(point) <= budget:
            return point
        points = self.points()
        for _ in range(MOST_COMPILED - 1 - _SMALLEST):
            ratio = self.measure(point) / max(self.peaks[point.kept], 1)
            point = self._within(points, budget / ratio)
            if point is None or point.kept in self.compiled:
                break
            if self.measure(point) <= budget and (best is None or point.flops < best.flops):
                best = point
        if best is None and self.measure(least := self.smallest()) <= budget:
            best = least
        return self._faster_on_host(best, budget) if self.offload else best

    def smallest(self) -> Point:
        """Returns the smallest of the plans that are estimated to be the smallest. Compiles at most `_SMALLEST`."""
        likely = sorted(self._found, key=lambda p: (self.peaks[p.kept], p.flops))
        return min(likely[:_SMALLEST], key=lambda p: (self.measure(p), p.flops))

    def _within(self, points: Sequence[Point], budget: float) -> Point | None:
        """Returns the plan with the fewest FLOPs that is estimated to need at most `budget`, or `None`.

        Between two neighbours of `points`, the products that only the smaller one runs again are added one by one, those of
        the first layers first: equal layers are then split into some that run again and others that do not.
        """
        first = next((i for i, p in enumerate(points) if self.peaks[p.kept] <= budget), None)
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
            if self.peaks[point.kept] <= budget:
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
