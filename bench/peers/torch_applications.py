"""Peer: the applications of `bench.applications`, batched by hand in PyTorch, gradients by autograd.

    pip install torch

What a careful PyTorch user writes for each: sentences sorted by length so that those alive are a prefix, products of inputs as
one batch, one batch a level or position, gates in one product, nn.LSTM for the encoder, padded attention. Where a level reads
rows of several earlier ones, a table carries the live rows, as in `torch_levelled`. Inside the clock: indices from the raw
arrays, forward, `torch.autograd.grad`, SGD.
"""

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from bench.peers import torch_device
from bench.peers.levels import tree_levels
from bench.peers.torch_levelled import _carry
from bench.peers.torch_peer import TorchPeer


class TorchApplication(TorchPeer):
    """One application. Its method gives the words, a function from their vectors to states, and the labels of those."""

    def __init__(self, cell, params, threads=2, device="cpu"):
        self._threads, self._device = threads, torch_device(device)
        self._model = getattr(self, "_" + cell)
        self._p = {k: torch.tensor(v, device=self._device) for k, v in params.items()}
        self._weights = [v.requires_grad_() for k, v in self._p.items() if k != "embed"]
        self._width = len(params["out_w"])

    def params(self):
        return {k: v.detach().cpu().numpy().copy() for k, v in self._p.items()}

    def _train(self, batch, lr):
        words, forward, labels = self._model(batch)
        words = self._send(words)
        x = self._p["embed"].index_select(0, words).requires_grad_()
        logits = torch.addmm(self._p["out_b"], forward(x), self._p["out_w"])
        loss = cross_entropy(logits, self._send(labels))
        dx, *grads = torch.autograd.grad(loss, [x, *self._weights], materialize_grads=True)
        with torch.no_grad():
            self._p["embed"].index_add_(0, words, dx, alpha=-lr)
            torch._foreach_add_(self._weights, grads, alpha=-lr)
        return loss

    # ---- VPPS ----

    def _rvnn(self, batch):
        p, levels = self._p, tree_levels(batch)

        def inner(kids):
            return torch.addmm(p["b"], kids.view(-1, 2 * self._width), p["u"]).tanh()

        def forward(x):
            return _carry(torch.addmm(p["b_leaf"], x, p["w"]).tanh(), levels, levels.pairs(), inner)

        return levels.words, forward, levels.labels

    def _td_rnn(self, batch):
        p = self._p

        def combine(kids):
            return torch.addmm(p["b"], kids.view(-1, 2 * self._width), p["u"]).tanh()

        return self._pyramid(batch, lambda x: x, combine)

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
        """Sentences longest first: those that end are the last rows of their level."""
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

    # ---- Echo ----

    def _encoder_decoder(self, batch):
        p, width = self._p, self._width
        source, target = ([len(g[k]) for g in batch] for k in ("source", "target"))
        by_source, by_target = (np.argsort(-np.array(n), kind="stable") for n in (source, target))
        s_rows, s_sizes = _time_major([g["source"] for g in batch], by_source)
        t_rows, t_sizes = _time_major([g["target"] for g in batch], by_target)
        labels, _ = _time_major([g["labels"] for g in batch], by_target)
        place = np.argsort(by_source)[by_target]  # of a target's source among the sorted sources
        mask = np.arange(max(source)) >= np.array(source)[by_target][:, None]

        def forward(x):
            xs, xt = x.split([len(s_rows), len(t_rows)])
            out, (h, c) = self._encode(xs, torch.tensor(s_sizes))
            at, hide = self._send(place), self._send(mask)
            states = pad_packed_sequence(out, batch_first=True)[0].index_select(0, at)
            keys = states @ p["key"]
            h, c = h[0].index_select(0, at), c[0].index_select(0, at)
            a, outs = torch.zeros_like(h), []
            for n, z in zip(t_sizes, torch.addmm(p["b"], xt, p["w"]).split(t_sizes), strict=True):
                z = torch.addmm(z, torch.cat([h[:n], a[:n]], 1), p["u"])
                h, c = _lstm(z, c[:n], width)
                scores = (keys[:n] + (h @ p["query"])[:, None]).tanh() @ p["score"]
                weights = scores.masked_fill(hide[:n], -1e9).softmax(1)
                context = torch.bmm(weights[:, None], states[:n])[:, 0]
                a = (torch.cat([h, context], 1) @ p["out"]).tanh()
                outs.append(a)
            return torch.cat(outs)

        return np.concatenate([s_rows, t_rows]), forward, labels

    def _encode(self, x, sizes):
        """nn.LSTM's kernel on our gates' order i, f, o, g: torch wants i, f, g, o."""
        p, none = self._p, torch.zeros(4 * self._width, device=self._device)
        weights = [_swap_og(p["encoder_" + k]) for k in ("w", "u", "b")]
        zero = torch.zeros(1, int(sizes[0]), self._width, device=self._device)
        flat = [weights[0].t().contiguous(), weights[1].t().contiguous(), weights[2], none]
        out, h, c = torch._VF.lstm(x, sizes, (zero, zero), flat, True, 1, 0.0, True, False)
        return PackedSequence(out, sizes), (h, c)

    # ---- lattices ----

    def _lattice_lstm(self, batch):
        p, width = self._p, self._width
        order = np.argsort([-len(g["words"]) for g in batch], kind="stable")
        batch = [batch[g] for g in order]
        chars, sizes = _time_major([g["words"] for g in batch], np.arange(len(batch)))
        labels, _ = _time_major([g["labels"] for g in batch], np.arange(len(batch)))
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
            index = iter(self._send(np.concatenate([a for step in plan for a in step])).split(lengths))
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

    # ---- directed acyclic graphs ----

    def _dagnn(self, batch):
        p = self._p
        words, sizes, edges, kids, owners, roots, labels = _dag_levels(batch)
        takes, rests = _live_rows(sizes, edges, kids, roots)

        def forward(x):
            z = torch.addmm(p["b"], x, p["w"]).split(sizes)
            index = self._send(np.concatenate(takes)).split([len(t) for t in takes])
            owner = iter(self._send(owners).split(edges))
            table = self._gru(z[0], None)
            for zt, at, rest, now in zip(z[1:], index[:-1], rests, list(owner)[1:], strict=True):
                h, later = table.index_select(0, at).split([len(at) - rest, rest])
                e = (h @ p["s"]).exp()  # |h| < 1: no need to take the maximum off
                total = x.new_zeros(len(zt)).index_add(0, now, e)
                m = x.new_zeros(len(zt), self._width).index_add(0, now, e[:, None] * h) / total[:, None]
                table = torch.cat([later, self._gru(zt, m)])
            return table.index_select(0, index[-1])

        return words, forward, labels

    def _gru(self, z, m):
        p, width = self._p, self._width
        x_rz, x_n = z.split([2 * width, width], 1)
        if m is None:
            r, z = x_rz.sigmoid().chunk(2, 1)
            return (1 - z) * torch.addcmul(x_n, r, p["d"]).tanh()
        m_rz, m_n = (m @ p["u"]).split([2 * width, width], 1)
        r, z = (x_rz + m_rz).sigmoid().chunk(2, 1)
        n = torch.addcmul(x_n, r, m_n + p["d"]).tanh()
        return torch.lerp(n, m, z)


