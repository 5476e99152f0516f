"""Peer: PyTorch levelled by hand for ANY fan-in (child-sum cells on dependency trees, lattices, DAGs), gradients by autograd.

    pip install torch

One batch a level; a level's edges are gathered, multiplied and summed by `index_add`. Inputs' products are one batch over all
vertices. States are one list of levels, concatenated once a level where children lie in several of them: the plain way.
Inside the clock: heights and levels from the raw arrays, forward, `torch.autograd.grad`, SGD.
"""

import torch
from torch.nn.functional import cross_entropy

from bench.peers import torch_device
from bench.peers.levels import dag_levels
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
        return dag_levels(batch)

    def _train(self, batch, lr):
        p = self._p
        lv = dag_levels(batch)
        words, kids, owners, roots, labels = (self._send(a) for a in (lv.words, lv.kids, lv.owners, lv.roots, lv.labels))
        x = p["embed"].index_select(0, words).requires_grad_()
        h = self._states(x, lv, kids, owners)
        loss = cross_entropy(torch.addmm(p["out_b"], h.index_select(0, roots), p["out_w"]), labels)
        dx, *grads = torch.autograd.grad(loss, [x, *self._weights], materialize_grads=True)
        with torch.no_grad():
            p["embed"].index_add_(0, words, dx, alpha=-lr)
            torch._foreach_add_(self._weights, grads, alpha=-lr)
        return loss

    def _states(self, x, lv, kids, owners):
        """h of all rows."""
        p = self._p
        iou, forget = torch.addmm(p["b_iou"], x, p["w_iou"]).split(lv.sizes), torch.addmm(p["b_f"], x, p["w_f"]).split(lv.sizes)
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
        return h
