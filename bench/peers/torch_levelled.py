"""Peer: PyTorch levelled by hand, gradients by autograd.

    pip install torch

What a careful PyTorch user writes for each model: one batch per level over all graphs, one product for all leaves (or all words
of a chain), and one product for all gates. Sentences are sorted by length, so that those alive are a prefix. The encoder is
nn.LSTM's kernel, and its attention is padded.
Timed: levels from the raw arrays, forward, `torch.autograd.grad`, SGD.

Several later levels read the states of a level. If all states were in one table, each level's
gradient would be as large as the table; with a list, each level would concatenate the list.
Therefore the table holds only live rows (`carry`): per level, one `index_select` moves the children to the
front and keeps the rows that a later level still reads. This was as fast as or faster than a
preallocated table, a list with `cat`, and a list split by reader, at every batch size.
"""

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from bench.peers.levels import chain_levels, dag_levels, time_major, tree_levels
from bench.peers.torch_peer import Autograd, from_torch, lstm_state, to_torch


class TorchLevelled(Autograd):
    """One model. The method of its name takes a batch and returns what `Autograd._net` does.

    Indices of trees that depend on what is alive come later, level by level.
    """

    def __init__(self, cell, params, threads=2, device="cpu"):
        super().__init__(cell, params, threads, device)
        # The encoder's parameters lie in the order of nn.LSTM's gates.
        self._p |= {k: to_torch(v.detach()).requires_grad_() for k, v in self._p.items() if k.startswith("encoder.")}
        self._weights = [v for k, v in self._p.items() if k != "embed"]
        self._net = getattr(self, "_" + cell)

    def _ours(self):
        return {k: from_torch(v) if k.startswith("encoder.") else v for k, v in self._p.items()}

    def _tree_lstm(self, batch):
        """A row of the table is [h, c]."""
        p, width, lv = self._p, self._width, tree_levels(batch)

        def inner(level, kids):
            n = len(kids) // 2
            h, c = kids.split(width, 1)
            io, u = torch.addmm(p["b_iou"], h[:n] + h[n:], p["u_iou"]).split([2 * width, width], 1)
            i, o = io.sigmoid().chunk(2, 1)
            fc = torch.addmm(p["b_f"], h, p["u_f"]).sigmoid() * c
            c = torch.addcmul(fc[:n] + fc[n:], i, u.tanh())
            return torch.cat([o * c.tanh(), c], 1)

        def forward(x):
            i, o, u = torch.addmm(p["b_iou"], x, p["w_iou"]).chunk(3, 1)
            c = i.sigmoid() * u.tanh()
            leaves = torch.cat([o.sigmoid() * c.tanh(), c], 1)
            return carry(leaves, lv.sizes, lv.edges, lv.blocks(), lv.roots, inner)[:, :width]

        return lv.words, forward, lv.labels

    def _tree_fc(self, batch, leaves=lambda x: x):
        lv = tree_levels(batch)

        def forward(x):
            return carry(leaves(x), lv.sizes, lv.edges, lv.pairs(), lv.roots, lambda level, kids: self._pair(kids))

        return lv.words, forward, lv.labels

    def _rvnn(self, batch):
        return self._tree_fc(batch, lambda x: torch.addmm(self._p["b_leaf"], x, self._p["w"]).tanh())

    def _pair(self, kids):
        """Two children that lie side by side, through one layer."""
        return torch.addmm(self._p["b"], kids.view(-1, 2 * self._width), self._p["u"]).tanh()

    def _lstm(self, batch):
        """Chains are sorted by length, longest first, so the last rows end first."""
        p, lv = self._p, chain_levels(batch)

        def forward(x):
            h, c, states = None, None, []
            for t, gates in enumerate(torch.addmm(p["b"], x, p["w"]).split(lv.sizes)):
                n = len(gates)
                h, c = lstm_state(torch.addmm(gates, h[:n], p["u"]), c[:n]) if t else lstm_state(gates)
                states.append(h)
            return torch.cat(states)

        return lv.words, forward, lv.labels

    def _child_sum(self, batch):
        """A child-sum Tree-LSTM over graphs of any fan-in. A level's edges are gathered, multiplied and summed by `index_add`.

        States are one list of levels, concatenated once a level where children lie in several of them: the plain way.
        """
        p, lv = self._p, dag_levels(batch)

        def forward(x):
            kids, owners, roots = (self._send(a) for a in (lv.kids, lv.owners, lv.roots))
            iou, forget = (torch.addmm(p["b_" + k], x, p["w_" + k]).split(lv.sizes) for k in ("iou", "f"))
            h = c = None
            for level, (gates, f, kid, owner) in enumerate(
                zip(iou, forget, kids.split(lv.edges), owners.split(lv.edges), strict=True)
            ):
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
            return h.index_select(0, roots)

        return lv.words, forward, lv.labels

    def _td_rnn(self, batch):
        return self._pyramid(batch, lambda x: x, self._pair)

    def _td_lstm(self, batch):
        p, h = self._p, self._width

        def combine(kids):
            kids = kids.view(-1, 2, 2 * h)
            z = torch.addmm(p["b"], kids[:, :, :h].reshape(-1, 2 * h), p["u"])
            gates, g = z.split([4 * h, h], 1)
            i, o, f = gates.sigmoid().split([h, h, 2 * h], 1)
            c = torch.addcmul((f.view(-1, 2, h) * kids[:, :, h:]).sum(1), i, g.tanh())
            return torch.cat([o * c.tanh(), c], 1)

        return self._pyramid(batch, lambda x: torch.cat([x, torch.zeros_like(x)], 1), combine)

    def _pyramid(self, batch, first, combine):
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
            for n, index in zip(ended, self._send(np.concatenate(pairs)).split(sizes), strict=True):
                if n:
                    roots.append(table[len(table) - n :, : self._width])
                if len(index):
                    table = combine(table.index_select(0, index))
            return torch.cat(roots[::-1])

        return np.concatenate([g["words"] for g in batch]), forward, np.array([g["label"] for g in batch])

    def _encoder_decoder(self, batch):
        """Echo's encoder-decoder (section 2.2): nn.LSTM's kernel, padded attention."""
        p = self._p
        source, target = (np.array([len(g[k]) for g in batch]) for k in ("source", "target"))
        (s_index, s_sizes, by_source), (t_index, t_sizes, by_target) = time_major(source), time_major(target)
        s_rows = np.concatenate([g["source"] for g in batch])[s_index]
        t_rows, labels = (np.concatenate([g[k] for g in batch])[t_index] for k in ("target", "labels"))
        t_sizes = t_sizes.tolist()
        place = np.argsort(by_source)[by_target]  # of a target's source among the sorted sources
        mask = np.arange(source.max()) >= source[by_target][:, None]

        def forward(x):
            xs, xt = x.split([len(s_rows), len(t_rows)])
            out, (h, c) = self._encode(xs, torch.from_numpy(s_sizes))
            at, hide = self._send(place), self._send(mask)
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

    def _encode(self, x, sizes):
        """nn.LSTM's kernel. Its second bias is zero."""
        flat = [*(self._p["encoder." + k] for k in ("w", "u", "b")), x.new_zeros(4 * self._width)]
        zero = x.new_zeros(1, int(sizes[0]), self._width)
        out, h, c = torch._VF.lstm(x, sizes, (zero, zero), flat, True, 1, 0.0, True, False)
        return PackedSequence(out, sizes), (h, c)

    def _lattice_lstm(self, batch):
        """The lattice LSTM of Zhang and Yang (2018): position by position, with a table of words that have begun, not ended."""
        p, width = self._p, self._width
        batch = sorted(batch, key=lambda g: -len(g["words"]))
        lv = chain_levels(batch)
        spans = np.concatenate([g["spans"] for g in batch]).reshape(-1, 2)
        rank = np.repeat(np.arange(len(batch)), [len(g["spans"]) for g in batch])
        by_start = np.argsort(spans[:, 0], kind="stable")
        spans, rank = spans[by_start], rank[by_start]
        words = np.concatenate([g["span_words"] for g in batch])[by_start]
        bounds = np.searchsorted(spans[:, 0], np.arange(len(lv.sizes) + 1))
        live, plan = np.zeros(0, np.int64), []
        for t in range(len(lv.sizes)):
            ends = spans[live, 1] == t
            kept, new = np.flatnonzero(~ends), np.arange(bounds[t], bounds[t + 1])
            plan += (np.flatnonzero(ends), rank[live[ends]], kept, rank[new])
            live = np.concatenate([live[kept], new])

        def forward(x):
            index = iter(self._send(np.concatenate(plan)).split([len(a) for a in plan]))
            xc, xw = x.split([len(lv.words), len(words)])
            z_chars, z_links = (torch.addmm(p["b" + k], xc, p["w" + k]).split(lv.sizes) for k in ("", "_link"))
            z_words = torch.addmm(p["b_word"], xw, p["w_word"]).split(np.diff(bounds).tolist())
            h = c = x.new_zeros(lv.sizes[0], width)
            table, outs = x.new_zeros(0, width), []
            for n, z, z_link, z_word in zip(lv.sizes, z_chars, z_links, z_words, strict=True):
                ended, owner, kept, starts = (next(index) for _ in range(4))
                ifo, g = torch.addmm(z, h[:n], p["u"]).split([3 * width, width], 1)
                i, f, o = ifo.sigmoid().chunk(3, 1)
                g = g.tanh()
                c = torch.addcmul(i * g, f, c[:n])
                if len(ended):
                    c_word = table.index_select(0, ended)
                    link = torch.addmm(z_link.index_select(0, owner), c_word, p["u_link"]).sigmoid().exp()
                    e = i.exp()
                    mixed = (e * g).index_add(0, owner, link * c_word) / e.index_add(0, owner, link)
                    has_word = torch.zeros(n, 1, dtype=torch.bool, device=x.device).index_fill_(0, owner, True)
                    c = torch.where(has_word, mixed, c)
                    table = table.index_select(0, kept)
                h = o * c.tanh()
                outs.append(h)
                if len(starts):
                    i_f, g = torch.addmm(z_word, h.index_select(0, starts), p["u_word"]).split([2 * width, width], 1)
                    i, f = i_f.sigmoid().chunk(2, 1)
                    table = torch.cat([table, torch.addcmul(i * g.tanh(), f, c.index_select(0, starts))])
            return torch.cat(outs)

        return np.concatenate([lv.words, words]), forward, lv.labels

    def _dagnn(self, batch):
        """DAGNN (Thost and Chen, 2021): level by level, with a table of the rows that are read again."""
        p, lv = self._p, dag_levels(batch)

        def forward(x):
            z = torch.addmm(p["b"], x, p["w"]).split(lv.sizes)
            owner = self._send(lv.owners).split(lv.edges)

            def inner(level, h):
                zt, owners = z[level + 1], owner[level + 1]
                e = (h @ p["s"]).exp()  # |h| < 1: no need to take the maximum off
                total = x.new_zeros(len(zt)).index_add(0, owners, e)
                m = x.new_zeros(len(zt), self._width).index_add(0, owners, e[:, None] * h) / total[:, None]
                return self._gru(zt, m)

            return carry(self._gru(z[0]), lv.sizes[1:], lv.edges[1:], lv.kids, lv.roots, inner)

        return lv.words, forward, lv.labels

    def _gru(self, z, m=None):
        p, width = self._p, self._width
        x_rz, x_n = z.split([2 * width, width], 1)
        if m is None:
            r, z = x_rz.sigmoid().chunk(2, 1)
            return (1 - z) * torch.addcmul(x_n, r, p["d"]).tanh()
        m_rz, m_n = (m @ p["u"]).split([2 * width, width], 1)
        r, z = (x_rz + m_rz).sigmoid().chunk(2, 1)
        n = torch.addcmul(x_n, r, m_n + p["d"]).tanh()
        return torch.lerp(n, m, z)


