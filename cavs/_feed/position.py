"""The position of a loader, which a checkpoint saves."""

import operator
from collections.abc import Mapping
from typing import Any

POSITION = ("epoch", "batch", "seen", "steps", "order")  # the keys of a saved position
MSG_OTHER_BATCHES = (
    "Loader.restore: state: got the position of a loader with other batches; expected one of the same graphs, batch size, "
    "seed, group, shapes and steps. At the end of an epoch (batch 0) these may change."
)
MSG_TWO_LOOPS = (
    "Loader: got another loop over this loader before this one ended; expected one at a time, as they share its position. "
    "Create a second loader; with shapes=loader it has the same shapes."
)


def position_of(state: Any) -> dict[str, int]:
    """Returns a saved position as a dict of ints.

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
