"""Plans between the fastest and the smallest: which products run again in the backward, within a budget.

Plans are ordered by an estimate of their memory; those that may be the answer are compiled.
"""

import contextlib
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
from cavs._jaxpr.equations import depends, is_float
from cavs._jaxpr.jaxprs import Var, is_var
from cavs._jaxpr.names import Names
from cavs._memory.fit import MOST_COMPILED, compiled_step, seconds_of_step
from cavs._remat.forms import kept_bytes
from cavs._remat.graph import Graph, with_derivative
from cavs._remat.loops import Known, Point
from cavs._remat.rows import in_blocks_of_rows
from cavs._run.manual_axes import devices

# Bytes for each FLOP that runs again, times the mean of all products: for a whole function, and in blocks or chunks.
_PRICES, _OF_PARTS = (4, 3.4, 2.8, 2, 1.7, 1.4, 1, 0.7, 0.5, 0), (4, 2, 1, 0.5, 0)
_LOW = 1 / 64  # in place of zero, for a search on a logarithmic scale
_STEPS = 6  # of the search for a price between two of these
_BLOCKS = (2, 4, 8, 16, 32)  # about these numbers of blocks are tried
_LONG = 8  # steps of a loop that may run in chunks
_SMALLEST = 2  # plans of which the smallest is found by compiling
_ON_HOST, _SHARES = 1.5, 2  # times the bytes that a budget misses; how many shares on the host are compiled


