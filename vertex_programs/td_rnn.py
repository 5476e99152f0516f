"""The time-delay recurrent network of VPPS, and its graphs."""

import dataclasses

import numpy as np

import cavs
from cavs.vertex_programs._types import Integers
from cavs.vertex_programs.tree_fc import TreeFC


def pyramids(lengths: Integers, *, words: Integers | None = None) -> cavs.Graphs:
    """Builds time-delay graphs over sentences.

    The first row of a graph holds the words. Each next row combines the neighbours of the row below, up to a single vertex.

    Args:
        lengths: The number of words of each sentence, int[G], at least 1. A sentence of n words has n (n + 1) / 2 vertices
            and n levels.
        words: `input_id` of the words, (sum of lengths,). It is -1 at inner vertices.

    Returns:
        Graphs whose first n vertices are the words, followed by row after row. The root is last. Child 0 is the left one.

    Raises:
        ValueError: If a length is below 1, or `words` has the wrong number of entries.
    """
    n = np.asarray(lengths)
    if n.ndim != 1 or not np.issubdtype(n.dtype, np.integer) or (n < 1).any():
        raise ValueError(f"lengths: got {lengths!r}; expected a 1-d array of integers >= 1, the words of each sentence.")
    rows = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)  # of each graph: 0 .. n - 1
    width = np.repeat(n, n) - rows
    inner = np.repeat(rows > 0, width)
    total = n * (n + 1) // 2
    number = np.arange(total.sum()) - np.repeat(np.cumsum(total) - total, total)
    left = (number - np.repeat(width + 1, width))[inner]  # the row below has one vertex more
    input_id = None
    if words is not None:
        if len(words) != n.sum():
            raise ValueError(f"words: got {len(words)} entries; expected {n.sum()}, the sum of lengths.")
        input_id = np.full(len(inner), -1)
        input_id[~inner] = words
    return cavs.Graphs.build(total, 2 * inner, np.stack([left, left + 1], 1).reshape(-1), input_id=input_id)


@dataclasses.dataclass(frozen=True)
class TDRNN(TreeFC):
    """Time-delay RNN: VPPS (Khorasani et al., 2018), section IV, after Waibel et al., 1989, and Peddinti et al., 2015.

    One composition combines neighbours, row after row. The model is `TreeFC` over `TDRNN.graphs(lengths)`.

        leaf:  h = x
        inner: h = tanh(h_left U_left + h_right U_right + b)

    Vertices push h. The state of a word is its vector, so x has H entries. Inner vertices do not read x.

    `init` returns a dict of parameters: `u` (2H, H), with U_left above U_right, and `b` (H,).

    Attributes:
        hidden: H, the size of the state and of x.
        dtype: The dtype of the initial parameters.
    """

    graphs = staticmethod(pyramids)