def _lstm(z, c, width):
    ifo, g = z.split([3 * width, width], 1)
    i, f, o = ifo.sigmoid().chunk(3, 1)
    c = torch.addcmul(i * g.tanh(), f, c)
    return o * c.tanh(), c


def _swap_og(w):
    i, f, o, g = w.chunk(4, -1)
    return torch.cat([i, f, g, o], -1)


def _time_major(arrays, order):
    """Entries of all arrays by position, in each the arrays in this `order` (longest first); and how many at each position."""
    lengths = np.array([len(a) for a in arrays])
    rank = np.empty(len(arrays), np.int64)
    rank[order] = np.arange(len(arrays))
    position = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    sizes = np.bincount(position)
    out = np.empty(lengths.sum(), np.int64)
    out[(np.cumsum(sizes) - sizes)[position] + np.repeat(rank, lengths)] = np.concatenate(arrays)
    return out, sizes.tolist()


def _dag_levels(batch):
    """Words by level; vertices and edges a level; children (rows by level) and owners (within the level); roots; labels."""
    counts = np.concatenate([np.diff(g["child_offsets"]) for g in batch])
    sizes = np.array([len(g["word"]) for g in batch])
    shift = np.cumsum(sizes) - sizes
    child = np.concatenate([g["children"] + s for g, s in zip(batch, shift, strict=True)])
    height = [0] * len(counts)
    at, kids = 0, child.tolist()
    for v, n in enumerate(counts.tolist()):  # children come first
        if n:
            height[v] = 1 + max([height[k] for k in kids[at : at + n]])
            at += n
    height = np.array(height)
    order = np.argsort(height, kind="stable")
    row = np.empty(len(order), np.int64)
    row[order] = np.arange(len(order))
    widths = np.bincount(height)
    owner = np.repeat(np.arange(len(counts)), counts)
    by_level = np.argsort(height[owner], kind="stable")
    edges = np.bincount(height[owner], minlength=len(widths))
    owners = row[owner[by_level]] - np.repeat(np.cumsum(widths) - widths, edges)
    words = np.concatenate([g["word"] for g in batch])[order]
    labels = np.array([g["label"] for g in batch])
    return words, widths.tolist(), edges.tolist(), row[child[by_level]], owners, row[np.cumsum(sizes) - 1], labels


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
