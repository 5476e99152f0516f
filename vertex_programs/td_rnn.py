"""The time-delay recurrent network of VPPS, and the pyramids that it runs over."""

import dataclasses
from typing import Any

import numpy as np

import cavs
from cavs.vertex_programs.tree_fc import TreeFC


def pyramids(lengths: Any, *, words: Any = None) -> cavs.Graphs:
    """Time-delay graphs over sentences: a row of words, above it a row that combines neighbours, and so on to one vertex.

    **Arguments:** `lengths` (G,), at least 1 each: n words make n (n + 1) / 2 vertices and n levels. `words` (sum of
    lengths,) becomes `input_id`, -1 at inner vertices.

    **Returns:** graphs whose first n vertices are the words, then row after row, the root last; child 0 is the left one.

    **Raises:** `ValueError` for a length below 1, or words of another number.
    """
    n = np.asarray(lengths)
    if n.ndim != 1 or not np.issubdtype(n.dtype, np.integer) or (n < 1).any():
        raise ValueError(f"pyramids: lengths is {lengths!r}, wanted a 1-d array of integers >= 1: the words of each sentence.")
    rows = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)  # of each graph: 0 .. n - 1
    width = np.repeat(n, n) - rows
    inner = np.repeat(rows > 0, width)
    total = n * (n + 1) // 2
    number = np.arange(total.sum()) - np.repeat(np.cumsum(total) - total, total)
    left = (number - np.repeat(width + 1, width))[inner]  # the row below has one vertex more
    input_id = None
    if words is not None:
        if len(words) != n.sum():
            raise ValueError(f"pyramids: words has {len(words)} entries, wanted {n.sum()}: the sum of lengths.")
        input_id = np.full(len(inner), -1)
        input_id[~inner] = words
    return cavs.Graphs.build(total, 2 * inner, np.stack([left, left + 1], 1).reshape(-1), input_id=input_id)


@dataclasses.dataclass(frozen=True)
class TDRNN(TreeFC):
    """Time-delay RNN: VPPS (Khorasani et al., 2018), section IV, after Waibel et al., 1989, and Peddinti et al., 2015.

    Neighbours are combined again and again by ONE composition: `TreeFC` over the graphs of `TDRNN.graphs(lengths)`,

        leaf:  h = x
        inner: h = tanh(h_left U_left + h_right U_right + b)

    A word's vector is its state, so x has `hidden` entries; inner vertices do not read x.

    **Fields:** `hidden`, H; `dtype` of the initial parameters.
    **Parameters:** `u` (2H, H), U_left above U_right; `b` (H,).
    **Pushes** h.
    """

    graphs = staticmethod(pyramids)
