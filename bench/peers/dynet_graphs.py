"""Expression graphs of the DyNet-like peer, and the agenda that batches them (NumPy, no torch).

A graph is flat lists, one entry a node: signature (a small int), first and second operand (a
node, or -1), depth; `extra` holds the words and labels of the look-ups and losses, in order. A
cell declares its nodes by one or two `extend`s a list rather than a call a node: in Python that
is as near as one comes to the cost of a C++ graph builder.
"""

import functools

import numpy as np

LOOKUP, LOSS, SIGMOID, TANH, PRODUCT, SUM, SUM_GATES, CONCAT, SLICE_0, SLICE_1, SLICE_2, SLICE_3, OUT = range(13)
AFFINE_0, AFFINE_1, AFFINE_2 = 13, 14, 15  # products with the cell's own weights
BINARY = {PRODUCT, SUM, SUM_GATES, CONCAT}
_SIGNATURES = 16
_LOOP_BELOW = 40_000  # nodes; below, the agenda is faster as a loop over nodes than as a sweep a batch


def by_agenda(op, a, b, depth):
    """Returns the execution order and the bounds of its batches.

    Among signatures with a ready node, the one with the least average depth comes first, with all its ready nodes.
    """
    node = np.arange(len(op))
    source, reader = np.concatenate([a, b]), np.concatenate([node, node])
    reader = reader[np.argsort(source, kind="stable")][np.count_nonzero(source < 0) :]
    first = np.concatenate([[0], np.cumsum(np.bincount(source[source >= 0], minlength=len(op)))])
    missing = (a >= 0).astype(np.int8) + (b >= 0)
    count = np.bincount(op, minlength=_SIGNATURES)
    average = (np.bincount(op, depth, minlength=_SIGNATURES) / np.maximum(count, 1)).tolist()
    run = _agenda_loop if len(op) < _LOOP_BELOW else _agenda_sweep
    batches = run(op, reader, first, missing, average)
    return np.concatenate(batches), np.cumsum([0, *map(len, batches)])


def _agenda_loop(op, reader, first, missing, average):
    """One node at a time."""
    ready = [[] for _ in average]
    for v in np.flatnonzero(missing == 0).tolist():
        ready[op[v]].append(v)
    op, reader, first, missing = (x.tolist() for x in (op, reader, first, missing))
    batches = []
    while any(ready):
        s = min((s for s, nodes in enumerate(ready) if nodes), key=average.__getitem__)
        batch, ready[s] = sorted(ready[s]), []
        batches.append(batch)
        for v in batch:
            for r in reader[first[v] : first[v + 1]]:
                missing[r] -= 1
                if not missing[r]:
                    ready[op[r]].append(r)
    return batches


def _agenda_sweep(op, reader, first, missing, average):
    """One batch at a time."""
    ready = [[] for _ in average]
    new, batches = np.flatnonzero(missing == 0), []
    while True:
        sigs = op[new]
        for s in np.flatnonzero(np.bincount(sigs)).tolist():
            ready[s].append(new[sigs == s])
        if not any(ready):
            return batches
        s = min((s for s, nodes in enumerate(ready) if nodes), key=average.__getitem__)
        batch, ready[s] = np.sort(np.concatenate(ready[s])), []
        batches.append(batch)
        count = first[batch + 1] - first[batch]
        ends = np.cumsum(count)
        reads = reader[np.repeat(first[batch] - ends + count, count) + np.arange(ends[-1])]
        np.subtract.at(missing, reads, 1)
        new = np.unique(reads[missing[reads] == 0])


def _declare_tree_lstm(tree, op, a, b, depth, extra):
    h, c = [], []
    for left, right, word in zip(tree["left"].tolist(), tree["right"].tolist(), tree["word"].tolist(), strict=True):
        n = len(op)
        if left < 0:
            extra.append(word)
            op += (LOOKUP, AFFINE_0, SLICE_0, SLICE_1, SLICE_2, SIGMOID, SIGMOID, TANH, PRODUCT, TANH, PRODUCT)
            a += (-1, n, n + 1, n + 1, n + 1, n + 2, n + 3, n + 4, n + 5, n + 8, n + 6)
            b += (-1, -1, -1, -1, -1, -1, -1, -1, n + 7, -1, n + 9)
            depth += (0, 1, 2, 2, 2, 3, 3, 3, 4, 5, 6)
            h.append(n + 10)
            c.append(n + 8)
        else:
            h1, h2, c1, c2 = h[left], h[right], c[left], c[right]
            f1, f2 = depth[h1] + 1, depth[h2] + 1
            d = (f1 if f1 > f2 else f2) + 1
            op += (SUM, AFFINE_1, SLICE_0, SLICE_1, SLICE_2, SIGMOID, SIGMOID, TANH, PRODUCT)
            a += (h1, n, n + 1, n + 1, n + 1, n + 2, n + 3, n + 4, n + 5)
            b += (h2, -1, -1, -1, -1, -1, -1, -1, n + 7)
            depth += (d - 1, d, d + 1, d + 1, d + 1, d + 2, d + 2, d + 2, d + 3)
            op += (AFFINE_2, SIGMOID, PRODUCT, AFFINE_2, SIGMOID, PRODUCT, SUM, SUM, TANH, PRODUCT)
            a += (h1, n + 9, n + 10, h2, n + 12, n + 13, n + 11, n + 8, n + 16, n + 6)
            b += (-1, -1, c1, -1, -1, c2, n + 14, n + 15, -1, n + 17)
            depth += (f1, f1 + 1, f1 + 2, f2, f2 + 1, f2 + 2, d + 2, d + 4, d + 5, d + 6)
            h.append(n + 18)
            c.append(n + 16)
    _declare_loss(h[-1], tree["label"], op, a, b, depth, extra)


