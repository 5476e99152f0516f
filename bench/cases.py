"""The named workloads of the bench: graphs, initial parameters, and the grids of the papers' figures (NumPy only).

Everything follows from a case's name and a seed, so every system gets the same batches and starts from the same parameters.
This file also runs under the older Python of DyNet's wheel (3.8): keep it free of what that lacks.

A graph is a dict of arrays, as `bench.peers` says: trees and two-child DAGs have `left`, `right`, `word`, `label`; chains have
`words`, `labels`; graphs of any fan-in have `child_offsets`, `children`, `word`, `label`. Children come before their parents,
the one root last.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from bench import applications

VOCAB, CLASSES, SEED = 10_000, 5, 0
CELLS = ("tree_lstm", "tree_fc", "lstm", "child_sum", *applications.CELLS)
# Steps of one round over distinct batches, quick and full: the same for every system.
QUICK_STEPS = {1: 64, 16: 16, 64: 6, 256: 3}
GPU_QUICK_STEPS = {1: 32, 16: 16, 64: 8, 256: 6}  # few, as each may be a new shape to compile; a sample is several passes
STEPS_FACTOR = 4  # a full run's rounds are longer by this


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload: `cell` over graphs of `shape`, at one hidden size, embedding width and batch size."""

    cell: str
    shape: str  # of SHAPES
    hidden: int
    batch: int
    embed: int
    classes: int = CLASSES

    @property
    def name(self) -> str:
        """Such as `tree_lstm/sst/h256/b64`; a width of embedding other than `hidden` is added."""
        name = f"{self.cell}/{self.shape}/h{self.hidden}/b{self.batch}"
        return name if self.embed == self.hidden else f"{name}/e{self.embed}"

    def steps(self, quick: bool, device: str = "cpu") -> int:
        """Training steps of one round, each over a batch of its own."""
        of = QUICK_STEPS if device == "cpu" else GPU_QUICK_STEPS
        near = min(of, key=lambda b: abs(np.log(b / self.batch)))
        steps = max(2, round(of[near] * near / self.batch))
        return steps if quick else steps * STEPS_FACTOR

    @property
    def epoch(self) -> int:
        """Samples of one epoch, for times a epoch: SST's training sentences; as many where the data are synthetic."""
        return 8544


def parse(name: str) -> Case:
    """The case of a name."""
    m = re.fullmatch(r"(\w+)/([\w-]+)/h(\d+)/b(\d+)(?:/e(\d+))?", name)
    if not m or m[1] not in CELLS or re.sub(r"-[\d-]+$", "", m[2]) not in SHAPES:
        raise ValueError(
            f"case {name!r}: wanted cell/shape/h<hidden>/b<batch>[/e<embed>], cells {CELLS}, shapes {tuple(SHAPES)}"
        )
    return Case(m[1], m[2], int(m[3]), int(m[4]), int(m[5] or m[3]))


# ---- parameters ----


def parameters(case: Case) -> dict:
    """Initial float32 parameters that all systems share."""
    e, h = case.embed, case.hidden
    shapes = {
        "tree_lstm": {"w_iou": (e, 3 * h), "u_iou": (h, 3 * h), "b_iou": (3 * h,), "u_f": (h, h), "b_f": (h,)},
        "tree_fc": {"u": (2 * h, h), "b": (h,)},
        "lstm": {"w": (e, 4 * h), "u": (h, 4 * h), "b": (4 * h,)},
    }
    shapes["child_sum"] = dict(shapes["tree_lstm"], w_f=(e, h))
    if case.cell in applications.CELLS:
        shapes[case.cell] = applications.shapes(case.cell, e, h)
    mine = dict(shapes[case.cell], embed=(VOCAB, e), out_w=(h, case.classes), out_b=(case.classes,))
    rng = np.random.default_rng(SEED)
    limit = h**-0.5
    return {
        k: ((2 * rng.random(s, dtype=np.float32) - 1) * np.float32(0.5 if k == "embed" else limit)) for k, s in mine.items()
    }


# ---- shapes ----

# SST's training trees (Socher et al., 2013): leaves at these quantiles, and where a constituent of n leaves is cut (as counted,
# but for the larger ones, where a little more of single leaves makes up for cuts being drawn independently).
_QUANTILES = (0, 0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95, 0.99, 1)
_LEAVES = (2, 3, 5, 7, 11, 12, 13, 16, 18, 21, 24, 25, 27, 32, 35, 43, 52)
# n up to -> probability that the left child is one leaf, the right is one, the left has two, the right has two.
_CUTS = (
    (3, (0.773, 0.227, 0, 0)),
    (4, (0.699, 0.170, 0.131, 0)),
    (5, (0.578, 0.150, 0.151, 0.121)),
    (8, (0.521, 0.165, 0.125, 0.043)),
    (12, (0.478, 0.172, 0.109, 0.017)),
    (20, (0.416, 0.195, 0.090, 0.007)),
    (30, (0.349, 0.233, 0.068, 0.003)),
    (10**9, (0.268, 0.264, 0.055, 0.001)),
)


