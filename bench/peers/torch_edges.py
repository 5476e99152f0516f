"""A child-sum Tree-LSTM by hand in PyTorch, for `torch_applications`, over graphs of any fan-in: trees, lattices, DAGs.

One batch a level; a level's edges are gathered, multiplied and summed by `index_add`. Inputs' products are one batch over all
vertices. States are one list of levels, concatenated once a level where children lie in several of them: the plain way.
"""

import torch

from bench.peers.levels import dag_levels


def child_sum(net, batch):
    lv = dag_levels(batch)

    def forward(x):
        kids, owners, roots = (net.send(a) for a in (lv.kids, lv.owners, lv.roots))
        return _states(net.p, x, lv, kids.split(lv.edges), owners.split(lv.edges)).index_select(0, roots)

    return lv.words, forward, lv.labels


def _states(p, x, lv, kids, owners):
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
