"""DAGNN (Thost and Chen, 2021) by hand in PyTorch, for `torch_applications`: level by level, with a table of the rows that are
read again."""

import numpy as np
import torch

from bench.peers.levels import dag_levels


def dagnn(net, batch):
    p = net.p
    lv = dag_levels(batch)
    takes, rests = _live_rows(lv.sizes, lv.edges, lv.kids, lv.roots)

    def forward(x):
        z = torch.addmm(p["b"], x, p["w"]).split(lv.sizes)
        index = net.send(np.concatenate(takes)).split([len(t) for t in takes])
        owner = net.send(lv.owners).split(lv.edges)
        table = _gru(net, z[0], None)
        for zt, at, rest, now in zip(z[1:], index[:-1], rests, owner[1:], strict=True):
            h, later = table.index_select(0, at).split([len(at) - rest, rest])
            e = (h @ p["s"]).exp()  # |h| < 1: no need to take the maximum off
            total = x.new_zeros(len(zt)).index_add(0, now, e)
            m = x.new_zeros(len(zt), net.width).index_add(0, now, e[:, None] * h) / total[:, None]
            table = torch.cat([later, _gru(net, zt, m)])
        return table.index_select(0, index[-1])

    return lv.words, forward, lv.labels


def _gru(net, z, m):
    p, width = net.p, net.width
    x_rz, x_n = z.split([2 * width, width], 1)
    if m is None:
        r, z = x_rz.sigmoid().chunk(2, 1)
        return (1 - z) * torch.addcmul(x_n, r, p["d"]).tanh()
    m_rz, m_n = (m @ p["u"]).split([2 * width, width], 1)
    r, z = (x_rz + m_rz).sigmoid().chunk(2, 1)
    n = torch.addcmul(x_n, r, m_n + p["d"]).tanh()
    return torch.lerp(n, m, z)


def _live_rows(sizes, edges, kids, roots):
    """For each level the rows of the table to take: its edges' children, then those read later; at last the roots."""
    total = sum(sizes)
    reader = np.full(total, len(sizes))
    reader[kids] = np.repeat(np.arange(len(sizes)), edges)  # the last of several
    reader[roots] = len(sizes)
    unread = np.ones(total, bool)
    unread[kids] = unread[roots] = False
    reader[unread] = 0
    place, live, takes, rests = np.empty(total, np.int64), np.arange(sizes[0]), [], []
    place[live] = live
    first, edge = sizes[0], 0
    for t in range(1, len(sizes)):
        rest = live[reader[live] > t]
        takes.append(place[np.concatenate([kids[edge : edge + edges[t]], rest])])
        rests.append(len(rest))
        live = np.concatenate([rest, np.arange(first, first + sizes[t])])
        place[live] = np.arange(len(live))
        first, edge = first + sizes[t], edge + edges[t]
    return [*takes, place[roots]], rests
