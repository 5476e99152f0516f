"""Peer: PyTorch levelled by hand for ANY fan-in (child-sum cells on dependency trees, lattices, DAGs), gradients by autograd.

    pip install torch

One batch a level; a level's edges are gathered, multiplied and summed by `index_add`. Inputs' products are one batch over all
vertices. States are one list of levels, concatenated once a level where children lie in several of them: the plain way.
Inside the clock: heights and levels from the raw arrays, forward, `torch.autograd.grad`, SGD.
"""

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from bench.peers import torch_device
from bench.peers.torch_peer import TorchPeer


class TorchEdges(TorchPeer):
    """A child-sum Tree-LSTM, trained by autograd over batched levels."""

    def __init__(self, cell, params, threads=2, device="cpu"):
        if cell != "child_sum":
            raise ValueError(f"torch_edges runs the cell 'child_sum', not {cell!r}")
        self._threads, self._device = threads, torch_device(device)
        self._p = {k: torch.tensor(v, device=self._device) for k, v in params.items()}
        self._weights = [v.requires_grad_() for k, v in self._p.items() if k != "embed"]

    def params(self):
        return {k: v.detach().cpu().numpy().copy() for k, v in self._p.items()}

    def schedule(self, batch):
        """Words in execution order; per level its size, its edges' children (rows) and owners (within the level); roots."""
        counts = np.concatenate([np.diff(g["child_offsets"]) for g in batch])
        sizes = np.array([len(g["word"]) for g in batch])
        shift = np.cumsum(sizes) - sizes
        child = np.concatenate([g["children"] + s for g, s in zip(batch, shift, strict=True)])
        owner = np.repeat(np.arange(len(counts)), counts)
        height = np.zeros(len(counts), np.int64)
        ends = np.cumsum(counts)
        for v, (end, n) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):  # children come first
            if n:
                height[v] = height[child[end - n : end]].max() + 1
        order = np.argsort(height, kind="stable")
        row = np.empty(len(order), np.int64)
        row[order] = np.arange(len(order))
        widths = np.bincount(height)
        starts = np.cumsum(widths) - widths
        by_level = np.argsort(height[owner], kind="stable")
        edges = np.bincount(height[owner], minlength=len(widths))
        kids, owners = row[child[by_level]], row[owner[by_level]] - np.repeat(starts, edges)
        words = np.concatenate([g["word"] for g in batch])[order]
        labels = np.array([g["label"] for g in batch])
        arrays = [self._send(a) for a in (words, kids, owners, row[np.cumsum(sizes) - 1], labels)]
        return widths.tolist(), edges.tolist(), *arrays

    def _train(self, batch, lr):
        p = self._p
        widths, edges, words, kids, owners, roots, labels = self.schedule(batch)
        x = p["embed"].index_select(0, words).requires_grad_()
        iou, forget = torch.addmm(p["b_iou"], x, p["w_iou"]).split(widths), torch.addmm(p["b_f"], x, p["w_f"]).split(widths)
        h = c = None
        for level, (gates, f, kid, owner) in enumerate(zip(iou, forget, kids.split(edges), owners.split(edges), strict=True)):
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
        loss = cross_entropy(torch.addmm(p["out_b"], h.index_select(0, roots), p["out_w"]), labels)
        dx, *grads = torch.autograd.grad(loss, [x, *self._weights], materialize_grads=True)
        with torch.no_grad():
            p["embed"].index_add_(0, words, dx, alpha=-lr)
            torch._foreach_add_(self._weights, grads, alpha=-lr)
        return loss