def sst_like(rng, count: int) -> list:
    """Binary trees with the leaves, heights and level widths of SST's; the longest of `count` is made SST's longest."""
    leaves = np.rint(np.interp(rng.random(count), _QUANTILES, _LEAVES)).astype(int)
    if count >= 1000:
        leaves[0] = _LEAVES[-1]
    return [binary_tree(rng, int(n), _cut_like_sst) for n in leaves]


def _cut_like_sst(rng, n: int) -> int:
    """Leaves of the left child of a constituent of n."""
    if n == 2:
        return 1
    left_1, right_1, left_2, right_2 = next(p for limit, p in _CUTS if n <= limit)
    u = rng.random()
    for p, cut in ((left_1, 1), (right_1, n - 1), (left_2, 2), (right_2, n - 2)):
        if u < p:
            return cut
        u -= p
    return int(rng.integers(3, n - 2)) if n > 5 else int(rng.integers(1, n))


def binary_tree(rng, leaves: int, cut) -> dict:
    """A binary tree in post-order; `cut(rng, n)` says how many of n leaves go left."""
    left, right = [], []
    todo, done = [leaves], []
    while todo:
        n = todo.pop()
        if n == 0:  # both children are done
            b, a = done.pop(), done.pop()
            done.append(len(left))
            left.append(a)
            right.append(b)
        elif n == 1:
            done.append(len(left))
            left.append(-1)
            right.append(-1)
        else:
            k = cut(rng, n)
            todo += (0, n - k, k)
    return _words(rng, np.array(left), np.array(right))


def _words(rng, left, right) -> dict:
    word = np.where(left < 0, rng.integers(VOCAB, size=len(left)), -1)
    return {"left": left, "right": right, "word": word, "label": int(rng.integers(CLASSES))}


