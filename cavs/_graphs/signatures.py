"""The check that a function of the user takes the arguments with which it will be called."""

import inspect
from collections.abc import Callable
from typing import Any

from cavs._graphs.counted import counted


def check_takes(argument: str, fun: Callable[..., Any], *names: str, write: str = "") -> None:
    """Raises `TypeError` if `fun` is no function, or takes another number of positional arguments than there are `names`.

    Args:
        argument: the name for the message, such as "step: fun".
        fun: the function that the user gave as this argument.
        names: the names of what it will be called with.
        write: what to write instead, for the message.
    """
    expected = f"a function of {counted(len(names), 'argument')}, ({', '.join(names)}).{f' Write {write}.' * bool(write)}"
    if not callable(fun):
        raise TypeError(f"{argument}: got a {type(fun).__name__}; expected {expected}")
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # a function in C may have none
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        name = getattr(fun, "__name__", type(fun).__name__)
        raise TypeError(f"{argument}: got {name}{signature}; expected {expected}") from error
