"""Graphs from the edge arrays of PyTorch Geometric and DGL. Imports neither."""

from typing import Any

import numpy as np

from cavs._graphs.converters import from_edges
from cavs._graphs.graphs import Graphs


def from_edge_index(
    edge_index: Any,
    *,
    num_nodes: Any = None,
    batch: Any = None,
    ptr: Any = None,
    input_id: Any = None,
    label: Any = None,
    **fields: Any,
) -> Graphs:
    """Graphs from edges (source, target) as PyTorch Geometric and DGL hold them: the target gathers the source's state.

    ```python
    cavs.interop.from_edge_index(data.edge_index, num_nodes=data.num_nodes)         # PyG: one graph
    cavs.interop.from_edge_index(batch.edge_index, ptr=batch.ptr)                   # PyG: a Batch
    cavs.interop.from_edge_index(g.edges(), num_nodes=g.batch_num_nodes())          # DGL: one graph or a batch
    ```

    A vertex's children are ordered as its edges are. Rows of the vertices stay as they are: `data.x` is `inputs`.

    **Arguments:**

    - `edge_index`: (2, E) integers, or a pair of (E,): sources, then targets, numbered through all graphs. Arrays or
      tensors on the CPU.
    - one of `num_nodes`: an int, or (G,) vertices of each graph; `ptr`: (G + 1,) first row of each graph, and V;
      `batch`: (V,) the graph of each vertex, ascending from 0.
    - `input_id`, `label` (V,) and `kind`, `vocab`, ... as in `cavs.from_edges`.

    **Raises:** `TypeError` where not exactly one of the three is given; `ValueError` for arrays of another shape, for a
    `batch` that is not sorted or skips a graph, and as `cavs.from_edges`: undirected graphs have cycles.
    """
    given = {name: value for name, value in (("num_nodes", num_nodes), ("batch", batch), ("ptr", ptr)) if value is not None}
    if len(given) != 1:
        raise TypeError(
            f"from_edge_index: got {' and '.join(given) or 'none'} of num_nodes, batch and ptr, wanted one of them: how many "
            "vertices each graph has. Of one PyG graph write num_nodes=data.num_nodes."
        )
    pair = edge_index if isinstance(edge_index, tuple | list) else np.asarray(edge_index)
    ends = [np.asarray(x) for x in pair]
    if len(ends) != 2 or ends[0].ndim != 1 or ends[0].shape != ends[1].shape:
        shape = pair.shape if isinstance(pair, np.ndarray) else [x.shape for x in ends]
        raise ValueError(
            f"from_edge_index: edge_index has shape {shape}, "
            "wanted (2, E): sources, then targets. For pairs (parent, child) a row there is cavs.from_edges."
        )
    edges = np.stack([ends[1], ends[0]], 1)
    edges = edges if len(edges) else np.zeros((0, 2), np.int64)
    name, value = next(iter(given.items()))
    sizes = np.asarray(value)
    if name == "num_nodes" and sizes.ndim == 0:
        sizes = sizes[None]
    if name == "ptr":
        if sizes.ndim != 1 or not sizes.size or sizes[0] != 0:
            raise ValueError(f"from_edge_index: ptr is {sizes}, wanted (G + 1,) integers from 0: the first row of each graph.")
        sizes = np.diff(sizes)
    if name == "batch":
        if sizes.ndim != 1 or (sizes.size and (sizes[0] != 0 or not np.isin(np.diff(sizes), (0, 1)).all())):
            raise ValueError(
                "from_edge_index: batch is not 0, ..., 0, 1, ..., 1, 2, ...; wanted the graph of each vertex, ascending from 0."
            )
        sizes = np.bincount(sizes) if sizes.size else np.zeros(0, np.int64)
    return from_edges(sizes, edges, input_id=input_id, label=label, **fields)