def complete(rng, count: int, leaves: int = 256) -> list:
    """Complete binary trees (Tree-FC of TensorFlow Fold)."""
    return [binary_tree(rng, leaves, lambda _, n: n // 2) for _ in range(count)]


def pyramid(rng, count: int) -> list:
    """Two-child DAGs over sentences: row k combines neighbours of row k - 1 (TD-RNN and TD-LSTM of VPPS)."""
    graphs = []
    for n in np.rint(np.interp(rng.random(count), _QUANTILES, _LEAVES)).astype(int).tolist():
        left, right, below = [-1] * n, [-1] * n, 0
        for width in range(n - 1, 0, -1):
            start = len(left)
            left += range(below, below + width)
            right += range(below + 1, below + width + 1)
            below = start
        graphs.append(_words(rng, np.array(left), np.array(right)))
    return graphs


def chains(rng, count: int, shortest: int = 5, longest: int = 60) -> list:
    """Sentences of a language model; few labels instead of all words, so that the softmax does not hide the net."""
    lengths = rng.integers(shortest, longest + 1, count).tolist()
    return [{"words": rng.integers(VOCAB, size=n), "labels": rng.integers(CLASSES, size=n)} for n in lengths]


def fixed(rng, count: int, length: int = 64) -> list:
    """Chains of one length."""
    return chains(rng, count, length, length)


def dependency(rng, count: int) -> list:
    """Dependency-like trees: every vertex has a word and 0 to 12 children, most of them leaves."""
    return [_tree_of_any_fan_in(rng, 1 + int(n)) for n in np.interp(rng.random(count), _QUANTILES, _LEAVES)]


def _tree_of_any_fan_in(rng, vertices: int) -> dict:
    children = []

    def grow(n):
        left = n - 1
        kids = []
        while left and len(kids) < 12:
            size = 1 + int(rng.integers(left) * rng.random() ** 1.5)
            kids.append(grow(size))
            left -= size
        if left:
            kids.append(grow(left))
        children.append(kids)
        return len(children) - 1

    grow(vertices)
    return _any_fan_in(rng, children)


def lattice(rng, count: int) -> list:
    """Sequence lattices: a chain, and words that skip over 2 to 4 positions."""
    graphs = []
    for n in rng.integers(10, 60, count).tolist():
        children, ends = [[]], [[0]]  # ends: the vertices that end at each position
        for t in range(1, n):
            starts = [t - 1] + [t - k for k in (2, 3, 4) if t >= k and rng.random() < 0.25]
            here = []
            for s in starts:
                here.append(len(children))
                children.append(list(ends[s]))
            ends.append(here)
        if len(ends[-1]) > 1:
            children.append(list(ends[-1]))
        graphs.append(_any_fan_in(rng, children))
    return graphs


def deep(rng, count: int, levels: int = 300) -> list:
    """Deep, narrow DAGs: each vertex reads the one before and one of the eight before that."""
    return [
        _any_fan_in(rng, [[]] + [sorted({v - 1, max(0, v - 2 - int(rng.integers(8)))}) for v in range(1, levels)])
        for _ in range(count)
    ]


def wide(rng, count: int, width: int = 128) -> list:
    """Wide, shallow DAGs: six layers, three children each from the layer below, a root over all that nothing else reads."""
    graphs = []
    for _ in range(count):
        children = [[] for _ in range(width)]
        for layer in range(1, 6):
            children += rng.integers((layer - 1) * width, layer * width, (width, 3)).tolist()
        read = {k for kids in children for k in kids}
        children.append([v for v in range(len(children)) if v not in read])
        graphs.append(_any_fan_in(rng, children))
    return graphs


def _any_fan_in(rng, children: list) -> dict:
    counts = np.array([len(c) for c in children])
    return {
        "child_offsets": np.concatenate([[0], np.cumsum(counts)]),
        "children": np.array([k for c in children for k in c], dtype=np.int64),
        "word": rng.integers(VOCAB, size=len(children)),
        "label": int(rng.integers(CLASSES)),
    }


SHAPES = {
    "sst": sst_like,
    "complete": complete,
    "pyramid": pyramid,
    "chains": chains,
    "fixed": fixed,
    "dependency": dependency,
    "lattice": lattice,
    "deep": deep,
    "wide": wide,
    **applications.SHAPES,
}


def dataset(case: Case, steps: int, path: str | None = None) -> list:
    """`steps` batches of graphs; those of shape `sst` come from the file at `path` (see `pack`) where one is given."""
    shape, *numbers = case.shape.split("-")
    rng = np.random.default_rng([SEED, sum(map(ord, case.shape))])
    count = steps * case.batch
    if path and shape == "sst":
        graphs = unpack(path)
        order = rng.permutation(len(graphs))
        graphs = [graphs[order[i % len(graphs)]] for i in range(count)]
    else:
        graphs = SHAPES[shape](rng, count, *map(int, numbers))
    return [graphs[i * case.batch : (i + 1) * case.batch] for i in range(steps)]


def pack(graphs: list, path: str) -> None:
    """Trees to an .npz that any worker reads."""
    left, right, word = (np.concatenate([g[k] for g in graphs]) for k in ("left", "right", "word"))
    counts, label = np.array([len(g["word"]) for g in graphs]), np.array([g["label"] for g in graphs])
    np.savez(path, counts=counts, label=label, left=left, right=right, word=word)


def unpack(path: str) -> list:
    """The trees of an .npz by `pack`; words beyond the vocabulary of the bench are folded into it."""
    with np.load(path) as f:
        z = {k: f[k] for k in f.files}
    ends = np.cumsum(z["counts"])
    word = np.where(z["word"] < 0, -1, z["word"] % VOCAB)
    return [
        {"left": z["left"][e - n : e], "right": z["right"][e - n : e], "word": word[e - n : e], "label": int(c)}
        for e, n, c in np.stack([ends, z["counts"], z["label"]], 1).tolist()
    ]


def gflop(case: Case, batches: list) -> float:
    """GFLOP of the matrix products of an average training step: forward, and twice that backward."""
    e, h, total = case.embed, case.hidden, 0
    for batch in batches:
        for g in batch:
            if case.cell in applications.CELLS:
                total += applications.multiply_adds(case.cell, e, h, case.classes, g)
                continue
            if case.cell == "lstm":
                n = len(g["words"])
                total += n * (4 * e * h + h * case.classes) + (n - 1) * 4 * h * h
                continue
            total += h * case.classes
            if case.cell == "child_sum":
                inner = int((np.diff(g["child_offsets"]) > 0).sum())
                total += len(g["word"]) * 4 * e * h + inner * 3 * h * h + len(g["children"]) * h * h
            else:
                inner = int((g["left"] >= 0).sum())
                leaf_cost, inner_cost = (3 * e * h, 5 * h * h) if case.cell == "tree_lstm" else (0, 2 * h * h)
                total += (len(g["left"]) - inner) * leaf_cost + inner * inner_cost
    return 3 * 2 * total / len(batches) / 1e9