def _declare_pairs(leaf, tree, op, a, b, depth, extra):
    """A tree whose inner vertices are pairs."""
    h = []
    for left, right, word in zip(tree["left"].tolist(), tree["right"].tolist(), tree["word"].tolist(), strict=True):
        h.append(_pair(h[left], h[right], op, a, b, depth) if left >= 0 else leaf(word, op, a, b, depth, extra))
    _declare_loss(h[-1], tree["label"], op, a, b, depth, extra)


def _declare_td_rnn(sentence, op, a, b, depth, extra):
    row = [_word(word, op, a, b, depth, extra) for word in sentence["words"].tolist()]
    while len(row) > 1:
        row = [_pair(h1, h2, op, a, b, depth) for h1, h2 in zip(row[:-1], row[1:], strict=True)]
    _declare_loss(row[0], sentence["label"], op, a, b, depth, extra)


def _layer(word, op, a, b, depth, extra):
    """tanh of the product of a look-up."""
    n = len(op)
    extra.append(word)
    op += (LOOKUP, AFFINE_1, TANH)
    a += (-1, n, n + 1)
    b += (-1, -1, -1)
    depth += (0, 1, 2)
    return n + 2


def _word(word, op, a, b, depth, extra):
    """A look-up alone."""
    extra.append(word)
    op.append(LOOKUP)
    a.append(-1)
    b.append(-1)
    depth.append(0)
    return len(op) - 1


def _pair(h1, h2, op, a, b, depth):
    """tanh of the product of two states side by side."""
    n, d = len(op), max(depth[h1], depth[h2])
    op += (CONCAT, AFFINE_0, TANH)
    a += (h1, n, n + 1)
    b += (h2, -1, -1)
    depth += (d + 1, d + 2, d + 3)
    return n + 2


def _declare_lstm(chain, op, a, b, depth, extra):
    h = c = None
    for word, label in zip(chain["words"].tolist(), chain["labels"].tolist(), strict=True):
        n = len(op)
        extra.append(word)
        if h is None:
            op += (LOOKUP, AFFINE_0, SLICE_0, SLICE_2, SLICE_3, SIGMOID, SIGMOID, TANH, PRODUCT, TANH, PRODUCT)
            a += (-1, n, n + 1, n + 1, n + 1, n + 2, n + 3, n + 4, n + 5, n + 8, n + 6)
            b += (-1, -1, -1, -1, -1, -1, -1, -1, n + 7, -1, n + 9)
            depth += (0, 1, 2, 2, 2, 3, 3, 3, 4, 5, 6)
            h, c = n + 10, n + 8
        else:
            d = depth[h] + 1
            op += (LOOKUP, AFFINE_0, AFFINE_1, SUM_GATES, SLICE_0, SLICE_1, SLICE_2, SLICE_3)
            a += (-1, n, h, n + 1, n + 3, n + 3, n + 3, n + 3)
            b += (-1, -1, -1, n + 2, -1, -1, -1, -1)
            depth += (0, 1, d, d + 1, d + 2, d + 2, d + 2, d + 2)
            op += (SIGMOID, SIGMOID, SIGMOID, TANH, PRODUCT, PRODUCT, SUM, TANH, PRODUCT)
            a += (n + 4, n + 5, n + 6, n + 7, n + 8, n + 9, n + 12, n + 14, n + 10)
            b += (-1, -1, -1, -1, n + 11, c, n + 13, -1, n + 15)
            depth += (d + 3, d + 3, d + 3, d + 3, d + 4, d + 4, d + 5, d + 6, d + 7)
            h, c = n + 16, n + 14
        _declare_loss(h, label, op, a, b, depth, extra)


def _declare_loss(h, label, op, a, b, depth, extra):
    n = len(op)
    op += (OUT, LOSS)
    a += (h, n)
    b += (-1, -1)
    depth += (depth[h] + 1, depth[h] + 2)
    extra.append(label)


DECLARE = {
    "tree_lstm": _declare_tree_lstm,
    "tree_fc": functools.partial(_declare_pairs, _word),
    "lstm": _declare_lstm,
    "td_rnn": _declare_td_rnn,
    "rvnn": functools.partial(_declare_pairs, _layer),
}
