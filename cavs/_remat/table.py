"""The plan of a derivative as a table, before anything is compiled."""

import json
import math
import os
from collections import Counter
from typing import NamedTuple

from cavs._jaxpr.costs import bytes_of_var, flops_of
from cavs._jaxpr.jaxprs import Var
from cavs._jaxpr.source_lines import source_line
from cavs._memory.bytes import text_of
from cavs._memory.plan_batch import columns
from cavs._remat.loops import Point, Region
from cavs._remat.pareto import ParetoSearch


class Row(NamedTuple):
    """Values that are kept: `count` of them, one for each of `times` steps, `bytes` altogether."""

    what: str
    shape: str
    count: int
    times: int
    bytes: int
    line: str


class Plan:
    """The values that a derivative keeps from the forward pass, and those that it recomputes. Prints as a table.

    Attributes:
        bytes: bytes that live from the forward to the backward, modelled: XLA may keep others.
        plain_bytes: the same for `jax.grad`.
        flops: of the products that run twice.
        compiler_options: options for `jax.jit` with which a small step fits its budget, as of [`cavs.memory.BatchPlan`][].
    """

    def __init__(self, name: str, search: ParetoSearch, point: Point) -> None:
        self._name, self._search, self._point = name, search, point
        self.bytes, self.flops, self.compiler_options = point.bytes, point.flops, search.options
        self.plain_bytes = search.plain().bytes

    @property
    def peak(self) -> int:
        """The bytes of temporary memory of forward and backward, as XLA allocates them; compiles, if there was no budget."""
        return self._search.measure(self._point)

    @property
    def plain_peak(self) -> int:
        """The same for `jax.grad`, which is compiled for it. Then the plan prints it, too."""
        return self._search.measure(None)

    @property
    def floor(self) -> int:
        """The smallest budget that a plan fits, in bytes. Compiles the smallest plans."""
        return self._search.measure(self._search.smallest())

    def frontier(self) -> list[tuple[int, float]]:
        """Returns (modelled peak in bytes, FLOPs run twice) of plans, the fastest first."""
        return [(p.peak, p.flops) for p in self._search.points()]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the kept values to a file, as JSON; `recompute(fn, plan=path)` keeps the same without planning again."""
        with open(path, "w") as file:
            json.dump(self._point.as_json(), file)

    def rows(self) -> list[Row]:
        """Returns the kept values, the largest first."""
        found: Counter[Row] = Counter()
        kept = self._point.kept
        made = {v: e for e in kept.graph.forward for v in e.outvars}
        inside = [(region, v) for region in self._point.regions.values() if region.name for v in region.kept.keep]
        for v in kept.keep:
            if made[v].primitive.name == "scan" and (step := self._in_a_step(v, inside)):
                inside.remove(step)
                found[self._row(*step)] += 1
            else:
                found[self._row(self._point.regions[""], v)] += 1
        return sorted((row._replace(count=n, bytes=n * row.bytes) for row, n in found.items()), key=lambda row: -row.bytes)

    @staticmethod
    def _in_a_step(stacked: Var, inside: list[tuple[Region, Var]]) -> tuple[Region, Var] | None:
        """Returns the values that a step of a loop keeps, as rows of `stacked`."""
        for region, v in inside:
            one = region.kept.as_kept(v).aval
            n = len(stacked.aval.shape) - len(one.shape)
            if n > 0 and stacked.aval.shape[n:] == one.shape and stacked.aval.dtype == one.dtype:
                if math.prod(stacked.aval.shape[:n]) == region.times:
                    return region, v
        return None

    @staticmethod
    def _row(region: Region, v: Var) -> Row:
        eqn, kept = next((e for e in region.kept.graph.forward if v in e.outvars), None), region.kept
        what, line = ("state of the loop", region.line) if eqn is None else (eqn.primitive.name, source_line(eqn))
        how = " on the host" if v in kept.host else " in bits" if v in kept.forms else ""
        size = region.times * bytes_of_var(kept.as_kept(v))
        return Row(what, v.aval.str_short(short_dtypes=True) + how, 1, region.times, size, line or "")

    def repeated(self) -> list[tuple[str, float, str]]:
        """Returns the products that run twice: name, FLOPs, line."""
        found = []
        for region in self._point.regions.values():
            graph = region.kept.graph
            for k in region.kept.repeated:
                eqn = graph.forward[graph.costly[k]]
                found.append((eqn.primitive.name, region.times * flops_of(eqn), source_line(eqn) or ""))
        return sorted(found, key=lambda x: -x[1])

    def __str__(self) -> str:
        # A saving is printed if both of its numbers were compiled: no model of XLA is good enough for it.
        sizes, point = self._search.compiled, self._point
        peak = f"{text_of(sizes[point])} (compiled)" if point in sizes else f"{text_of(point.peak)} (modelled)"
        plain = f", of jax.grad {text_of(sizes[None])} (compiled)" if point in sizes and None in sizes else ""
        lines = [f"The derivative of {self._name}: peak {peak}{plain}, kept for the backward {text_of(self.bytes)} (modelled)"]
        rows = [(text_of(r.bytes), r.what, r.shape, f"{r.count} x {r.times}", _short(r.line)) for r in self.rows()]
        lines += ["kept, modelled:", *columns([("bytes", "result of", "type", "times", "line"), *rows])]
        cheap = Counter(e.primitive.name for r in self._point.regions.values() for e in r.kept.again)
        lines += ["computed again: " + (", ".join(f"{n} {name}" for name, n in cheap.most_common()) or "nothing")]
        if self.flops:
            same = Counter((name, f"{flops:.3g}", _short(line)) for name, flops, line in self.repeated())
            rows = [(str(n), flops, name, line) for (name, flops, line), n in same.items()]
            head = ("", "FLOPs each", "product", "line")
            lines += [f"products run twice, {self.flops:.3g} FLOPs:", *columns([head, *rows])]
        return "\n".join(lines)

    __repr__ = __str__


def _short(line: str) -> str:
    return line if len(line) <= 90 else "..." + line[-87:]
