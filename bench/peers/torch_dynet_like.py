"""Peer: dynamic declaration with on-the-fly operation batching, as DyNet does it, over PyTorch's CPU operators.

    pip install torch

After Neubig, Goldberg, Dyer, "On-the-fly Operation Batching in Dynamic Computation Graphs"
(2017). Inside the clock, every step: each sample DECLARES its own expression graph out of
fine-grained nodes (look-up, affine, slice, sigmoid, tanh, product, sum, concatenation, loss);
nodes of equal signature are batched by one of the two policies of the paper,

- "depth": nodes of equal depth and signature form a batch;
- "agenda": of the signatures with a ready node, the one of least average depth goes next,
  with all its ready nodes;

each batch is executed as one operator, then the batches in reverse for the gradients, then SGD.

As in DyNet, values live in a pool, a batch's results lie together, and an operand whose rows do
not lie together is first gathered. The Python overhead is kept low: a graph is four flat lists,
a signature a small int, a cell declares its nodes by one `extend` a list, and rows, operands
and contiguity of all batches are found by a few NumPy calls.
"""

import numpy as np
import torch

_LOOP_BELOW = 40_000  # nodes; below, the agenda is faster as a loop over nodes than as NumPy sweeps


class _Copy:
    """Look-ups and slices: the operand is itself the result."""

    def forward(self, y, x, x2, label):
        y.copy_(x)

    def backward(self, dy, y, x, x2, label):
        return dy, None


class _Affine:
    def __init__(self, w, b=None):
        self.w, self.b = w, b
        self.dw, self.db = torch.zeros_like(w), None if b is None else torch.zeros_like(b)

    def forward(self, y, x, x2, label):
        if self.b is None:
            torch.mm(x, self.w, out=y)
        else:
            torch.addmm(self.b, x, self.w, out=y)

    def backward(self, dy, y, x, x2, label):
        self.dw.addmm_(x.t(), dy)
        if self.b is not None:
            self.db.add_(dy.sum(0))
        return dy @ self.w.t(), None

    def sgd(self, lr):
        for p, d in ((self.w, self.dw), (self.b, self.db)):
            if p is not None:
                p.add_(d, alpha=-lr)
                d.zero_()


class _Sigmoid:
    def forward(self, y, x, x2, label):
        torch.sigmoid(x, out=y)

    def backward(self, dy, y, x, x2, label):
        return torch.ops.aten.sigmoid_backward(dy, y), None


class _Tanh:
    def forward(self, y, x, x2, label):
        torch.tanh(x, out=y)

    def backward(self, dy, y, x, x2, label):
        return torch.ops.aten.tanh_backward(dy, y), None


class _Product:
    def forward(self, y, x, x2, label):
        torch.mul(x, x2, out=y)

    def backward(self, dy, y, x, x2, label):
        return dy * x2, dy * x


class _Sum:
    def forward(self, y, x, x2, label):
        torch.add(x, x2, out=y)

    def backward(self, dy, y, x, x2, label):
        dy = dy.clone()  # it lies in the pool that it is added to, which index_add_ does not take
        return dy, dy


class _Concat:
    def forward(self, y, x, x2, label):
        torch.cat([x, x2], 1, out=y)

    def backward(self, dy, y, x, x2, label):
        return dy.chunk(2, 1)


class _Loss:
    """Softmax cross entropy of each row against its label."""

    def forward(self, y, x, x2, label):
        torch.neg(torch.log_softmax(x, 1).gather(1, label[:, None]), out=y)

    def backward(self, dy, y, x, x2, label):
        d = torch.softmax(x, 1)
        return d.scatter_add_(1, label[:, None], torch.full_like(dy, -1.0)).mul_(dy), None


LOOKUP, LOSS, SIGMOID, TANH, PRODUCT, SUM, SUM_GATES, CONCAT, SLICE_0, SLICE_1, SLICE_2, SLICE_3, OUT = range(13)
AFFINE_0, AFFINE_1, AFFINE_2 = 13, 14, 15  # the cell's own weights, in the order of its table


