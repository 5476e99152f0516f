"""The fields of several `Graphs` that are concatenated."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import jax
import numpy as np

from cavs._graphs.flat import number_names

NAMES = {"vocab": "input_id", "kind_names": "kind", "label_names": "label"}  # fields of names, and of the ids that index them
VALUES = ("kind", "label", "input_id", "graph_label", "edge_attr")  # the fields that are arrays of values


def joined_fields(parts: Sequence[Any], renumber: bool) -> dict[str, Any]:
    """Returns the fields of concatenated graphs.

    `parts`: the graphs, at least one. `renumber`: whether ids of different names are numbered anew, by the first appearance of
    the names. Raises `ValueError` if the graphs differ in their names, or some lack a field that others have, or dtypes or
    shapes differ.
    """
    what = "Graphs.concat" if renumber else "graphs + other"
    fields: dict[str, Any] = {name: _values(what, name, [getattr(part, name) for part in parts]) for name in VALUES}
    leaves, trees = zip(*(jax.tree.flatten(part.x) for part in parts), strict=True)
    if any(tree != trees[0] for tree in trees):
        raise ValueError(f"{what}: x: got {trees[0]} and others; expected the same structure in all graphs.")
    fields["x"] = trees[0].unflatten([_values(what, "x", same) for same in zip(*leaves, strict=True)])
    for names, ids in NAMES.items():
        own = [getattr(part, names) for part in parts]
        fields[names] = own[0]
        if all(x == own[0] for x in own):
            continue
        if not renumber or None in own:
            hint = "" if renumber else " Write cavs.Graphs.concat([graphs, other]), which numbers them anew"
            hint += ", or graphs + other.with_vocab(graphs.vocab)" * (bool(hint) and names == "vocab")
            raise ValueError(f"{what}: got different {names}; expected the same in all.{hint}{'.' * bool(hint)}")
        new, fields[names] = number_names([*chain.from_iterable(own)])
        fields[names] = tuple(fields[names])
        tables = np.split(new, np.cumsum([len(x) for x in own])[:-1])
        if fields[ids] is not None:
            each = zip(parts, tables, strict=True)
            fields[ids] = np.concatenate([np.append(table, np.int32(-1))[getattr(part, ids)] for part, table in each])
    return fields


def _values(what: str, name: str, arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    given = [x for x in arrays if x is not None]
    if given and len(given) < len(arrays):
        raise ValueError(
            f"{what}: got {name} in some graphs only; expected it in all or in none. Write graphs.replace({name}=None) to "
            "leave it out."
        )
    kinds = dict.fromkeys(f"{x.dtype}{list(x.shape[1:])}" for x in given)
    if len(kinds) > 1:
        raise ValueError(f"{what}: {name}: got {' and '.join(kinds)}; expected the same dtype and shape in all graphs.")
    return np.concatenate(given) if given else None
