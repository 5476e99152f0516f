"""Loops over loaders and their threads that still exist when Python ends: they are closed while what they use still exists."""

import atexit
import contextlib
import weakref
from typing import Protocol, TypeVar


class Closable(Protocol):
    """An object with a method `close`."""

    def close(self) -> None:
        """Ends what the object began."""


T = TypeVar("T", bound=Closable)
_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()


def closed_at_exit(loop: T) -> T:
    """Returns `loop`, which is closed when Python ends, if it still exists."""
    _open.add(loop)
    return loop


@atexit.register
def _close() -> None:
    for loop in [*_open]:
        with contextlib.suppress(ValueError):  # another thread runs it
            loop.close()
