"""Loops over loaders that are still open when Python ends: they are closed while what they use still exists."""

import atexit
import contextlib
import weakref
from collections.abc import Generator
from typing import Any

_open: "weakref.WeakSet[Generator[Any, None, None]]" = weakref.WeakSet()


def closed_at_exit(loop: Generator[Any, None, None]) -> Generator[Any, None, None]:
    """Returns `loop`, which is closed when Python ends, if it still exists."""
    _open.add(loop)
    return loop


@atexit.register
def _close() -> None:
    for loop in [*_open]:
        with contextlib.suppress(ValueError):  # another thread runs it
            loop.close()