@dataclass(eq=False)
class ParetoSearch:
    """The plans of one function (a closed jaxpr), differentiated with respect to the inputs `diff`."""

    closed: Any
    diff: Sequence[int]
    names: Names = ()  # what the user asks for by name
    options: dict[str, Any] = field(default_factory=dict)  # of the compiler
    offload: bool = False  # whether values may be kept in the memory of the host, where that is faster
    plans: dict[str, Point] = field(default_factory=dict)  # all that were traced, by what they keep
    compiled: dict[Point | None, int] = field(default_factory=dict)  # bytes of temporary memory; by `None` that of `jax.grad`
    steps: dict[Point, Any] = field(default_factory=dict)  # the compiled plans, if they may run
    known: list[Known] = field(default_factory=list)  # see `Point`

    def point(
        self, price: float | None, chunks: dict[str, int] | None = None, fixed: frozenset[Var] = frozenset(), **how: Any
    ) -> Point:
        """Returns a plan. Arguments are attributes of `Point`."""
        point = Point(price, self.known, self.names, chunks or {}, fixed, **how)
        point.keep(self.closed if price is None else self.in_blocks, self.diff, "")
        return self.plans.setdefault(json.dumps(point.as_json()), point)

    def saved(self, saved: dict[str, Any]) -> Point:
        """Returns a saved plan. In `plain` alone, masks are bytes. Raises a `ValueError` for that of another function."""
        point = None
        with contextlib.suppress(LookupError):  # it keeps values that this function does not have
            point = self.point(math.inf if saved["regions"][""]["in_bits"] else None, chunks=saved["chunks"], saved=saved)
        if point is None or json.dumps(point.as_json()) != json.dumps(saved):
            raise ValueError(
                "recompute: plan: got the plan of another function, or of arguments of other shapes; expected one that "
                "recompute(fn).plan(...).save(path) wrote for these. Write recompute(fn) to plan again."
            )
        return point

    @functools.cached_property
    def in_blocks(self) -> Any:
        """The function, with the loss of its largest product by blocks of rows, if it has such a loss."""
        return self.closed if devices()[0] else in_blocks_of_rows(self.closed)

    def measure(self, point: Point | None) -> int:
        """Returns the bytes of temporary memory of the function and its gradient, as XLA allocates them. Compiles a plan once.

        Inside a `shard_map`, where a part of a program cannot be compiled alone, they are estimated. `point`: the plan; `None`
        for the function as it is, with `jax.grad`.
        """
        if devices()[0]:
            return (point or self.plain()).peak
        if point not in self.compiled:
            plain = jex.jaxpr_as_fun(self.closed)
            planned = plain if point is None else with_derivative(self.closed, lambda _: point.kept)

            def both(*args: Any) -> Any:
                outs, pull_back = vjp_at(planned, args, self.diff)
                return outs, pull_back([jnp.ones_like(x) for x in outs if is_float(x)])

            shapes = tuple(map(type_of, self.closed.jaxpr.invars))
            step, self.compiled[point] = compiled_step(jax.jit(both), shapes, self.options)
            if self.offload and point is not None:
                self.steps[point] = step
        return self.compiled[point]

    def plain(self) -> Point:
        """Returns the plan of `jax.grad`."""
        return self.point(None)

    def cheap(self) -> Point:
        """Returns the plan that keeps least among those that run no product again."""
        return self.point(math.inf)

    @functools.cached_property
    def _mean(self) -> float:
        """The bytes that products save for each FLOP."""
        cheap, least = self.cheap(), Point(0, self.known, self.names)
        least.keep(self.in_blocks, self.diff, "")
        return max(cheap.bytes - least.bytes, 0) / max(least.flops, 1)

    @functools.cached_property
    def _found(self) -> list[Point]:
        """Plans without those that `_within` tries for one budget: the smallest one is the same for all budgets.

        At a price per FLOP, a minimum cut gives the best plan exactly. But if little is kept, what runs again may fill the
        memory: loops in chunks, and functions without loops in blocks, need less then.
        """
        cheap = self.cheap()
        ways: list[dict[str, Any]] = [{}]
        if len(cheap.regions) == 1:
            ways += [{"fixed": values} for values in fixed_values(cheap.kept.graph)]
        elif chunks := _chunks(cheap):
            ways += [{"chunks": chunks}]
        points = [self.point(x * self._mean, **way) for way in ways for x in (_OF_PARTS if way else _PRICES)]
        return list(dict.fromkeys([self.plain(), cheap, *points]))

    def points(self) -> list[Point]:
        """Returns plans, the fastest first, each with a smaller estimated peak than the one before."""
        best: list[Point] = []
        for point in sorted(self._found, key=lambda p: (p.flops, p.peak)):
            if not best or point.peak < best[-1].peak:
                best.append(point)
        return best

    def fastest(self, budget: int) -> Point | None:
        """Returns the plan of the fewest FLOPs that was compiled and fits, or `None`. Compiles at most `MOST_COMPILED`.

        The estimates are corrected by the plan that was compiled last.
        """
        best, point = None, self.cheap()
        if self.measure(point) <= budget:
            return point
        for _ in range(MOST_COMPILED - 1 - _SMALLEST):
            point = self._within(budget * max(point.peak, 1) / self.measure(point))
            if point is None or point in self.compiled:
                break
            if self.measure(point) <= budget and (best is None or point.flops < best.flops):
                best = point
        if best is None and self.measure(least := self.smallest()) <= budget:
            best = least
        return self._faster_on_host(best, budget) if self.offload else best

    def smallest(self) -> Point:
        """Returns the smallest of `cheap` and a few that are estimated to be the smallest, which differ in blocks or chunks."""
        likely: dict[Any, Point] = {}
        for point in sorted(self._found, key=lambda p: (p.peak, p.flops)):
            likely.setdefault((bool(point.chunks), point.fixed), point)
        return min([self.cheap(), *likely.values()][: _SMALLEST + 1], key=lambda p: (self.measure(p), p.flops))

    def _within(self, budget: float) -> Point | None:
        """Returns the plan with the fewest FLOPs that is estimated to need at most `budget`, or `None`.

        At prices between two of `_PRICES`, some of the products run again that do at the lower one. Equal layers are then split
        into some that run again and others that do not: they differ in prices a little.
        """
        best = next((point for point in self.points() if point.peak <= budget), None)
        if best is None or best.price in (None, math.inf):
            return best
        low, high = (best.price, 2 * best.price) if best.price else (_LOW * self._mean, _PRICES[-2] * self._mean)
        for _ in range(_STEPS):
            middle = math.sqrt(low * high)
            point = self.point(middle, chunks=best.chunks, fixed=best.fixed)
            if point.peak <= budget:
                low, best = middle, min(point, best, key=lambda p: p.flops)
            else:
                high = middle
        return best

    def _faster_on_host(self, best: Point | None, budget: int) -> Point | None:
        """Returns a plan with values on the host, if one fits the budget and ran faster than `best`; else `best`."""
        point, share = self.cheap(), 0.0
        for _ in range(_SHARES):
            share += _ON_HOST * (self.measure(point) - budget) / max(self.cheap().bytes, 1)
            point = self.point(math.inf, host=min(share, 1.0))
            if self.measure(point) <= budget:
                break
        else:
            return best
        shapes = [type_of(v) for v in self.closed.jaxpr.invars]
        seconds = [seconds_of_step(self.steps[p], shapes) for p in (point, best) if p is not None]
        return point if seconds[0] == min(seconds) else best


