"""Graphs from the edge arrays of PyTorch Geometric and DGL, neither of which is imported."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from jax.typing import ArrayLike

from cavs._graphs.checks import array_of, integers
from cavs._graphs.converters import EdgeArguments, edges_to_graphs
from cavs._graphs.graphs import Graphs

# Arrays, sequences of integers, and CPU tensors of PyTorch: whatever `np.asarray` accepts.
Integers: TypeAlias = ArrayLike | Sequence[int] | Any


def from_edge_index(
    edge_index: Integers,
    *,
    num_nodes: Integers | None = None,
    batch: Integers | None = None,
    ptr: Integers | None = None,
    input_id: Integers | None = None,
    label: Integers | None = None,
    edge_attr: ArrayLike | Any | None = None,
    **fields: Any,
) -> Graphs:
    """Creates graphs from edges (source, target) in the format of PyTorch Geometric and DGL.

    The target gathers the state of the source. The children of a vertex have the order of its edges. The vertices keep their
    rows, so `data.x` can be passed as `inputs`. Give exactly one of `num_nodes`, `ptr` and `batch`, or a `Data` or `Batch` of
    PyTorch Geometric, whose `x` and `edge_attr` the graphs get.

    ```python
    cavs.interop.from_edge_index(data, label=data.y)                                # PyG: a Data, or a Batch of them
    cavs.interop.from_edge_index(batch.edge_index, ptr=batch.ptr, edge_attr=batch.edge_attr)
    cavs.interop.from_edge_index(g.edges(), num_nodes=g.batch_num_nodes())          # DGL: one graph or a batch
    ```

    Args:
        edge_index: int[2, E], or a pair of int[E]: sources, then targets, as rows over all graphs. Arrays or CPU tensors.
            Or an object with `edge_index`, one of `ptr`, `batch` and `num_nodes`, and optionally `x` and `edge_attr`.
        num_nodes: the number of vertices, or (G,) of each graph.
        batch: (V,) the graph of each vertex, ascending from 0.
        ptr: (G + 1,) the first row of each graph, and V.
        input_id: (V,) as in [`cavs.from_edges`][].
        label: (V,) as in [`cavs.from_edges`][].
        edge_attr: num[E, ...], a row for each edge in the order of `edge_index`, as PyTorch Geometric has them; DGL keeps
            them in `g.edata`. `Graphs.edge_attr` has the order of the children. Inside F,
            `v.gather_all(lambda state, edge: ..., edges=True)` reads them.
        **fields: `kind`, `vocab` and others, as in [`cavs.from_edges`][].

    Returns:
        The graphs.

    Raises:
        TypeError: not exactly one of `num_nodes`, `ptr` and `batch` is given.
        ValueError: an array has a wrong shape, `batch` is not sorted or skips a graph, or an edge is invalid as in
            [`cavs.from_edges`][]. Undirected graphs have cycles and are invalid.
    """
    if isinstance(edge_index, list | tuple) and edge_index and hasattr(edge_index[0], "edge_index"):
        raise TypeError(
            f"from_edge_index: edge_index: got a list of {len(edge_index)} graphs; expected one, or a Batch. Write "
            "cavs.Graphs.concat([from_edge_index(data) for data in data_set])."
        )
    if hasattr(edge_index, "edge_index"):
        data: Any = edge_index
        if num_nodes is None and ptr is None and batch is None:
            ptr, batch = (getattr(data, name, None) for name in ("ptr", "batch"))
            batch = batch if ptr is None else None
            num_nodes = getattr(data, "num_nodes", None) if ptr is None and batch is None else None
        edge_attr = getattr(data, "edge_attr", None) if edge_attr is None else edge_attr
        edge_index, fields = data.edge_index, {"x": getattr(data, "x", None)} | fields
    sizes = {"num_nodes": num_nodes, "batch": batch, "ptr": ptr}
    passed = [name for name, value in sizes.items() if value is not None]
    if len(passed) != 1:
        raise TypeError(
            f"from_edge_index: got {' and '.join(passed) or 'none'} of num_nodes, batch and ptr; expected one of them, which "
            "defines how many vertices each graph has. For one PyG graph write num_nodes=data.num_nodes."
        )
    (name,) = passed
    edges, fields = _edges_of(edge_index), fields | {"input_id": input_id, "label": label, "edge_attr": edge_attr}
    names = EdgeArguments("from_edge_index", name, "edge_index", "edge_index[:, {}]", child_first=True)
    return edges_to_graphs(_sizes_of(name, sizes[name]), edges, fields, names)


def _edges_of(edge_index: Integers) -> np.ndarray:
    """(E, 2) pairs (parent, child)."""
    pair = edge_index if isinstance(edge_index, tuple | list) else np.atleast_1d(np.asarray(edge_index))
    ends = [array_of("from_edge_index: edge_index", x) for x in pair]
    if len(ends) != 2 or ends[0].ndim != 1 or ends[0].shape != ends[1].shape:
        shape = pair.shape if isinstance(pair, np.ndarray) else [x.shape for x in ends]
        raise ValueError(
            f"from_edge_index: edge_index: got shape {shape}; expected (2, E): sources, then targets. For an array of pairs "
            "(parent, child) write cavs.from_edges."
        )
    edges = np.stack([ends[1], ends[0]], 1)
    if edges.size and edges.dtype.kind not in "iu":
        raise ValueError(
            f"from_edge_index: edge_index: got dtype {edges.dtype}; expected integers. Write edge_index.astype(np.int64)."
        )
    return edges


def _sizes_of(name: str, value: Integers) -> np.ndarray:
    """(G,) vertices of each graph, from the argument `name`."""
    if name == "num_nodes":
        return np.atleast_1d(np.asarray(value))
    rows = integers(f"from_edge_index: {name}", value)
    if name == "ptr":
        if not rows.size or rows[0] != 0:
            raise ValueError(
                f"from_edge_index: ptr: got {rows}; expected (G + 1,) integers from 0: the first row of each graph, and V."
            )
        return np.diff(rows)
    if rows.size and (rows[0] != 0 or not np.isin(np.diff(rows), (0, 1)).all()):
        raise ValueError(
            "from_edge_index: batch: got values that are not 0, ..., 0, 1, ..., 1, 2, ...; expected the graph of each "
            "vertex, ascending from 0."
        )
    return np.bincount(rows)
