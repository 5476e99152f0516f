"""`recompute`: a function whose derivative keeps less. After Echo (Zheng et al., ISCA 2020), for any function of JAX."""

import contextlib
import functools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np

from cavs._function.arrays import beyond_32_bits
from cavs._function.keep_options import MemoryOptions
from cavs._graphs.checks import check_bool
from cavs._graphs.counted import counted
from cavs._graphs.files import check_path, read_whole, write_whole
from cavs._jaxpr.costs import bytes_of_var, flops_of
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.jaxprs import Var, without_constants
from cavs._jaxpr.names import Names, check_known, names_of
from cavs._jaxpr.ruled import rules_in
from cavs._jaxpr.source_lines import source_line
from cavs._jaxpr.tunable import TunableRules, with_options
from cavs._memory.bytes import BudgetError, bytes_of, text_of
from cavs._memory.fit import Verified, compiler_options, no_collections
from cavs._memory.plan_batch import columns
from cavs._remat.graph import mark, with_derivative
from cavs._remat.loops import Point, Region
from cavs._remat.pareto import ParetoSearch
from cavs._run.manual_axes import devices

R = TypeVar("R")


def recompute(
    fn: Callable[..., R],
    budget: int | float | str | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    names: Mapping[str, str] | None = None,
    offload: bool = False,
    plan: str | os.PathLike[str] | None = None,
) -> "Recomputed[R]":
    """Returns `fn` with a derivative that keeps less of the forward, and computes the rest again in the backward.

    The kept values are a minimum cut of the traced function: the fewest bytes from which the backward can compute all that it
    reads (Echo, Zheng et al., 2020, section IV). Unlike with `jax.checkpoint`, you place nothing and name nothing, and the
    bodies of `lax.scan` are planned, too. Kept masks take one bit an element. If a loss treats the rows of the largest product
    alike, such as the logits of a vocabulary, it is computed in blocks of rows.

    Gradients are those of `fn`, up to rounding; random numbers are recomputed from their keys, so they are the same. If the
    plan predicts no gain, it keeps everything, as `jax.grad` does.

    ```python
    loss = cavs.memory.recompute(loss)
    print(loss.plan(params, batch))          # what is kept; nothing is compiled
    step = jax.jit(jax.value_and_grad(loss))
    ```

    Args:
        fn: any function of pytrees of arrays that JAX can differentiate in reverse mode.
        budget: the temporary memory that the forward and the backward of `fn` may need, apart from arguments and results:
            bytes, `"2GiB"`, a fraction of the device's memory such as `0.5`, or `"min"`. Up to five plans, which may run matrix
            products and loops twice, are compiled, and the fastest that fits is taken. None: the smallest plan that runs
            none of them twice; nothing is compiled.
        static_argnums: positional arguments that are not arrays, as in `jax.checkpoint`.
        names: what to do with values that you named with `jax.ad_checkpoint.checkpoint_name`, whatever the plan would
            choose: `{"gates": "recompute"}` never keeps them, `"keep"` always does, and `"offload"` keeps them in the memory of
            the host; on a CPU that is the same as `"keep"`. Values of a vertex function can be named, too, unless `fn` itself
            differentiates the call of [`cavs.run`][], or has it inside a `jax.shard_map`.
        offload: whether a plan for a budget may keep values in the memory of the host (moDNN, section 5.2) in place of running
            products again. It is taken if it fits and is faster; both are run for random numbers to find that out, on a GPU.
        plan: a file that `Plan.save` wrote: its values are kept, and nothing is planned.

    Returns:
        A callable with the signature of `fn` and a method `plan`. Use it under `jax.jit`: each call plans anew. In
        forward mode (`jax.jvp`), it computes what `fn` does.

    Raises:
        BudgetError: when it is differentiated, if no plan fits the budget.
        TypeError: if `fn` is no function, `static_argnums` are no ints, or `offload` is no bool.
        ValueError: if `budget` is not an amount of memory, or `names` is invalid or has a name that no value has.
    """
    if not callable(fn):
        raise TypeError(f"cavs.memory.recompute: fn: got {fn!r}; expected a function. Write recompute(loss, budget='2GiB').")
    static = tuple(np.atleast_1d(static_argnums).tolist())
    if not all(isinstance(n, int) for n in static):
        got = f"cavs.memory.recompute: static_argnums: got {static_argnums!r}"
        raise TypeError(f"{got}; expected positions of arguments. Write static_argnums=(1,).")
    check_bool("cavs.memory.recompute: offload", offload)
    size = bytes_of(budget, "cavs.memory.recompute")
    return Recomputed(fn, size, static, names_of(names, "recompute"), _read(plan), offload)


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
        check_path("Plan.save", path)
        write_whole(path, json.dumps(self._point.as_json()).encode())

    def rows(self) -> list[Row]:
        """Returns the kept values, the largest first."""
        counts: Counter[Row] = Counter()
        kept = self._point.kept
        makers = {v: e for e in kept.graph.forward for v in e.outvars}
        step_values = [(region, v) for region in self._point.regions.values() if region.name for v in region.kept.keep]
        for v in kept.keep:
            if makers[v].primitive.name == "scan" and (step := self._in_a_step(v, step_values)):
                step_values.remove(step)
                counts[self._row(*step)] += 1
            else:
                counts[self._row(self._point.regions[""], v)] += 1
        return sorted((row._replace(count=n, bytes=n * row.bytes) for row, n in counts.items()), key=lambda row: -row.bytes)

    @staticmethod
    def _in_a_step(stacked: Var, step_values: list[tuple[Region, Var]]) -> tuple[Region, Var] | None:
        """Returns the values that a step of a loop keeps, as rows of `stacked`."""
        for region, v in step_values:
            aval = region.kept.as_kept(v).aval
            n = len(stacked.aval.shape) - len(aval.shape)
            if n > 0 and stacked.aval.shape[n:] == aval.shape and stacked.aval.dtype == aval.dtype:
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
        products = []
        for region in self._point.regions.values():
            graph = region.kept.graph
            for k in region.kept.repeated:
                eqn = graph.forward[graph.costly[k]]
                products.append((eqn.primitive.name, region.times * flops_of(eqn), source_line(eqn) or ""))
        return sorted(products, key=lambda x: -x[1])

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
            counts = Counter((name, f"{flops:.3g}", _short(line)) for name, flops, line in self.repeated())
            rows = [(str(n), flops, name, line) for (name, flops, line), n in counts.items()]
            head = ("", "FLOPs each", "product", "line")
            lines += [f"products run twice, {self.flops:.3g} FLOPs:", *columns([head, *rows])]
        return "\n".join(lines)

    __repr__ = __str__


