"""Draws `batch.png`, the README's picture: `python docs/images/draw.py`, in the root of the repository."""

from pathlib import Path

import numpy as np

import cavs

HERE = Path(__file__).parent
SIZES = (15, 11, 7)  # vertices of the trees

graphs = cavs.read_trees(cavs.data.example("reviews.train"))
sizes = np.diff(graphs.vertex_offsets)
batch = graphs[[int(np.flatnonzero(sizes == size)[0]) for size in SIZES]]
cavs.schedule(batch).plot(HERE / "batch.png", batch)
