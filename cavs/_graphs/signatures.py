"""The check that a function of the user takes the arguments with which it will be called."""

import inspect
from collections.abc import Callable
from typing import Any


def check_takes(argument: str, fun: Callable[..., Any], *names: str) -> None:
    """Raises `TypeError` if `fun` cannot be called with as many positional arguments as there are `names`.

    Args:
        argument: the name for the message, such as "step: fun".
        fun: the function that the user gave as this argument.
        names: the names of what it will be called with.
    """
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # a function in C may have none
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        name = getattr(fun, "__name__", type(fun).__name__)
        raise TypeError(
            f"{argument}: got {name}{signature}; expected a function of {len(names)} arguments, ({', '.join(names)})."
        ) from error
