"""`recompute`: a function whose derivative keeps less. After Echo (Zheng et al., ISCA 2020), for any function of JAX."""

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from cavs._function.keep_options import MemoryOptions
from cavs._jaxpr.costs import bytes_of_var
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.jaxprs import without_constants
from cavs._jaxpr.names import Names, check_known, names_of
from cavs._jaxpr.tunable import calls_in, with_options
from cavs._memory.bytes import BudgetError, bytes_of, text_of
from cavs._memory.fit import Verified, compiler_options, no_collections
from cavs._remat.graph import mark, with_derivative
from cavs._remat.loops import Point
from cavs._remat.pareto import ParetoSearch
from cavs._remat.table import Plan
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
    reads. Unlike with `jax.checkpoint`, you place nothing and name nothing, and the bodies of `lax.scan` are planned, too.
    Kept masks take one bit an element. If the largest product is followed by a loss that treats its rows alike, such as that of
    a vocabulary, blocks of rows run one after another.
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
            bytes, `"2GiB"`, a fraction of the device's memory such as `0.5`, or `"min"`. The fastest plan that is predicted to
            fit is taken; it may run matrix products and loops twice. None: the smallest plan that runs none of them twice.
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
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    if not all(isinstance(n, int) for n in static):
        got = f"cavs.memory.recompute: static_argnums: got {static_argnums!r}"
        raise TypeError(f"{got}; expected positions of arguments. Write static_argnums=(1,).")
    if not isinstance(offload, bool):
        raise TypeError(f"cavs.memory.recompute: offload: got {offload!r}; expected True or False.")
    size = bytes_of(budget, "cavs.memory.recompute")
    return Recomputed(fn, size, static, names_of(names, "recompute"), _read(plan), offload)


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
        """
        closed, consts, _, _ = self._trace(args, kwargs)
        wanted = {argnums % len(args)} if isinstance(argnums, int) else {i % len(args) for i in argnums}
        marks = [i in wanted for i, arg in enumerate(args) if i not in self._static for _ in jax.tree.leaves(arg)]
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
        dynamic = [x for i, x in enumerate(args) if i not in self._static]
        flat, tree = jax.tree.flatten((dynamic, kwargs))

        def function(*leaves: Any) -> Any:
            given, named = jax.tree.unflatten(tree, leaves)
            values = iter(given)
            return self._fn(*(x if i in self._static else next(values) for i, x in enumerate(args)), **named)

        for x in flat:
            if not isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | bool | int | float | complex):
                raise TypeError(
                    f"{self._name} (recompute): got an argument {x!r}; expected arrays. Write recompute(fn, "
                    "static_argnums=...) with the positions of such arguments."
                )
        closed: Any
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*flat)
        options = MemoryOptions(self._budget == "min", self._names)
        closed = with_options(closed, options) if any(options) else closed
        self._inside = {name for call in calls_in(closed.jaxpr) for name in call.names}
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
    """Reads a saved plan."""
    if path is None:
        return None
    with open(path) as file:
        try:
            found = json.load(file)
        except ValueError:
            found = None
    if not isinstance(found, dict) or not found.keys() >= {"regions", "chunks"}:
        raise ValueError(
            f"recompute: plan: got {path}; expected a file that Plan.save wrote. Write recompute(fn).plan(...).save(path)."
        )
    return found


def _too_small(name: str, budget: int, search: ParetoSearch) -> str:
    least = search.smallest()
    largest = Plan(name, search, least).rows()[:3]
    terms = (
        "; ".join(f"{row.what} {row.shape}: {text_of(row.bytes)}" for row in largest) or "values of one stretch of the backward"
    )
    floor = search.measure(least)
    return (
        f"recompute of {name}: budget: got {text_of(budget)}; expected at least {text_of(floor)}, with everything run again "
        f"that can be. Largest of what remains: {terms}. Write budget={floor}, or 'min', or make the batch smaller."
    )