def _short(line: str) -> str:
    return line if len(line) <= 90 else "..." + line[-87:]


def _places(numbers: Sequence[int], args: Sequence[Any]) -> set[int]:
    """Returns the places of arguments among `args`. Negative numbers count from the last one."""
    return {n if n >= 0 else n + len(args) for n in numbers}


class Recomputed(Generic[R]):
    """A function whose derivative keeps less, see [`cavs.memory.recompute`][]."""

    def __init__(
        self, fn: Callable[..., R], budget: int | str | None, static: tuple[int, ...], names: Names, saved: Any, offload: bool
    ) -> None:
        functools.update_wrapper(self, fn)
        self._offload, self._name = offload, getattr(fn, "__name__", type(fn).__name__)
        self._fn, self._budget, self._static, self._names, self._saved = fn, budget, static, names, saved
        self._known: dict[Any, Any] = {}  # the plans that were compiled, as JSON, with their bytes

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        closed, consts, flat, tree = self._trace(args, kwargs)
        planned = with_derivative(closed, lambda diff: self._choose(self._search(closed, diff)).kept)
        return jax.tree.unflatten(tree, planned(*consts, *flat))

    def plan(self, *args: Any, argnums: int | Sequence[int] = 0, **kwargs: Any) -> Plan:
        """Returns what the derivative keeps. With a budget, this compiles up to five plans, and two more for `offload`.

        Args:
            *args: arguments of `fn`, or their `jax.ShapeDtypeStruct`.
            argnums: the positional arguments with respect to which you differentiate, as for `jax.grad`.
            **kwargs: keyword arguments of `fn`.

        Returns:
            The plan, which prints as a table.

        Raises:
            BudgetError: if no plan fits the budget.
            ValueError: if `argnums` are not among the positional arguments.
        """
        closed, consts, _, _ = self._trace(args, kwargs)
        given = tuple(np.atleast_1d(argnums).tolist())
        if any(not isinstance(n, int) or not -len(args) <= n < len(args) for n in given):
            raise ValueError(
                f"{self._name} (recompute): argnums: got {argnums!r} with {counted(len(args), 'positional argument')}; "
                "expected their numbers, from 0 on. Write plan(x, y, argnums=1), for instance."
            )
        differentiated, static = _places(given, args), _places(self._static, args)
        marks = [i in differentiated for i, arg in enumerate(args) if i not in static for _ in jax.tree.leaves(arg)]
        places = enumerate(closed.jaxpr.invars[len(consts) :])
        diff = [len(consts) + i for i, v in places if i < len(marks) and marks[i] and is_float(v)]
        search = self._search(closed, diff)
        return Plan(self._name, search, self._choose(search))

    def verify(self, *args: Any, argnums: int | Sequence[int] = 0, **kwargs: Any) -> Verified:
        """Compiles the function with its derivative and `compiler_options` of the plan. The arguments are those of `plan`.

        Returns:
            The temporary memory as estimated, and as XLA allocates it. The gradients are results here. In a step of training
            they may be temporary until the optimiser has read them: compile that to know what it needs.

        Raises:
            RuntimeError: the backend does not report the memory of a program.
        """
        plan = self.plan(*args, argnums=argnums, **kwargs)
        return Verified(plan._point.peak, plan.peak, None)

    @no_collections()
    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any], list[Any], Any]:
        static = _places(self._static, args)
        dynamic = [x for i, x in enumerate(args) if i not in static]
        flat, tree = jax.tree.flatten((dynamic, kwargs))

        def function(*leaves: Any) -> Any:
            positional, keywords = jax.tree.unflatten(tree, leaves)
            values = iter(positional)
            return self._fn(*(x if i in static else next(values) for i, x in enumerate(args)), **keywords)

        for x in flat:
            if not isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | bool | int | float | complex):
                raise TypeError(
                    f"{self._name} (recompute): got an argument {x!r}; expected arrays. Write recompute(fn, "
                    "static_argnums=...) with the positions of such arguments."
                )
            if text := beyond_32_bits(x):
                raise ValueError(f"{self._name} (recompute): got an argument of {text}")
        closed: Any
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*flat)
        options = MemoryOptions(self._budget == "min", self._names)
        closed = with_options(closed, options) if any(options) else closed
        self._inside = {name for call in rules_in(closed.jaxpr, TunableRules) for name in call.names}
        closed, consts = without_constants(closed)  # arrays that `fn` closes over may be differentiated, too
        return closed, list(consts), flat, jax.tree.structure(shapes)

    def _search(self, closed: Any, diff: Sequence[int]) -> ParetoSearch:
        inputs = sum(map(bytes_of_var, closed.jaxpr.invars))
        named = any(way == "offload" for _, way in self._names)
        options = compiler_options(self._budget, inputs, self._offload or named)
        return ParetoSearch(closed, diff, self._names, options, self._offload and not devices()[0])

    @no_collections()
    def _choose(self, search: ParetoSearch) -> Point:
        if self._saved is not None:
            return search.saved(self._saved)
        if self._names:
            known = {name for region in search.cheap().regions.values() for name in region.kept.graph.named}
            check_known(self._names, known | self._inside, f"recompute of {self._name}")
        if self._budget is None and self._names:
            return search.cheap()
        if self._budget is None:
            return min(search.plain(), search.cheap(), key=lambda p: (p.peak, p.bytes))
        key = mark(search.closed.jaxpr.eqns), tuple(search.diff), devices()[0]
        if key in self._known:  # compiled before, for the same shapes
            saved, size = self._known[key]
            point = search.saved(saved)
            search.compiled |= {} if size is None else {point: size}
            return point
        point = search.smallest() if self._budget == "min" else search.fastest(int(self._budget))
        if point is None:
            raise BudgetError(_too_small(self._name, int(self._budget), search))
        self._known[key] = point.as_json(), search.compiled.get(point)
        return point


def _read(path: str | os.PathLike[str] | None) -> Any:
    if path is None:
        return None
    check_path("recompute", path, argument="plan")
    saved = None
    with contextlib.suppress(ValueError):
        saved = json.loads(read_whole(path))
    regions, chunks = map(saved.get, ("regions", "chunks")) if isinstance(saved, dict) else (None, None)
    if not isinstance(regions, dict) or "" not in regions or not all(isinstance(x, dict) for x in (chunks, *regions.values())):
        raise ValueError(
            f"recompute: plan: got {path}; expected a file that Plan.save wrote. Write recompute(fn).plan(...).save(path)."
        )
    return saved


def _too_small(name: str, budget: int, search: ParetoSearch) -> str:
    smallest = search.smallest()
    largest = Plan(name, search, smallest).rows()[:3]
    terms = (
        "; ".join(f"{row.what} {row.shape}: {text_of(row.bytes)}" for row in largest) or "values of one stretch of the backward"
    )
    floor = search.measure(smallest)
    return (
        f"recompute of {name}: budget: got {text_of(budget)}; expected at least {text_of(floor)}, with everything run again "
        f"that can be. Largest of what remains: {terms}. Write budget={floor}, or 'min', or make the batch smaller."
    )
