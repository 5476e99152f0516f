"""Options for what the backward pass saves."""

from typing import NamedTuple

from cavs._jaxpr.names import Names


class MemoryOptions(NamedTuple):
    """What a memory plan asks of the calls of `run` in a loss.

    Attributes:
        least: whether they need the least memory, rather than the least time.
        names: what becomes of named values, see `_jaxpr.names`.
        in_parts: whether a batch comes in parts, so that gradients of weights may need more memory than values of vertices.
    """

    least: bool = False
    names: Names = ()
    in_parts: bool = False


NO_OPTIONS = MemoryOptions()  # of calls of `run` without a memory plan


class KeepOptions(NamedTuple):
    """What the backward pass of a plan of F saves.

    Attributes:
        overwrite: whether cotangents may overwrite states: every vertex has at most one parent, and the root is known.
        share: whether values are preferred that cut cotangents can overwrite.
        again: whether products run again, as far as that saves memory.
        names: what becomes of named values.
        masks: whether comparisons are saved if what they compare could be rounded differently when it runs again.
        together: whether saved values are stored side by side if one cut cotangent can overwrite them, so that tasks write
            fewer tensors.
    """

    overwrite: bool = False
    share: bool = False
    again: bool = False
    names: Names = ()
    masks: bool = False
    together: bool = False
