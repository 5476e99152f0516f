"""RvNN, TD-RNN and TD-LSTM of VPPS (section IV) by hand in PyTorch, for `torch_applications`.

One batch per level. The sentences of pyramids are sorted by length, longest first, so sentences that end are the last rows.
"""

import numpy as np
import torch

from bench.peers.levels import tree_levels
from bench.peers.torch_levelled import carry


def rvnn(net, batch):
    p, levels = net.p, tree_levels(batch)

    def inner(kids):
        return torch.addmm(p["b"], kids.view(-1, 2 * net.width), p["u"]).tanh()

    def forward(x):
        return carry(torch.addmm(p["b_leaf"], x, p["w"]).tanh(), levels, levels.pairs(), inner)

    return levels.words, forward, levels.labels


def td_rnn(net, batch):
    p = net.p

    def combine(kids):
        return torch.addmm(p["b"], kids.view(-1, 2 * net.width), p["u"]).tanh()

    return _pyramid(net, batch, lambda x: x, combine)


def td_lstm(net, batch):
    p, h = net.p, net.width

    def combine(kids):
        kids = kids.view(-1, 2, 2 * h)
        z = torch.addmm(p["b"], kids[:, :, :h].reshape(-1, 2 * h), p["u"])
        gates, g = z.split([4 * h, h], 1)
        i, o, f = gates.sigmoid().split([h, h, 2 * h], 1)
        c = torch.addcmul((f.view(-1, 2, h) * kids[:, :, h:]).sum(1), i, g.tanh())
        return torch.cat([o * c.tanh(), c], 1)

    return _pyramid(net, batch, lambda x: torch.cat([x, torch.zeros_like(x)], 1), combine)


def _pyramid(net, batch, first, combine):
    batch = sorted(batch, key=lambda g: -len(g["words"]))
    lengths = np.array([len(g["words"]) for g in batch])
    pairs, ended = [], []
    for k in range(lengths[0]):
        alive = lengths[lengths > k] - k
        ended.append(int((alive == 1).sum()))
        keep = np.ones(alive.sum(), bool)
        keep[np.cumsum(alive) - 1] = False
        left = np.flatnonzero(keep)
        pairs.append(np.stack([left, left + 1], 1).reshape(-1))
    sizes = [len(x) for x in pairs]

    def forward(x):
        table, roots = first(x), []
        for n, index in zip(ended, net.send(np.concatenate(pairs)).split(sizes), strict=True):
            if n:
                roots.append(table[len(table) - n :, : net.width])
            if len(index):
                table = combine(table.index_select(0, index))
        return torch.cat(roots[::-1])

    return np.concatenate([g["words"] for g in batch]), forward, np.array([g["label"] for g in batch])
