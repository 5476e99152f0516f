"""The optional fields of two `Graphs` that are concatenated."""

from typing import Any

import numpy as np

VALUES = ("kind", "label", "input_id", "graph_label", "edge_attr")  # the fields that are arrays of values


def joined_fields(
    names: dict[str, tuple[Any, Any]], arrays: dict[str, tuple[np.ndarray | None, np.ndarray | None]]
) -> dict[str, Any]:
    """Returns the fields of `graphs + other`.

    Args:
        names: by name, tuples of names on both sides.
        arrays: by name, arrays of values on both sides.

    Raises:
        ValueError: the sides differ in their names, or a field is on one side only, or has different dtypes or shapes.
    """
    fields: dict[str, Any] = {}
    for name, (a, b) in names.items():
        if a != b:
            hint = " Write graphs + other.with_vocab(graphs.vocab)." if name == "vocab" else ""
            raise ValueError(f"graphs + other: got different {name}; expected the same on both sides.{hint}")
        fields[name] = a
    for name, (a, b) in arrays.items():
        if a is not None and b is not None and (a.dtype, a.shape[1:]) != (b.dtype, b.shape[1:]):
            got = f"{a.dtype}{list(a.shape[1:])} and {b.dtype}{list(b.shape[1:])}"
            raise ValueError(f"graphs + other: {name}: got {got}; expected the same dtype and shape on both sides.")
        if (a is None) != (b is None):
            raise ValueError(f"graphs + other: got {name} on one side only; expected it on both sides or on neither.")
        fields[name] = None if a is None or b is None else np.concatenate([a, b])
    return fields
