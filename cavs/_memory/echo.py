"""`recompute`: a function whose derivative keeps less. After Echo (Zheng et al., ISCA 2020), for any function of JAX."""

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from cavs._function.asked import keep
from cavs._function.equations import is_float
from cavs._function.jaxprs import opened, without_constants
from cavs._function.names import Names, check_known, names_of
from cavs._memory.bytes import BudgetError, bytes_of, text_of
from cavs._memory.derivative import with_derivative
from cavs._memory.fit import Verified, smaller_plan
from cavs._memory.no_collections import no_collections
from cavs._memory.pareto import ParetoSearch, Point
from cavs._memory.table import Plan

R = TypeVar("R")


def recompute(
    fn: Callable[..., R],
    budget: int | float | str | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    names: Mapping[str, str] | None = None,
    plan: str | os.PathLike[str] | None = None,
) -> "Recomputed[R]":
    """Returns `fn` with a derivative that keeps less of the forward, and computes the rest again in the backward.

    The kept values are a minimum cut of the traced function: the fewest bytes from which the backward can compute all that it
    reads. Unlike with `jax.checkpoint`, you place nothing and name nothing, and the bodies of `lax.scan` are planned, too.
    Gradients are those of `fn`, up to rounding; random numbers are recomputed from their keys, so they are the same. If the
    plan predicts no gain, it keeps everything, as `jax.grad` does.

    ```python
    loss = cavs.memory.recompute(loss)
    print(loss.plan(params, batch))          # what is kept, before anything is compiled
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
            the host. Inside loops and on a CPU, `"offload"` is the same as `"keep"`.
        plan: a file that `Plan.save` wrote: its values are kept, and nothing is planned.

    Returns:
        A callable with the signature of `fn` and a method `plan`. Use it under `jax.jit`: each call plans anew. In
        forward mode (`jax.jvp`), it computes what `fn` does.

    Raises:
        BudgetError: when it is differentiated, if no plan fits the budget.
        ValueError: if `budget` is not an amount of memory, or `names` is invalid or has a name that no value has.
    """
    if not callable(fn):
        raise TypeError(f"cavs.memory.recompute: fn: got {fn!r}; expected a function. Write recompute(loss, budget='2GiB').")
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    return Recomputed(fn, bytes_of(budget, "cavs.memory.recompute"), static, names_of(names, "recompute"), _read(plan))


