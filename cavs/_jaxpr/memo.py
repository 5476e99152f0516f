"""Results that are computed once for an object, such as a plan, and kept as long as it lives."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
Owner = TypeVar("Owner")
R = TypeVar("R")

MEMO = "_memo"  # the attribute of an object that holds the results


def memoized(fn: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
    """Decorates a function of an object and of hashable arguments: it runs once for each object and its arguments.

    The results lie in the object, as they may refer to it, and not in a copy that `dataclasses.replace` makes of it.
    """

    @functools.wraps(fn)
    def known(owner: Owner, *args: P.args, **kwargs: P.kwargs) -> R:
        memo = _memo(owner).setdefault(_name(fn), {})
        key = (args, tuple(sorted(kwargs.items())))
        if key not in memo:
            memo[key] = fn(owner, *args, **kwargs)
        return memo[key]

    return known


def results(fn: Callable[Concatenate[Owner, P], R], owner: Owner) -> list[R]:
    """Returns the results of a memoized function for an object, the latest last."""
    return list(_memo(owner).get(_name(fn), {}).values())


def _name(fn: Any) -> str:
    return f"{fn.__module__}.{fn.__qualname__}"


def _memo(owner: Any) -> dict[str, dict[Any, Any]]:
    return vars(owner).setdefault(MEMO, {})
