"""Peer: dynamic declaration with on-the-fly operation batching, as DyNet does it, over PyTorch's CPU operators.

    pip install torch

After Neubig, Goldberg, Dyer, "On-the-fly Operation Batching in Dynamic Computation Graphs"
(2017). Inside the clock, every step: each sample DECLARES its own expression graph out of
fine-grained nodes (look-up, affine, slice, sigmoid, tanh, product, sum, concatenation, loss);
nodes of equal signature are batched by the agenda of the paper: of the signatures with a ready
node, the one of least average depth goes next, with all its ready nodes. Each batch is executed
as one operator, then the batches in reverse for the gradients, then SGD.

As in DyNet, values live in a pool, a batch's results lie together, and an operand whose rows do
not lie together is first gathered. The Python overhead is kept low: rows, operands and contiguity
of all batches are found by a few NumPy calls (and see `dynet_graphs.py`).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from bench.peers.dynet_graphs import BINARY, DECLARE, LOOKUP, LOSS, by_agenda
from bench.peers.torch_peer import TorchPeer


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


class _Operator(NamedTuple):
    forward: Callable  # writes the result `y` of the operands `x` and `x2`
    backward: Callable  # returns the gradients of both operands


def _sum_backward(dy, y, x, x2, label):
    dy = dy.clone()  # it lies in the pool that it is added to, which index_add_ does not take
    return dy, dy


def _loss_backward(dy, y, x, x2, label):
    d = torch.softmax(x, 1)
    return d.scatter_add_(1, label[:, None], torch.full_like(dy, -1.0)).mul_(dy), None


# A slice's operand is already cut down to the columns.
_COPY = _Operator(lambda y, x, x2, label: y.copy_(x), lambda dy, y, x, x2, label: (dy, None))
_SIGMOID = _Operator(
    lambda y, x, x2, label: torch.sigmoid(x, out=y),
    lambda dy, y, x, x2, label: (torch.ops.aten.sigmoid_backward(dy, y), None),
)
_TANH = _Operator(
    lambda y, x, x2, label: torch.tanh(x, out=y), lambda dy, y, x, x2, label: (torch.ops.aten.tanh_backward(dy, y), None)
)
_PRODUCT = _Operator(lambda y, x, x2, label: torch.mul(x, x2, out=y), lambda dy, y, x, x2, label: (dy * x2, dy * x))
_SUM = _Operator(lambda y, x, x2, label: torch.add(x, x2, out=y), _sum_backward)
_CONCAT = _Operator(lambda y, x, x2, label: torch.cat([x, x2], 1, out=y), lambda dy, y, x, x2, label: dy.chunk(2, 1))
_LOSS = _Operator(  # softmax cross entropy of each row against its label
    lambda y, x, x2, label: torch.neg(torch.log_softmax(x, 1).gather(1, label[:, None]), out=y), _loss_backward
)


class TorchDynetLike(TorchPeer):
    """One model; each sample declares its own graph."""

    def __init__(self, cell, params, threads=2, device="cpu"):
        super().__init__(cell, params, threads, device)
        self._declare, p = DECLARE[cell], self._p
        embed, hidden, classes = p["embed"].shape[1], *p["out_w"].shape
        weights = {
            "tree_lstm": [("w_iou", "b_iou"), ("u_iou", "b_iou"), ("u_f", "b_f")],
            "tree_fc": [("u", "b")],
            "td_rnn": [("u", "b")],
            "rvnn": [("u", "b"), ("w", "b_leaf")],
            "lstm": [("w", "b"), ("u",)],
        }[cell]
        self._affine = [_Affine(*(p[k] for k in names)) for names in (("out_w", "out_b"), *weights)]
        gates = p[weights[0][0]].shape[1]
        # By signature: operator, width of its operands and of its result, columns that it reads.
        self._signatures = [
            (None, None, embed, None),
            (_LOSS, classes, 1, None),
            (_SIGMOID, hidden, hidden, None),
            (_TANH, hidden, hidden, None),
            (_PRODUCT, hidden, hidden, None),
            (_SUM, hidden, hidden, None),
            (_SUM, gates, gates, None),
            (_CONCAT, hidden, 2 * hidden, None),
            *((_COPY, gates, hidden, slice(k * hidden, (k + 1) * hidden)) for k in range(4)),
            *((a, *a.w.shape, None) for a in self._affine),
        ]
        self._width = np.array([s[2] for s in self._signatures])
        self._pools = {}

    def schedule(self, batch):
        """Graph construction: the declaration of every sample, and the batches of the agenda."""
        *graph, extra = ([] for _ in range(5))
        for sample in batch:
            self._declare(sample, *graph, extra)
        op, a, b, depth = (np.array(x, np.int32) for x in graph)
        order, bounds = by_agenda(op, a, b, depth)
        return self._tasks(op, a, b, extra, order, bounds)

    @torch.no_grad()
    def _train(self, batch, lr):
        tasks, losses, d_losses = self.schedule(batch)

        operands = []
        for s, y, _, x, x2, extra in tasks:
            if s == LOOKUP:
                torch.index_select(self._p["embed"], 0, extra, out=y)
                continue
            x, x2 = _read(x), _read(x2)
            self._signatures[s][0].forward(y, x, x2, extra)
            operands.append((x, x2))
        loss = losses.mean()

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
            members = np.flatnonzero(width == w)
            at[members] = np.arange(len(members))
            if w not in self._pools or len(self._pools[w][0]) < len(members):
                self._pools[w] = torch.empty(2, len(members) + len(members) // 4, w, device=self._device)
            pools[w] = self._pools[w][:, : len(members)]
            pools[w][1].zero_()
        row = np.empty(len(op), np.int64)
        row[order] = at
        extras = np.zeros(len(op), np.int64)
        extras[op <= LOSS] = extra
        starts, ends = bounds[:-1], bounds[1:]
        operands = []
        for arg in (a, b):
            rows = row[arg[order]]
            breaks = np.cumsum(np.diff(rows, prepend=rows[0]) != 1)
            contiguous = breaks[starts] == breaks[ends - 1]
            operands.append((contiguous.tolist(), rows[starts].tolist(), self._send(rows)))
        extras = self._send(extras[order])

        def operand(k, pool, start, n, batch):
            contiguous, first, rows = operands[k]
            if contiguous[batch]:
                rows = slice(first[batch], first[batch] + n)
                return pool[0][rows], pool[1][rows], None
            return pool[0], pool[1], rows[start : start + n]

        tasks = []
        batches = zip(sig[starts].tolist(), at[starts].tolist(), starts.tolist(), (ends - starts).tolist(), strict=True)
        for batch, (s, first, start, n) in enumerate(batches):
            _, width_in, width_out, columns = self._signatures[s]
            y, dy = pools[width_out][:, first : first + n].unbind(0)
            x = x2 = None
            if s != LOOKUP:
                pool = pools[width_in] if columns is None else pools[width_in][:, :, columns]
                x = operand(0, pool, start, n, batch)
                x2 = operand(1, pool, start, n, batch) if s in BINARY else None
            tasks.append((s, y, dy, x, x2, extras[start : start + n] if s <= LOSS else None))
        return tasks, *pools[1]


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