class TorchDynetLike:
    """One model, declared anew for every sample. `policy` is "depth" or "agenda"."""

    def __init__(self, cell, params, threads=2, policy="depth"):
        self._threads, self._policy = threads, policy
        self._p = p = {k: torch.tensor(v) for k, v in params.items()}
        embed, hidden, classes = p["embed"].shape[1], *p["out_w"].shape
        self._declare, tables = {
            "tree_lstm": (_declare_tree_lstm, [("w_iou", "b_iou"), ("u_iou", "b_iou"), ("u_f", "b_f")]),
            "tree_fc": (_declare_tree_fc, [("u", "b")]),
            "lstm": (_declare_lstm, [("w", "b"), ("u",)]),
        }[cell]
        # A signature: operator, width of its operands and of its result, columns that it reads.
        self._affine = [_Affine(*(p[k] for k in names)) for names in (*tables, ("out_w", "out_b"))]
        gates = p[tables[0][0]].shape[1]
        self._signatures = [
            (_Copy(), None, embed, None),
            (_Loss(), classes, 1, None),
            (_Sigmoid(), hidden, hidden, None),
            (_Tanh(), hidden, hidden, None),
            (_Product(), hidden, hidden, None),
            (_Sum(), hidden, hidden, None),
            (_Sum(), gates, gates, None),
            (_Concat(), hidden, 2 * hidden, None),
            *((_Copy(), gates, hidden, slice(k * hidden, (k + 1) * hidden)) for k in range(4)),
            *((a, *a.w.shape, None) for a in (self._affine[-1], *self._affine[:-1])),
        ]
        self._width = np.array([s[2] for s in self._signatures])
        self._pools = {}

    def params(self):
        return {k: v.numpy().copy() for k, v in self._p.items()}

    @torch.no_grad()
    def step(self, batch, lr=0.05):
        torch.set_num_threads(self._threads)
        graph = ([], [], [], [], [])
        for sample in batch:
            self._declare(sample, *graph)
        op, a, b, depth = (np.array(x, np.int32) for x in graph[:4])
        order, bounds = _by_depth(op, depth) if self._policy == "depth" else _by_agenda(op, a, b, depth)
        tasks, losses, d_losses = self._tasks(op, a, b, graph[4], order, bounds)

        operands = []
        for s, y, _, x, x2, extra in tasks:
            if s == LOOKUP:
                torch.index_select(self._p["embed"], 0, extra, out=y)
                continue
            x, x2 = _read(x), _read(x2)
            self._signatures[s][0].forward(y, x, x2, extra)
            operands.append((x, x2))
        loss = losses.mean().item()

        d_losses.fill_(1.0 / len(losses))
        for s, y, dy, to, to2, extra in reversed(tasks):
            if s == LOOKUP:
                self._p["embed"].index_add_(0, extra, dy, alpha=-lr)
                continue
            d, d2 = self._signatures[s][0].backward(dy, y, *operands.pop(), extra)
            _accumulate(to, d)
            _accumulate(to2, d2)
        for affine in self._affine:
            affine.sgd(lr)
        return loss

    def _tasks(self, op, a, b, extra, order, bounds):
        """Give every node a row of the pool of its width; one task a batch:
        signature, result, its gradient, operands as (values, gradients, rows or None), words or labels."""
        sig = op[order]
        width, at, pools = self._width[sig], np.empty(len(op), np.int64), {}
        for w in set(self._width[np.flatnonzero(np.bincount(op))].tolist()):
            mine = np.flatnonzero(width == w)
            at[mine] = np.arange(len(mine))
            if w not in self._pools or len(self._pools[w][0]) < len(mine):
                self._pools[w] = torch.empty(2, len(mine) + len(mine) // 4, w)
            pools[w] = self._pools[w][:, : len(mine)]
            pools[w][1].zero_()
        row = np.empty(len(op), np.int64)
        row[order] = at
        labels = np.zeros(len(op), np.int64)
        labels[op <= LOSS] = extra
        starts, ends = bounds[:-1], bounds[1:]
        operands = []
        for arg in (a, b):
            rows = row[arg[order]]
            breaks = np.cumsum(np.diff(rows, prepend=rows[0]) != 1)
            together = breaks[starts] == breaks[ends - 1]
            operands.append((together.tolist(), rows[starts].tolist(), torch.from_numpy(rows)))
        labels = torch.from_numpy(labels[order])

        def operand(k, pool, start, n, batch):
            together, first, rows = operands[k]
            if together[batch]:
                rows = slice(first[batch], first[batch] + n)
                return pool[0][rows], pool[1][rows], None
            return pool[0], pool[1], rows[start : start + n]

        tasks = []
        batches = zip(sig[starts].tolist(), at[starts].tolist(), starts.tolist(), (ends - starts).tolist())
        for batch, (s, first, start, n) in enumerate(batches):
            _, width_in, width_out, columns = self._signatures[s]
            y, dy = pools[width_out][:, first : first + n].unbind(0)
            x = x2 = None
            if s != LOOKUP:
                pool = pools[width_in] if columns is None else pools[width_in][:, :, columns]
                x = operand(0, pool, start, n, batch)
                x2 = operand(1, pool, start, n, batch) if s in _BINARY else None
            tasks.append((s, y, dy, x, x2, labels[start : start + n] if s <= LOSS else None))
        return tasks, *pools[1]


_BINARY = {PRODUCT, SUM, SUM_GATES, CONCAT}


def _read(operand):
    if operand is None:
        return None
    values, _, rows = operand
    return values if rows is None else values.index_select(0, rows)


def _accumulate(operand, d):
    if operand is None:
        return
    _, grads, rows = operand
    if rows is None:
        grads.add_(d)
    else:
        grads.index_add_(0, rows, d)


def _by_depth(op, depth):
    """Execution order and the bounds of its batches: equal depth and signature together."""
    key = depth * 16 + op
    order = np.argsort(key, kind="stable")
    cuts = np.flatnonzero(np.diff(key[order])) + 1
    return order, np.concatenate([[0], cuts, [len(op)]])


def _by_agenda(op, a, b, depth):
    """The same, by the agenda: least average depth first, over the signatures with a ready node."""
    node = np.arange(len(op))
    source, reader = np.concatenate([a, b]), np.concatenate([node, node])
    reader = reader[np.argsort(source, kind="stable")][np.count_nonzero(source < 0) :]
    first = np.concatenate([[0], np.cumsum(np.bincount(source[source >= 0], minlength=len(op)))])
    missing = (a >= 0).astype(np.int8) + (b >= 0)
    count = np.bincount(op, minlength=16)
    average = (np.bincount(op, depth, minlength=16) / np.maximum(count, 1)).tolist()
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
    for left, right, word in zip(tree["left"].tolist(), tree["right"].tolist(), tree["word"].tolist()):
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
            fc = (f1 if f1 > f2 else f2) + 3
            depth += (f1, f1 + 1, f1 + 2, f2, f2 + 1, f2 + 2, fc, d + 4, d + 5, d + 6)
            h.append(n + 18)
            c.append(n + 16)
    _declare_loss(h[-1], tree["label"], op, a, b, depth, extra)


def _declare_tree_fc(tree, op, a, b, depth, extra):
    h = []
    for left, right, word in zip(tree["left"].tolist(), tree["right"].tolist(), tree["word"].tolist()):
        n = len(op)
        if left < 0:
            extra.append(word)
            op.append(LOOKUP)
            a.append(-1)
            b.append(-1)
            depth.append(0)
            h.append(n)
        else:
            h1, h2 = h[left], h[right]
            d = max(depth[h1], depth[h2])
            op += (CONCAT, AFFINE_0, TANH)
            a += (h1, n, n + 1)
            b += (h2, -1, -1)
            depth += (d + 1, d + 2, d + 3)
            h.append(n + 2)
    _declare_loss(h[-1], tree["label"], op, a, b, depth, extra)


def _declare_lstm(chain, op, a, b, depth, extra):
    h = c = None
    for word, label in zip(chain["words"].tolist(), chain["labels"].tolist()):
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
