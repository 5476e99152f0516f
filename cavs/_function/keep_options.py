"""Options for what the backward pass saves."""

from typing import NamedTuple

from cavs._jaxpr.names import Names


class MemoryOptions(NamedTuple):
    """What a memory plan asks of the calls of `run` in a loss."""

    least: bool = False  # whether they need the least memory, rather than the least time
    names: Names = ()  # what becomes of named values, see `_jaxpr.names`
    # Whether a batch comes in parts, so that gradients of weights may need more memory than values of vertices.
    in_parts: bool = False


NO_OPTIONS = MemoryOptions()  # of calls of `run` without a memory plan


class KeepOptions(NamedTuple):
    """What the backward pass of a plan of F saves."""

    # Whether cotangents may overwrite states: every vertex has at most one parent, and the root is known.
    overwrite: bool = False
    share: bool = False  # whether values are preferred that cut cotangents can overwrite
    again: bool = False  # whether products run again, as far as that saves memory
    names: Names = ()  # what becomes of named values
    masks: bool = False  # whether comparisons are saved if what they compare could be rounded differently when it runs again
    # Whether saved values are stored side by side if one cut cotangent can overwrite them, so that tasks write fewer
    # tensors.
    together: bool = False
