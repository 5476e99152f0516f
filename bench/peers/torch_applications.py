"""Peer: the applications of `bench.cells`, batched by hand in PyTorch, gradients by autograd.

    pip install torch

What a careful PyTorch user writes for each: sentences sorted by length so that those alive are a prefix, products of inputs as
one batch, one batch a level or position, gates in one product, nn.LSTM for the encoder, padded attention. Where a level reads
rows of several earlier ones, a table carries the live rows, as in `torch_levelled`. Inside the clock: indices from the raw
arrays, forward, `torch.autograd.grad`, SGD.
"""

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from bench.peers.levels import dag_levels, time_major, tree_levels
from bench.peers.torch_levelled import carry
from bench.peers.torch_peer import Autograd, from_torch, lstm_state, to_torch


class TorchApplication(Autograd):
    """One application. `p`: its parameters; `width`: hidden; `send`: an array to the device."""

    def __init__(self, cell, params, threads=2, device="cpu"):
        # The encoder is nn.LSTM's kernel, with its order of gates.
        super().__init__(cell, params, threads, device)
        self._p |= {k: to_torch(v.detach()).requires_grad_() for k, v in self._p.items() if k.startswith("encoder.")}
        self._weights = [v for k, v in self._p.items() if k != "embed"]
        self.p, self.width, self.send = self._p, self._width, self._send

    def _ours(self):
        return {k: from_torch(v) if k.startswith("encoder.") else v for k, v in self._p.items()}

    def _net(self, batch):
        return NETS[self._cell](self, batch)


def child_sum(net, batch):
    """A child-sum Tree-LSTM over graphs of any fan-in. A level's edges are gathered, multiplied and summed by `index_add`.

    States are one list of levels, concatenated once a level where children lie in several of them: the plain way.
    """
    lv = dag_levels(batch)

    def forward(x):
        kids, owners, roots = (net.send(a) for a in (lv.kids, lv.owners, lv.roots))
        return _child_sum_states(net.p, x, lv, kids.split(lv.edges), owners.split(lv.edges)).index_select(0, roots)

    return lv.words, forward, lv.labels


def _child_sum_states(p, x, lv, kids, owners):
    """h of all rows."""
    iou, forget = torch.addmm(p["b_iou"], x, p["w_iou"]).split(lv.sizes), torch.addmm(p["b_f"], x, p["w_f"]).split(lv.sizes)
    h = c = None
    for level, (gates, f, kid, owner) in enumerate(zip(iou, forget, kids, owners, strict=True)):
        if level:
            hk = h.index_select(0, kid)
            fk = torch.addmm(f.index_select(0, owner), hk, p["u_f"]).sigmoid()
            zeros = hk.new_zeros(len(f), hk.shape[1])
            gates = torch.addmm(gates, zeros.index_add(0, owner, hk), p["u_iou"])
            below = zeros.index_add(0, owner, fk * c.index_select(0, kid))
        i, o, u = gates.chunk(3, 1)
        ct = i.sigmoid() * u.tanh() + (below if level else 0)
        ht = o.sigmoid() * ct.tanh()
        h, c = (torch.cat([h, ht]), torch.cat([c, ct])) if level else (ht, ct)
    return h


def rvnn(net, batch):
    p, levels = net.p, tree_levels(batch)

    def inner(level, kids):
        return torch.addmm(p["b"], kids.view(-1, 2 * net.width), p["u"]).tanh()

    def forward(x):
        leaves = torch.addmm(p["b_leaf"], x, p["w"]).tanh()
        return carry(leaves, levels.sizes, levels.edges, levels.pairs(), levels.roots, inner)

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
    """One batch a level, of sentences sorted by length, longest first, so that sentences that end are the last rows."""
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


def encoder_decoder(net, batch):
    """Echo's encoder-decoder (section 2.2): nn.LSTM's kernel, padded attention."""
    p = net.p
    source, target = (np.array([len(g[k]) for g in batch]) for k in ("source", "target"))
    (s_index, s_sizes, by_source), (t_index, t_sizes, by_target) = time_major(source), time_major(target)
    s_rows = np.concatenate([g["source"] for g in batch])[s_index]
    t_rows, labels = (np.concatenate([g[k] for g in batch])[t_index] for k in ("target", "labels"))
    t_sizes = t_sizes.tolist()
    place = np.argsort(by_source)[by_target]  # of a target's source among the sorted sources
    mask = np.arange(source.max()) >= source[by_target][:, None]

    def forward(x):
        xs, xt = x.split([len(s_rows), len(t_rows)])
        out, (h, c) = _encode(net, xs, torch.from_numpy(s_sizes))
        at, hide = net.send(place), net.send(mask)
        states = pad_packed_sequence(out, batch_first=True)[0].index_select(0, at)
        keys = states @ p["key"]
        h, c = h[0].index_select(0, at), c[0].index_select(0, at)
        a, outs = torch.zeros_like(h), []
        for n, z in zip(t_sizes, torch.addmm(p["b"], xt, p["w"]).split(t_sizes), strict=True):
            z = torch.addmm(z, torch.cat([h[:n], a[:n]], 1), p["u"])
            h, c = lstm_state(z, c[:n])
            scores = (keys[:n] + (h @ p["query"])[:, None]).tanh() @ p["score"]
            weights = scores.masked_fill(hide[:n], -1e9).softmax(1)
            context = torch.bmm(weights[:, None], states[:n])[:, 0]
            a = (torch.cat([h, context], 1) @ p["out"]).tanh()
            outs.append(a)
        return torch.cat(outs)

    return np.concatenate([s_rows, t_rows]), forward, labels


