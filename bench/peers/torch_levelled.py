"""Peer: PyTorch levelled by hand, gradients by autograd.

    pip install torch

What a careful PyTorch user writes for one model: one batch per level over all graphs, one product
for all leaves (or all words of a chain), and one product for all gates.
Timed: levels from the raw arrays, forward, `torch.autograd.grad`, SGD.

Several later levels read the states of a level. If all states were in one table, each level's
gradient would be as large as the table; with a list, each level would concatenate the list.
Therefore the table holds only live rows: per level, one `index_select` moves the children to the
front and keeps the rows that a later level still reads. This was as fast as or faster than a
preallocated table, a list with `cat`, and a list split by reader, at every batch size.
"""

import numpy as np
import torch

from bench.peers.levels import chain_levels, tree_levels
from bench.peers.torch_peer import Autograd


class TorchLevelled(Autograd):
    """One model, trained by autograd over batched levels."""

    def _net(self, batch):
        levels = chain_levels(batch) if self._cell == "lstm" else tree_levels(batch)
        forward = {"tree_lstm": self._tree_lstm, "tree_fc": self._tree_fc, "lstm": self._lstm}[self._cell]
        return levels.words, lambda x: forward(x, levels), levels.labels

    def _tree_lstm(self, x, levels):
        """Root states; a row of the table is [h, c]."""
        table = self._tree_lstm_leaf(x)
        return carry(table, levels.sizes, levels.edges, levels.blocks(), levels.roots, self._tree_lstm_inner)[:, : self._width]

    def _tree_lstm_leaf(self, x):
        i, o, u = torch.addmm(self._p["b_iou"], x, self._p["w_iou"]).chunk(3, 1)
        c = i.sigmoid() * u.tanh()
        return torch.cat([o.sigmoid() * c.tanh(), c], 1)

    def _tree_lstm_inner(self, level, kids):
        p, n, width = self._p, len(kids) // 2, self._p["u_f"].shape[0]
        h, c = kids.split(width, 1)
        io, u = torch.addmm(p["b_iou"], h[:n] + h[n:], p["u_iou"]).split([2 * width, width], 1)
        i, o = io.sigmoid().chunk(2, 1)
        fc = torch.addmm(p["b_f"], h, p["u_f"]).sigmoid() * c
        c = torch.addcmul(fc[:n] + fc[n:], i, u.tanh())
        return torch.cat([o * c.tanh(), c], 1)

    def _tree_fc(self, x, levels):
        return carry(x, levels.sizes, levels.edges, levels.pairs(), levels.roots, self._tree_fc_inner)

    def _tree_fc_inner(self, level, kids):
        return torch.addmm(self._p["b"], kids.view(-1, 2 * len(self._p["b"])), self._p["u"]).tanh()

    def _lstm(self, x, levels):
        """Returns the states of all positions. Chains are sorted by length, longest first, so the last rows end first."""
        p, width = self._p, self._p["u"].shape[0]
        inputs = torch.addmm(p["b"], x, p["w"]).split(levels.sizes)
        h, c, states = None, None, []
        for t, gates in enumerate(inputs):
            if t:
                gates = torch.addmm(gates, h[: len(gates)], p["u"])
            ifo, g = gates.split([3 * width, width], 1)
            i, f, o = ifo.sigmoid().chunk(3, 1)
            ig = i * g.tanh()
            c = torch.addcmul(ig, f, c[: len(gates)]) if t else ig
            h = o * c.tanh()
            states.append(h)
        return torch.cat(states)


def carry(table, sizes, edges, kids, roots, inner):
    """Runs the levels above the rows of `table`, and returns the rows of the roots.

    `inner(level, rows)` maps the children's rows of a level, as many as `edges` says, to its own, as many as `sizes` says.
    """
    reader = np.full(len(table) + sum(sizes), len(sizes))  # last level that reads a row; roots: none
    reader[kids] = np.repeat(
        np.arange(len(sizes)), np.asarray(edges, np.int64)
    )  # of several readers, as in a DAG, the last one stays
    reader[roots] = len(sizes)  # outputs stay until the end, if they are children, too
    place = np.empty(len(reader), np.int64)  # of a live row in the table
    live, total, first = np.arange(len(table)), len(table), 0
    place[live] = live
    takes = []
    for t, (n, read) in enumerate(zip(sizes, edges, strict=True)):
        rest = live[reader[live] > t]
        takes.append(place[np.concatenate([kids[first : first + read], rest])])
        live = np.concatenate([rest, np.arange(total, total + n)])
        place[live] = np.arange(len(live))
        total, first = total + n, first + read
    # One transfer for the indices of all levels.
    takes.append(place[roots])
    indices = torch.from_numpy(np.concatenate(takes)).to(table.device).split([len(t) for t in takes])
    for t, (index, read) in enumerate(zip(indices[:-1], edges, strict=True)):
        now, later = table.index_select(0, index).split([read, len(index) - read])
        table = torch.cat([later, inner(t, now)])
    return table.index_select(0, indices[-1])