def _chunks(cheap: Point) -> dict[str, int]:
    """Chooses chunks for the outermost loops: states before each chunk, and one chunk's values, are least together."""
    chunks = {}
    for name, region in cheap.regions.items():
        state = sum(map(bytes_of_var, region.kept.graph.stored))
        if name.count("/") == 1 and region.times >= _LONG and state:
            best = math.sqrt(region.times * state / max(region.kept.bytes(), 1))
            near = [n for n in range(2, region.times // 2 + 1) if best / 1.6 <= n <= best * 1.6 and not region.times % n]
            chunks[name] = min(near, key=lambda n: abs(n - best)) if near else max(2, min(round(best), region.times // 2))
    return chunks


def fixed_values(graph: Graph) -> list[frozenset[Var]]:
    """Returns sets of values to keep, each of which cuts the function into more blocks than the one before.

    By hand, one would put `jax.checkpoint` around such blocks. With N blocks, the backward needs the values between the blocks,
    and those inside of one block at a time. The fewer values cross a cut, the better.
    """
    crossing, needs = _crossing(graph), set(graph.needs)
    # For each equation, the bytes of what the backward reads of its results.
    sizes = [sum(kept_bytes(v) for v in e.outvars if v in needs) for e in graph.forward]
    cuts = (_cut(crossing, sizes, sum(sizes) / n) for n in _BLOCKS)
    return [values for values in dict.fromkeys(cuts) if values]


def _crossing(graph: Graph) -> list[frozenset[Var]]:
    """Returns for each equation the values that it or an earlier one makes and that a later one reads."""
    last_use = {x: i for i, e in enumerate(graph.forward) for x in e.invars if is_var(x)}
    last_use.update(dict.fromkeys((x for x in graph.outs if is_var(x)), len(graph.forward)))
    # Not, say, a transposed weight, which depends on an input alone.
    computed = depends(graph.forward, {v for i in graph.costly for v in graph.forward[i].outvars})
    alive: set[Var] = set()
    crossing = []
    for i, e in enumerate(graph.forward):
        alive = {v for v in alive if last_use[v] > i} | {v for v in e.outvars if last_use.get(v, -1) > i and v in computed}
        crossing.append(frozenset(alive))
    return crossing


def _cut(crossing: list[frozenset[Var]], sizes: list[int], most: float) -> frozenset[Var]:
    """Returns the values that cross cuts, such that about `most` bytes are inside of each block."""
    kept: set[Var] = set()
    start = 0
    while start < len(sizes):
        end, size = start, 0
        while end < len(sizes) and size <= most:
            size += sizes[end]
            end += 1
        if end == len(sizes):
            break
        at = min(range(start, end), key=lambda i: (sum(kept_bytes(v) for v in crossing[i] if v not in kept), -i))
        kept |= crossing[at]
        start = at + 1
    return frozenset(kept)
