"""Checks of arguments that are graphs, or functions of the user, before a call inside fails with an error of its own."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from cavs._graphs.counted import counted


def check_takes(argument: str, fun: Callable[..., Any], *names: str, write: str = "") -> None:
    """Raises `TypeError` if `fun` is no function, or takes another number of positional arguments than there are `names`.

    `argument` names it in the message, such as "step: fun". `write` is what to write instead.
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


def optional_module(name: str, message: str) -> Any:
    """Imports a module of a package that cavs does not depend on. If it is missing, a `ModuleNotFoundError` has the message."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModuleNotFoundError(message) from error
