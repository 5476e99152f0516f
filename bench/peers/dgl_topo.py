"""Peer: DGL with `prop_nodes_topo`, as in DGL's own Tree-LSTM example.

    pip install --no-deps dgl==1.1.3; pip install torch scipy networkx requests tqdm psutil

Timed: one DGL graph per sample, `dgl.batch`, topological frontiers, forward, autograd, SGD. Only CPU wheels exist.
"""

import os

os.environ.setdefault("DGLBACKEND", "pytorch")

import dgl  # noqa: E402  (it reads its back end when imported)
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402


class DglTopo:
    """A child-sum Tree-LSTM over `dgl.batch`ed graphs. Binary trees have words at their leaves alone."""

    def __init__(self, cell, params, threads=2):
        self._threads, self._leaves_only = threads, cell == "tree_lstm"
        self._p = {k: torch.tensor(v) for k, v in params.items()}
        self._weights = [v.requires_grad_() for k, v in self._p.items() if k != "embed"]

    def _message(self, edges):
        f = torch.addmm(edges.dst["f"], edges.src["h"], self._p["u_f"]).sigmoid()
        return {"h": edges.src["h"], "fc": f * edges.src["c"]}

    def _reduce(self, nodes):
        return {"iou": nodes.data["iou"] + nodes.mailbox["h"].sum(1) @ self._p["u_iou"], "c": nodes.mailbox["fc"].sum(1)}

    def _apply(self, nodes):
        i, o, u = nodes.data["iou"].chunk(3, 1)
        c = i.sigmoid() * u.tanh() + nodes.data["c"]
        return {"h": o.sigmoid() * c.tanh(), "c": c}

    def params(self):
        return {k: v.detach().numpy().copy() for k, v in self._p.items()}

    def schedule(self, batch):
        graphs = []
        for g in batch:
            if self._leaves_only:
                parent = np.flatnonzero(g["left"] >= 0)
                source, target = np.concatenate([g["left"][parent], g["right"][parent]]), np.concatenate([parent, parent])
            else:
                source, target = g["children"], np.repeat(np.arange(len(g["word"])), np.diff(g["child_offsets"]))
            graphs.append(dgl.graph((torch.from_numpy(source), torch.from_numpy(target)), num_nodes=len(g["word"])))
        return dgl.batch(graphs)

    def step(self, batch, lr=0.05):
        torch.set_num_threads(self._threads)
        p, graph = self._p, self.schedule(batch)
        words = torch.from_numpy(np.concatenate([g["word"] for g in batch]))
        rows = torch.nonzero(words >= 0)[:, 0]
        x = p["embed"].index_select(0, words[rows]).requires_grad_()
        iou = p["b_iou"].expand(len(words), -1).index_add(0, rows, x @ p["w_iou"])
        forget = p["b_f"].expand(len(words), -1)
        if not self._leaves_only:
            forget = forget + x @ p["w_f"]
        zeros = iou.new_zeros(len(iou), iou.shape[1] // 3)
        graph.ndata.update({"iou": iou, "f": forget, "h": zeros, "c": zeros})
        dgl.prop_nodes_topo(graph, self._message, self._reduce, apply_node_func=self._apply)
        h = graph.ndata["h"]
        roots = torch.from_numpy(np.cumsum([len(g["word"]) for g in batch]) - 1)
        labels = torch.tensor([g["label"] for g in batch])
        loss = cross_entropy(torch.addmm(p["out_b"], h[roots], p["out_w"]), labels)
        dx, *grads = torch.autograd.grad(loss, [x, *self._weights], materialize_grads=True)
        with torch.no_grad():
            p["embed"].index_add_(0, words[rows], dx, alpha=-lr)
            torch._foreach_add_(self._weights, grads, alpha=-lr)
        return loss.item()
