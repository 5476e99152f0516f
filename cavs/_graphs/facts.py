"""Facts about the graphs of a data set that decide the padded shapes of its batches."""

from typing import NamedTuple

import numpy as np

# Up to this many children per vertex, a task of W vertices simply has room for W * fan-in edges.
SMALL_FAN_IN = 4


class Facts(NamedTuple):
    """Facts about G graphs with V vertices."""

    sizes: np.ndarray  # (G,) vertices of each graph
    num_children: np.ndarray  # (V,)
    fan_in: np.ndarray  # (G,) largest number of children of a vertex
    levels: np.ndarray  # (G,) number of levels
    roots: np.ndarray  # (G,) number of vertices without parents
