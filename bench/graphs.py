"""Trees, chains, directed acyclic graphs and sentences, drawn from a seed (NumPy only; also for Python 3.8).

A graph is a dict of arrays (see `bench.peers`). Trees have `left`, `right`, `word`, `label`. Chains have
`words`, `labels`. Graphs of any fan-in have `child_offsets`, `children`, `word`, `label`. Children come before their parents,
and the only root is last.

Samples of the applications are dicts of arrays, too:

- sentences: `words`, `label`
- pairs: `source`, `target`, `labels` (one per target word)
- character lattices: `words`, `labels`, `spans` (first and last character of each word of the lexicon), `span_words`
- tagged sentences: `words`, `labels`, and, if rare words are spelled, `spellings`: the characters of each word that is -1
"""

from __future__ import annotations

import numpy as np

VOCAB, CLASSES = 10_000, 5
GATES = 12  # kinds of gates in a netlist
CHARACTERS = 100

# SST's training trees (Socher et al., 2013): the number of leaves at these quantiles, and how a constituent of n leaves is
# split. These are counts, except that large constituents have slightly more single leaves to make up for independent draws.
_QUANTILES = (0, 0.01, 0.05, 0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 0.95, 0.99, 1)
_LEAVES = (2, 3, 5, 7, 11, 12, 13, 16, 18, 21, 24, 25, 27, 32, 35, 43, 52)
# Largest n -> probabilities that the left child has one leaf, the right one, the left two, the right two.
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
    """Draws binary trees with the leaves, heights and level widths of SST. Of 1,000 or more, one has SST's maximum."""
    leaves = np.rint(np.interp(rng.random(count), _QUANTILES, _LEAVES)).astype(int)
    if count >= 1000:
        leaves[0] = _LEAVES[-1]
    return [binary_tree(rng, int(n), _cut_like_sst) for n in leaves]


def _cut_like_sst(rng, n: int) -> int:
    """Draws the number of leaves of the left child of a constituent of n leaves."""
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
    """Draws a binary tree in post-order. `cut(rng, n)` returns how many of n leaves go left."""
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
    left, right = np.array(left), np.array(right)
    word = np.where(left < 0, rng.integers(VOCAB, size=len(left)), -1)
    return {"left": left, "right": right, "word": word, "label": int(rng.integers(CLASSES))}


