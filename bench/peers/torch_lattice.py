"""The lattice LSTM of Zhang and Yang (2018) by hand in PyTorch, for `torch_applications`: position by position, with a table of
the words that have begun and not ended."""

import numpy as np
import torch

from bench.peers.levels import time_major


def lattice_lstm(net, batch):
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