def carry(table, sizes, edges, kids, roots, inner):
    """Runs the levels above the rows of `table`, and returns the rows of the roots.

    `inner(level, rows)` maps the children's rows of a level, as many as `edges` says, to its own, as many as `sizes` says.
    """
    reader = np.full(len(table) + sum(sizes), len(sizes))  # last level that reads a row; roots: none
    reader[kids] = np.repeat(np.arange(len(sizes)), np.asarray(edges, int))  # of several readers, as in a DAG, the last stays
    reader[roots] = len(sizes)  # outputs stay until the end, if they are children, too
    place = np.empty(len(reader), np.int64)  # of a live row in the table
    live, total, first = np.arange(len(table)), len(table), 0
    place[live] = live
    takes = []
    for t, (n, read) in enumerate(zip(sizes, edges, strict=True)):
        surviving = live[reader[live] > t]
        takes.append(place[np.concatenate([kids[first : first + read], surviving])])
        live = np.concatenate([surviving, np.arange(total, total + n)])
        place[live] = np.arange(len(live))
        total, first = total + n, first + read
    # One transfer for the indices of all levels.
    takes.append(place[roots])
    indices = torch.from_numpy(np.concatenate(takes)).to(table.device).split([len(t) for t in takes])
    for t, (index, read) in enumerate(zip(indices[:-1], edges, strict=True)):
        children, carried = table.index_select(0, index).split([read, len(index) - read])
        table = torch.cat([carried, inner(t, children)])
    return table.index_select(0, indices[-1])
