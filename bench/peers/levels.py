"""Turns a batch of raw structure arrays into index arrays of levels (NumPy), inside the timed part of every peer.

Rows are vertices in execution order: by level, all graphs of the batch together. The peers
that are levelled by hand, with autograd or without, run on these.
"""

from dataclasses import dataclass

import numpy as np

_LOOP_BELOW = 4000  # up to about here a plain loop over nodes beats one NumPy sweep a level


@dataclass(frozen=True)
class TreeLevels:
    """A batch of binary trees by height; rows [0, L) are the L leaves, then come M inner nodes."""

    words: np.ndarray  # (L,) word of each leaf row
    left: np.ndarray  # (M,) row of the first child, by inner node
    right: np.ndarray  # (M,) row of the second child
    sizes: list  # inner nodes a level, lowest first; sums to M
    roots: np.ndarray  # (G,) row of each root
    labels: np.ndarray  # (G,)

    @property
    def edges(self):
        """Children of the inner nodes of each level."""
        return [2 * n for n in self.sizes]

    def blocks(self):
        """(2M,) child rows, by level the first children and then the second ones."""
        sizes = np.asarray(self.sizes, np.int64)
        start = np.repeat(np.cumsum(sizes) - sizes, sizes) + np.arange(len(self.left))
        kids = np.empty(2 * len(self.left), np.int64)
        kids[start] = self.left
        kids[start + np.repeat(sizes, sizes)] = self.right
        return kids

    def pairs(self):
        """(2M,) child rows, the two children of a node side by side."""
        return np.stack([self.left, self.right], 1).reshape(-1)


@dataclass(frozen=True)
class ChainLevels:
    """A batch of chains by position; graphs longest first, so level t is a prefix of level t-1."""

    words: np.ndarray  # (N,)
    labels: np.ndarray  # (N,)
    sizes: list  # chains alive at each position; sums to N


def tree_levels(batch):
    """Rows and levels of a batch of trees."""
    left = np.concatenate([g["left"] for g in batch])
    right = np.concatenate([g["right"] for g in batch])
    word = np.concatenate([g["word"] for g in batch])
    counts = np.array([len(g["word"]) for g in batch])
    ends = np.cumsum(counts)
    leaves, inner = np.flatnonzero(left < 0), np.flatnonzero(left >= 0)
    shift = np.repeat(ends - counts, counts)[inner]
    left, right = left[inner] + shift, right[inner] + shift
    sweep = _loop if len(word) < _LOOP_BELOW else _sweep
    height = sweep(len(word), inner, left, right)
    order = np.argsort(height, kind="stable")
    row = np.empty(len(word), np.int64)
    row[leaves] = np.arange(len(leaves))
    row[inner[order]] = np.arange(len(leaves), len(word))
    return TreeLevels(
        words=word[leaves].astype(np.int64, copy=False),
        left=row[left[order]],
        right=row[right[order]],
        sizes=np.bincount(height)[1:].tolist() if len(inner) else [],
        roots=row[ends - 1],
        labels=np.array([g["label"] for g in batch], np.int64),
    )


def _loop(n, inner, left, right):
    """Heights of the inner nodes, one node at a time (post-order: children come first)."""
    height = [0] * n
    for v, a, b in zip(inner.tolist(), left.tolist(), right.tolist(), strict=True):
        a, b = height[a], height[b]
        height[v] = (a if a > b else b) + 1
    return np.array(height, np.int16)[inner]


def _sweep(n, inner, left, right):
    """Heights of the inner nodes, one level at a time: a node is ready when both children are."""
    done = np.ones(n, bool)
    done[inner] = False
    height = np.zeros(len(inner), np.int16)
    waiting, level = np.arange(len(inner)), 0
    while len(waiting):
        level += 1
        ready = done[left] & done[right]
        height[waiting[ready]] = level
        done[inner[waiting[ready]]] = True
        unready = ~ready
        waiting, left, right = waiting[unready], left[unready], right[unready]
    return height


def time_major(lengths):
    """Sequences that lie end to end, position by position, longest sequence first.

    Returns the row of each entry, how many sequences there are at each position, and the sequences, longest first.
    """
    lengths = np.asarray(lengths)
    order = np.argsort(-lengths, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    position = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    sizes = np.bincount(position)
    index = np.empty(len(position), np.int64)
    index[(np.cumsum(sizes) - sizes)[position] + np.repeat(rank, lengths)] = np.arange(len(position))
    return index, sizes, order


def chain_levels(batch):
    """Rows and levels of a batch of chains."""
    index, sizes, _ = time_major([len(g["words"]) for g in batch])
    words, labels = (np.concatenate([g[k] for g in batch]).astype(np.int64, copy=False) for k in ("words", "labels"))
    return ChainLevels(words[index], labels[index], sizes.tolist())


@dataclass(frozen=True)
class DagLevels:
    """A batch of graphs of any fan-in by height; rows are vertices by level."""

    words: np.ndarray  # (N,)
    sizes: list  # vertices a level; sums to N
    edges: list  # edges into each level; sums to E
    kids: np.ndarray  # (E,) row of the child of each edge, edges by level
    owners: np.ndarray  # (E,) its parent, within the parent's level
    roots: np.ndarray  # (G,)
    labels: np.ndarray  # (G,)


def dag_levels(batch):
    """Rows and levels of a batch of graphs of any fan-in."""
    counts = np.concatenate([np.diff(g["child_offsets"]) for g in batch])
    sizes = np.array([len(g["word"]) for g in batch])
    shift = np.cumsum(sizes) - sizes
    child = np.concatenate([g["children"] + s for g, s in zip(batch, shift, strict=True)])
    height, first, kids = [0] * len(counts), 0, child.tolist()
    for v, n in enumerate(counts.tolist()):  # children come first
        if n:
            height[v] = 1 + max([height[k] for k in kids[first : first + n]])
            first += n
    height = np.array(height)
    order = np.argsort(height, kind="stable")
    row = np.empty(len(order), np.int64)
    row[order] = np.arange(len(order))
    widths = np.bincount(height)
    owner = np.repeat(np.arange(len(counts)), counts)
    by_level = np.argsort(height[owner], kind="stable")
    edges = np.bincount(height[owner], minlength=len(widths))
    return DagLevels(
        words=np.concatenate([g["word"] for g in batch])[order],
        sizes=widths.tolist(),
        edges=edges.tolist(),
        kids=row[child[by_level]],
        owners=row[owner[by_level]] - np.repeat(np.cumsum(widths) - widths, edges),
        roots=row[np.cumsum(sizes) - 1],
        labels=np.array([g["label"] for g in batch]),
    )
