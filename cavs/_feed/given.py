"""What a user gives a loader besides its settings: batches as indices, and a saved position."""

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from cavs._graphs.checks import Index, checked_index

POSITION = ("epoch", "batch", "seen", "steps", "order")  # the keys of a saved position
MSG_OTHER_BATCHES = (
    "Loader.restore: state: got the position of a loader with other batches; expected one of the same graphs, batch size, "
    "seed, group, shapes and steps. At the end of an epoch (batch 0) these may change."
)
MSG_TWO_LOOPS = (
    "Loader: got another loop over this loader before this one ended; expected one at a time, as they share its position. "
    "Create a second loader; with shapes=loader it has the same shapes."
)


def samples_of(index: Index, count: int) -> np.ndarray:
    """The numbers of the graphs that an index into `count` graphs selects for a batch.

    Raises:
        IndexError: a number is out of range, or the index is of another type or shape.
        ValueError: it selects no graph.
    """
    try:
        found = checked_index(index, count)
    except IndexError as error:
        raise IndexError(f"Loader: batches: {error}") from None
    some = np.arange(found.start, found.stop) if isinstance(found, slice) else found
    if not len(some):
        raise ValueError(f"Loader: batches: got {index!r}, which selects no graph; expected at least one in each batch.")
    return some


def position_of(state: Any) -> dict[str, int]:
    """A saved position as a dict of ints.

    Raises:
        ValueError: `state` is not a position.
    """
    try:
        position = {name: operator.index(state[name]) for name in POSITION} if isinstance(state, Mapping) else {}
    except (KeyError, TypeError):
        position = {}
    if not position or min(position["epoch"], position["batch"], position["seen"]) < 0 or position["steps"] < 1:
        raise ValueError(
            f"Loader.restore: state: got {state!r:.200}; expected what Loader.state() returned, a dict of the integers "
            f"{', '.join(POSITION)}."
        )
    return position
