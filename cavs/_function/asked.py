"""What the backward is asked to keep: by those who call `run`, and of a plan."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

from cavs._jaxpr.names import Names


class Keeping(NamedTuple):
    """What calls of `run` are asked to keep.

    Attributes:
        least: whether they are to need the least memory rather than the least time.
        names: see `_jaxpr.names`.
        seen: gains the names of the values that calls of `run` could keep.
        engines: gains the engines that run.
        in_parts: whether a batch comes in parts, so that gradients of weights may need more memory than values of vertices.
    """

    least: bool
    names: Names
    seen: set[str]
    engines: set[str]
    in_parts: bool = False


class ToKeep(NamedTuple):
    """What the backward of a plan keeps.

    Attributes:
        overwrite: whether cotangents may overwrite states: every vertex has at most one parent, and the root is known.
        share: whether values are preferred that cut cotangents can overwrite.
        again: whether products run again, as far as that saves memory.
        names: what the user asks for by name.
        masks: whether comparisons are kept if what they compare could be rounded differently when it runs again.
        together: whether kept values are stored side by side if one cut cotangent can overwrite them, so that tasks write
            fewer tensors.
    """

    overwrite: bool = False
    share: bool = False
    again: bool = False
    names: Names = ()
    masks: bool = False
    together: bool = False


_NOW: contextvars.ContextVar[Keeping | None] = contextvars.ContextVar("keeping", default=None)


def keeping_now() -> Keeping:
    """Returns what was asked for by `keep`."""
    return _NOW.get() or Keeping(False, (), set(), set())


@contextlib.contextmanager
def keep(least: bool = True, names: Names = (), in_parts: bool = False) -> Iterator[Keeping]:
    """Inside, calls of `run` are traced to keep what the arguments say; see `Keeping`."""
    asked = Keeping(least, names, set(), set(), in_parts)
    before = _NOW.set(asked)
    try:
        yield asked
    finally:
        _NOW.reset(before)