def _encode(net, x, sizes):
    """nn.LSTM's kernel; its weights lie as it wants them (`to_torch`), its second bias is zero."""
    flat = [*(net.p["encoder." + k] for k in ("w", "u", "b")), x.new_zeros(4 * net.width)]
    zero = x.new_zeros(1, int(sizes[0]), net.width)
    out, h, c = torch._VF.lstm(x, sizes, (zero, zero), flat, True, 1, 0.0, True, False)
    return PackedSequence(out, sizes), (h, c)


def lattice_lstm(net, batch):
    """The lattice LSTM of Zhang and Yang (2018): position by position, with a table of words that have begun and not ended."""
    p, width = net.p, net.width
    order = np.argsort([-len(g["words"]) for g in batch], kind="stable")
    batch = [batch[g] for g in order]
    index, sizes, _ = time_major([len(g["words"]) for g in batch])
    chars, labels = (np.concatenate([g[k] for g in batch])[index] for k in ("words", "labels"))
    sizes = sizes.tolist()
    spans = np.concatenate([g["spans"] for g in batch]).reshape(-1, 2)
    rank = np.repeat(np.arange(len(batch)), [len(g["spans"]) for g in batch])
    by_start = np.argsort(spans[:, 0], kind="stable")
    spans, rank = spans[by_start], rank[by_start]
    words = np.concatenate([g["span_words"] for g in batch])[by_start]
    bounds = np.searchsorted(spans[:, 0], np.arange(len(sizes) + 1))
    live, plan = np.zeros(0, np.int64), []
    for t in range(len(sizes)):
        ends = spans[live, 1] == t
        kept, new = np.flatnonzero(~ends), np.arange(bounds[t], bounds[t + 1])
        plan.append((np.flatnonzero(ends), rank[live[ends]], kept, rank[new]))
        live = np.concatenate([live[kept], new])
    lengths = [len(a) for step in plan for a in step]

    def forward(x):
        index = iter(net.send(np.concatenate([a for step in plan for a in step])).split(lengths))
        xc, xw = x.split([len(chars), len(words)])
        z_chars = torch.addmm(p["b"], xc, p["w"]).split(sizes)
        z_links = torch.addmm(p["b_link"], xc, p["w_link"]).split(sizes)
        z_words = iter(torch.addmm(p["b_word"], xw, p["w_word"]).split(np.diff(bounds).tolist()))
        h = c = x.new_zeros(sizes[0], width)
        table, outs = x.new_zeros(0, width), []
        for n, z, z_link in zip(sizes, z_chars, z_links, strict=True):
            ended, owner, kept, starts = (next(index) for _ in range(4))
            ifo, g = torch.addmm(z, h[:n], p["u"]).split([3 * width, width], 1)
            i, f, o = ifo.sigmoid().chunk(3, 1)
            g = g.tanh()
            chain = torch.addcmul(i * g, f, c[:n])
            if len(ended):
                c_word = table.index_select(0, ended)
                link = torch.addmm(z_link.index_select(0, owner), c_word, p["u_link"]).sigmoid().exp()
                e = i.exp()
                mixed = (e * g).index_add(0, owner, link * c_word) / e.index_add(0, owner, link)
                has = torch.zeros(n, 1, dtype=torch.bool, device=x.device).index_fill_(0, owner, True)
                c = torch.where(has, mixed, chain)
            else:
                c = chain
            h = o * c.tanh()
            outs.append(h)
            z_word = next(z_words)
            if len(ended):
                table = table.index_select(0, kept)
            if len(starts):
                i_f, g = torch.addmm(z_word, h.index_select(0, starts), p["u_word"]).split([2 * width, width], 1)
                i, f = i_f.sigmoid().chunk(2, 1)
                table = torch.cat([table, torch.addcmul(i * g.tanh(), f, c.index_select(0, starts))])
        return torch.cat(outs)

    return np.concatenate([chars, words]), forward, labels


def dagnn(net, batch):
    """DAGNN (Thost and Chen, 2021): level by level, with a table of the rows that are read again."""
    p = net.p
    lv = dag_levels(batch)

    def forward(x):
        z = torch.addmm(p["b"], x, p["w"]).split(lv.sizes)
        owner = net.send(lv.owners).split(lv.edges)

        def inner(level, h):
            zt, now = z[level + 1], owner[level + 1]
            e = (h @ p["s"]).exp()  # |h| < 1: no need to take the maximum off
            total = x.new_zeros(len(zt)).index_add(0, now, e)
            m = x.new_zeros(len(zt), net.width).index_add(0, now, e[:, None] * h) / total[:, None]
            return _gru(net, zt, m)

        return carry(_gru(net, z[0], None), lv.sizes[1:], lv.edges[1:], lv.kids, lv.roots, inner)

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


# Each takes the peer and a batch, and returns what `Autograd._net` does. Indices of trees that depend on what is alive come
# later, level by level.
NETS = {
    "child_sum": child_sum,
    "rvnn": rvnn,
    "td_rnn": td_rnn,
    "td_lstm": td_lstm,
    "encoder_decoder": encoder_decoder,
    "lattice_lstm": lattice_lstm,
    "dagnn": dagnn,
}