def complete(rng, count: int, leaves: int = 256) -> list:
    """Draws complete binary trees (Tree-FC of TensorFlow Fold)."""
    return [binary_tree(rng, leaves, lambda _, n: n // 2) for _ in range(count)]


def chains(rng, count: int, shortest: int = 5, longest: int = 60) -> list:
    """Draws sentences of a language model. Few labels replace the vocabulary, so that the softmax does not dominate."""
    lengths = rng.integers(shortest, longest + 1, count).tolist()
    return [{"words": rng.integers(VOCAB, size=n), "labels": rng.integers(CLASSES, size=n)} for n in lengths]


def fixed(rng, count: int, length: int = 64) -> list:
    """Draws chains of one length."""
    return chains(rng, count, length, length)


def dependency(rng, count: int) -> list:
    """Draws trees like dependency trees: every vertex has a word and 0 to 12 children, most of them leaves."""
    return [_tree_of_any_fan_in(rng, 1 + int(n)) for n in np.interp(rng.random(count), _QUANTILES, _LEAVES)]


def _tree_of_any_fan_in(rng, vertices: int) -> dict:
    children = []

    def grow(n):
        remaining = n - 1
        kids = []
        while remaining and len(kids) < 12:
            size = 1 + int(rng.integers(remaining) * rng.random() ** 1.5)
            kids.append(grow(size))
            remaining -= size
        if remaining:
            kids.append(grow(remaining))
        children.append(kids)
        return len(children) - 1

    grow(vertices)
    return _any_fan_in(rng, children)


def lattice(rng, count: int) -> list:
    """Draws sequence lattices: a chain, and words that skip 2 to 4 positions."""
    graphs = []
    for n in rng.integers(10, 60, count).tolist():
        children, ends = [[]], [[0]]  # ends: the vertices that end at each position
        for t in range(1, n):
            starts = [t - 1] + [t - k for k in (2, 3, 4) if t >= k and rng.random() < 0.25]
            ending = []
            for s in starts:
                ending.append(len(children))
                children.append(list(ends[s]))
            ends.append(ending)
        if len(ends[-1]) > 1:
            children.append(list(ends[-1]))
        graphs.append(_any_fan_in(rng, children))
    return graphs


def deep(rng, count: int, levels: int = 300) -> list:
    """Draws deep, narrow DAGs: each vertex reads the previous one and one of the eight before it."""
    return [
        _any_fan_in(rng, [[]] + [sorted({v - 1, max(0, v - 2 - int(rng.integers(8)))}) for v in range(1, levels)])
        for _ in range(count)
    ]


def wide(rng, count: int, width: int = 128) -> list:
    """Draws wide, shallow DAGs: six layers, three children each in the layer below, and a root over all unread vertices."""
    graphs = []
    for _ in range(count):
        children = [[] for _ in range(width)]
        for layer in range(1, 6):
            children += rng.integers((layer - 1) * width, layer * width, (width, 3)).tolist()
        read = {k for kids in children for k in kids}
        children.append([v for v in range(len(children)) if v not in read])
        graphs.append(_any_fan_in(rng, children))
    return graphs


def netlist(rng, count: int, gates: int = 400) -> list:
    """Draws circuits: inputs, gates of fan-in 1 to 9 (mostly 2) that read nearby ones, and a root over all unread vertices."""
    graphs, inputs = [], gates // 8
    for _ in range(count):
        fan_in = rng.choice([1, 2, 3, 4, 5, 8, 9], size=gates, p=[0.2, 0.6, 0.08, 0.06, 0.03, 0.02, 0.01])
        children = [[] for _ in range(inputs)]
        for n in fan_in.tolist():
            back = np.minimum(rng.geometric(0.02, n), len(children))
            children.append(sorted({len(children) - int(b) for b in back}))
        read = {k for kids in children for k in kids}
        children.append([v for v in range(len(children)) if v not in read])
        graphs.append(_any_fan_in(rng, children, GATES))
    return graphs


def _any_fan_in(rng, children: list, words: int = VOCAB) -> dict:
    counts = np.array([len(c) for c in children])
    return {
        "child_offsets": np.concatenate([[0], np.cumsum(counts)]),
        "children": np.array([k for c in children for k in c], dtype=np.int64),
        "word": rng.integers(words, size=len(children)),
        "label": int(rng.integers(CLASSES)),
    }


def sentences(rng, count: int) -> list:
    """Draws sentences of a treebank's lengths, for pyramids: 19.2 words on average, standard deviation 9.3."""
    lengths = np.clip(np.rint(rng.gamma(4.26, 4.5, count)), 2, 52).astype(int)
    return [{"words": rng.integers(VOCAB, size=n), "label": int(rng.integers(CLASSES))} for n in lengths.tolist()]


def pairs(rng, count: int) -> list:
    """Draws sentence pairs with the lengths of a small English-Japanese corpus: 9.3 and 13.7 words on average."""
    source = np.clip(np.rint(rng.gamma(5.6, 1.66, count)), 2, 54).astype(int)
    target = np.clip(np.rint(source * rng.normal(1.47, 0.28, count)), 2, 66).astype(int)
    return [
        {"source": rng.integers(VOCAB, size=s), "target": rng.integers(VOCAB, size=t), "labels": rng.integers(CLASSES, size=t)}
        for s, t in np.stack([source, target], 1).tolist()
    ]


def characters(rng, count: int) -> list:
    """Draws character lattices: 44 characters on average, and a word of 2 to 4 characters at every second one."""
    samples = []
    for n in np.clip(np.rint(rng.gamma(3.0, 14.7, count)), 5, 211).astype(int).tolist():
        first = np.flatnonzero(rng.random(n) < 0.53)
        last = first + rng.choice([1, 2, 3], size=len(first), p=[0.7, 0.2, 0.1])
        spans = np.stack([first, last], 1)[last < n]
        samples.append(
            {
                "words": rng.integers(VOCAB, size=n),
                "labels": rng.integers(CLASSES, size=n),
                "spans": spans,
                "span_words": rng.integers(VOCAB, size=len(spans)),
            }
        )
    return samples


def tagged(rng, count: int) -> list:
    """Draws sentences of WikiNER's lengths with a label per word: 24.5 words on average, standard deviation 11.9."""
    lengths = np.clip(np.rint(rng.gamma(4.24, 5.79, count)), 1, 144).astype(int)
    return [{"words": rng.integers(VOCAB, size=n), "labels": rng.integers(CLASSES, size=n)} for n in lengths.tolist()]


def spelled(rng, count: int) -> list:
    """Draws the same with spelled rare words: one in eight, 7.5 letters on average, standard deviation 2.8.

    In WikiNER one word in eight is seen fewer than 5 times.
    """
    samples = tagged(rng, count)
    for sample in samples:
        rare = rng.random(len(sample["words"])) < 0.125
        sample["words"][rare] = -1
        letters = np.clip(np.rint(rng.gamma(7.0, 1.07, int(rare.sum()))), 1, 34).astype(int)
        sample["spellings"] = [rng.integers(CHARACTERS, size=n) for n in letters.tolist()]
    return samples