class Recomputed(Generic[R]):
    """A function whose derivative keeps less, see [`cavs.memory.recompute`][]."""

    def __init__(
        self, fn: Callable[..., R], budget: int | str | None, static: tuple[int, ...], names: Names, saved: Any
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._budget, self._static, self._names, self._saved = fn, budget, static, names, saved

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        closed, flat, tree = self._trace(args, kwargs)
        closed, consts = without_constants(closed)  # arrays that `fn` closes over may be differentiated, too
        planned = with_derivative(closed, lambda diff: self._choose(ParetoSearch(closed, diff, None, names=self._names)).kept)
        return jax.tree.unflatten(tree, planned(*consts, *flat))

    def plan(self, *args: Any, argnums: int | Sequence[int] = 0, **kwargs: Any) -> Plan:
        """Returns what the derivative keeps, without compiling anything.

        Args:
            *args: arguments of `fn`, or their `jax.ShapeDtypeStruct`.
            argnums: the positional arguments with respect to which you differentiate, as for `jax.grad`.
            **kwargs: keyword arguments of `fn`.

        Returns:
            The plan, which prints as a table.

        Raises:
            BudgetError: if no plan fits the budget.
        """
        closed, _, _ = self._trace(args, kwargs)
        wanted = {argnums % len(args)} if isinstance(argnums, int) else {i % len(args) for i in argnums}
        marks = [i in wanted for i, arg in enumerate(args) if i not in self._static for _ in jax.tree.leaves(arg)]
        invars = opened(closed)[0].invars
        search = ParetoSearch(closed, [i for i, mark in enumerate(marks) if mark and is_float(invars[i])], names=self._names)
        return Plan(self._name(), search, self._choose(search), self._budget)

    def verify(self, *args: Any, argnums: int | Sequence[int] = 0, **kwargs: Any) -> Verified:
        """Compiles the function with its derivative and `compiler_options` of the plan, and compares the temporary memory.

        Args:
            *args: as in `plan`, and so are the other arguments.
            argnums: the positional arguments with respect to which you differentiate.
            **kwargs: keyword arguments of `fn`.

        Returns:
            The bytes as predicted, and as XLA allocates them. The gradients are results here. In a step of training they may be
            temporary until the optimiser has read them: compile that to know what it needs.

        Raises:
            RuntimeError: the backend does not report the memory of a program.
        """
        wanted = [argnums % len(args)] if isinstance(argnums, int) else [i % len(args) for i in argnums]
        dynamic = {i: x for i, x in enumerate(args) if i not in self._static}

        def both(given: dict[int, Any], named: dict[str, Any]) -> Any:
            def of(*some: Any) -> R:
                changed = given | dict(zip(wanted, some, strict=True))
                return self(*(x if i in self._static else changed[i] for i, x in enumerate(args)), **named)

            out, transpose = jax.vjp(of, *(given[i] for i in wanted))
            return out, transpose(jax.tree.map(_one, out))

        plan = self.plan(*args, argnums=argnums, **kwargs)
        analysis = jax.jit(both).lower(dynamic, kwargs).compile(plan.compiler_options).memory_analysis()
        if analysis is None:
            raise RuntimeError("verify: this backend does not report how much memory a program needs.")
        return Verified(plan.peak, analysis.temp_size_in_bytes, None)

    def fitted(self, *args: Any, argnums: int | Sequence[int] = 0, **kwargs: Any) -> "Recomputed[R]":
        """Returns a function whose derivative fits the budget when it is compiled: this one, or one that keeps less.

        A prediction cannot know the order in which XLA runs a program, nor the workspaces of its libraries. Each attempt
        compiles the function with its derivative, see `verify`, and takes the same arguments.

        Raises:
            BudgetError: the smallest plan does not fit; the message has the bytes that it needs.
        """
        if not isinstance(self._budget, int):
            return self

        def verify(tried: Recomputed[R]) -> Verified:
            return tried.verify(*args, argnums=argnums, **kwargs)

        def plan(most: int | None) -> tuple[Recomputed[R], int] | None:
            tried = Recomputed(self._fn, "min" if most is None else most, self._static, self._names, None)
            try:
                return tried, tried.plan(*args, argnums=argnums, **kwargs).peak
            except BudgetError:
                return None

        found = verify(self)
        return self if found.compiled <= self._budget else smaller_plan(self, found, self._budget, verify, plan)

    def _name(self) -> str:
        return getattr(self._fn, "__name__", type(self._fn).__name__)

    @no_collections()
    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any], Any]:
        dynamic = [x for i, x in enumerate(args) if i not in self._static]
        flat, tree = jax.tree.flatten((dynamic, kwargs))

        def function(*leaves: Any) -> Any:
            given, named = jax.tree.unflatten(tree, leaves)
            values = iter(given)
            return self._fn(*(x if i in self._static else next(values) for i, x in enumerate(args)), **named)

        for x in flat:
            if not isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic | bool | int | float | complex):
                raise TypeError(
                    f"{self._name()} (recompute): got an argument {x!r}; expected arrays. Write recompute(fn, "
                    "static_argnums=...) with the positions of such arguments."
                )
        with keep(least=self._budget == "min", names=self._names) as inside:  # for the calls of `cavs.run` inside
            closed, shapes = jax.make_jaxpr(function, return_shape=True)(*flat)
        self._inside = inside.seen
        return closed, flat, jax.tree.structure(shapes)

    @no_collections()
    def _choose(self, search: ParetoSearch) -> Point:
        if self._saved is not None:
            return search.saved(self._saved)
        if self._names:
            check_known(self._names, search.cheap().names() | self._inside, f"recompute of {self._name()}")
        if self._budget is None and self._names:
            return search.cheap()
        if self._budget is None:
            return min(search.plain(), search.cheap(), key=lambda p: (search.peaks[p], p.bytes))
        if self._budget != "min":
            cheap = search.cheap()
            if search.peaks[cheap] <= int(self._budget):
                return cheap
        points = search.points()
        if self._budget == "min":
            return points[-1]
        chosen = search.within(points, int(self._budget))
        if chosen is None:
            raise BudgetError(_too_small(self._name(), int(self._budget), search, points[-1]))
        return chosen


def _one(x: jax.Array) -> Any:
    return jnp.ones_like(x) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0)


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


def _too_small(name: str, budget: int, search: ParetoSearch, least: Point) -> str:
    floor = search.peaks[least]
    largest = Plan(name, search, least, budget).rows()[:3]
    terms = (
        "; ".join(f"{row.what} {row.shape}: {text_of(row.bytes)}" for row in largest) or "values of one stretch of the backward"
    )
    return (
        f"recompute of {name}: budget: got {text_of(budget)}; expected at least {text_of(floor)}, with everything run again "
        f"that can be. Largest of what remains: {terms}. Write budget={floor}, or 'min', or make the batch smaller."
    )
