"""Echo's encoder-decoder (section 2.2) by hand in PyTorch, for `torch_applications`: nn.LSTM's kernel, padded attention."""

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from bench.peers.levels import time_major


def encoder_decoder(net, batch):
    p, width = net.p, net.width
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
            h, c = _lstm(z, c[:n], width)
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


def _lstm(z, c, width):
    ifo, g = z.split([3 * width, width], 1)
    i, f, o = ifo.sigmoid().chunk(3, 1)
    c = torch.addcmul(i * g.tanh(), f, c)
    return o * c.tanh(), c
