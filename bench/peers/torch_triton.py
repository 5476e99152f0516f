"""Peer: PyTorch levelled by hand with a hand-written backward, lazy products, and Triton kernels for all that is not a product.

    pip install torch triton

The strongest training step without persistent kernels that we know how to write; GPU only. Two launches a level and direction:
one product, one kernel.

- Tree-LSTM: a node multiplies its own h, once, with all four recurrent weights side by side (`h @ [u_iou, u_f]`), so the
  operand of every product is a run of rows that lie together. The level above gathers the PRODUCTS of its two children, and
  everything between gather and scatter (sums, gates, c, h) is one kernel. Going down, that kernel writes a child's cotangents
  of all four products into the child's own row, so again one product a level gives dh. It multiplies more than a product of
  gathered rows would (8 instead of 5 squares of the hidden size an inner node), and launches half as often.
- Tree-FC: a node has one parent, so its kernel writes h straight to its half of the parent's operand.
- The head (logits, loss, their gradients) is one kernel; each weight's gradient is ONE product after the levels, and is the SGD
  update itself.

Inside the clock as for the other peers. `TorchTritonCudaGraph` replays one structure: see `InCudaGraph`.
`TRITON_INTERPRET=1` runs the kernels on a CPU, to check them.
"""

import numpy as np
import torch
import triton

from bench.peers.levels import tree_levels
from bench.peers.torch_peer import InCudaGraph, TorchPeer
from bench.peers.triton_kernels import BLOCK, WARPS, fc_down, fc_up, head, inner_down, inner_up, leaf_down, leaf_up


class TorchTriton(TorchPeer):
    """One model, trained by batched levels of two launches each."""

    def __init__(self, cell, params, threads=2, device="gpu"):
        super().__init__(cell, params, threads, device)
        if cell == "tree_lstm":
            self._p["u"] = torch.cat([self._p.pop("u_iou"), self._p.pop("u_f")], 1)
        self._train_cell = {"tree_lstm": self._tree_lstm, "tree_fc": self._tree_fc}[cell]

    def _ours(self):
        p = dict(self._p)
        if self._cell == "tree_lstm":
            p["u_iou"], p["u_f"] = p.pop("u").split([3 * self._width, self._width], 1)
        return p

    def schedule(self, batch):
        return tree_levels(batch)

    @torch.no_grad()
    def _train(self, batch, lr):
        return self._train_cell(tree_levels(batch), lr)

    def _launch(self, kernel, rows, *args):
        width = len(self._p["out_w"])
        kernel[(rows, triton.cdiv(width, BLOCK))](*args, width=width, BLOCK=BLOCK, num_warps=WARPS)

    def _loss(self, h, at, dh, to, labels, lr):
        """Returns the mean loss of rows `at` of `h`; writes their cotangents to rows `to` of `dh`; updates the output layer."""
        w, b = self._p["out_w"], self._p["out_b"]
        (width, classes), graphs = w.shape, len(at)
        hs, d, loss = self._buffer("hs", graphs, width), self._buffer("d", graphs, classes), self._buffer("loss", graphs)
        sizes = {"H": triton.next_power_of_2(width), "C": triton.next_power_of_2(classes)}
        head[(graphs,)](h, at, to, w, b, labels, dh, hs, d, loss, graphs, width=width, classes=classes, **sizes)
        torch.addmm(w, hs.t(), d, alpha=-lr, out=w)
        b.add_(d.sum(0), alpha=-lr)
        return loss.mean()

    def _tree_lstm(self, lv, lr):
        p, width = self._p, len(self._p["out_w"])
        leaves, nodes = len(lv.words), len(lv.words) + len(lv.left)
        ends = np.cumsum([leaves, *lv.sizes]).tolist()
        # Indices of all kinds in one transfer.
        parts = (lv.words, lv.left, lv.right, lv.roots, lv.labels)
        words, left, right, roots, labels = self._send(np.concatenate(parts)).split([len(a) for a in parts])
        x = torch.index_select(p["embed"], 0, words, out=self._buffer("x", leaves, p["embed"].shape[1]))
        gates, z = self._buffer("gates", nodes, 3 * width), self._buffer("z", nodes, 4 * width)
        h, c, f, dh, dc = (self._buffer(k, nodes, width) for k in ("h", "c", "f", "dh", "dc"))

        torch.addmm(p["b_iou"], x, p["w_iou"], out=gates[:leaves])
        self._launch(leaf_up, leaves, gates, h, c)
        start = 0
        for end, n in zip(ends, lv.sizes, strict=False):
            torch.mm(h[start:end], p["u"], out=z[start:end])
            self._launch(inner_up, n, z, gates, f, h, c, p["b_iou"], p["b_f"], left, right, end, leaves)
            start = end

        # What a root receives comes from the head alone. Every other row of z becomes its own cotangent going down.
        dh.zero_()
        dc.index_fill_(0, roots, 0)
        z.index_fill_(0, roots, 0)
        loss = self._loss(h, roots, dh, roots, labels, lr)
        u_t = p["u"].t()
        for t in range(len(lv.sizes), 0, -1):
            start, end = ends[t - 1], ends[t]
            if t < len(lv.sizes):  # all nodes of the highest level are roots
                torch.addmm(dh[start:end], z[start:end], u_t, out=dh[start:end])
            self._launch(inner_down, end - start, z, gates, f, dh, dc, c, left, right, start, leaves)
        torch.addmm(dh[:leaves], z[:leaves], u_t, out=dh[:leaves])
        self._launch(leaf_down, leaves, gates, dh, dc, c)

        # Both children of a node carry the cotangent of its gates: half the sum over them.
        of_z, of_leaves = z.sum(0), gates[:leaves]
        p["b_iou"].add_(of_z[: 3 * width], alpha=-lr / 2).add_(of_leaves.sum(0), alpha=-lr)
        p["b_f"].add_(of_z[3 * width :], alpha=-lr)
        torch.addmm(p["u"], h.t(), z, alpha=-lr, out=p["u"])
        p["embed"].index_add_(0, words, of_leaves @ p["w_iou"].t(), alpha=-lr)
        torch.addmm(p["w_iou"], x.t(), of_leaves, alpha=-lr, out=p["w_iou"])
        return loss

    def _tree_fc(self, lv, lr):
        p, width = self._p, len(self._p["out_w"])
        leaves, inner, graphs = len(lv.words), len(lv.left), len(lv.roots)
        slot = np.empty(leaves + inner, np.int64)  # of a node in the operands: pairs of children, then the roots
        slot[lv.pairs()] = np.arange(2 * inner)
        slot[lv.roots] = np.arange(2 * inner, 2 * inner + graphs)
        parts = (lv.words, slot, slot[lv.roots], lv.labels)
        words, slots, at, labels = self._send(np.concatenate(parts)).split([len(a) for a in parts])
        operand, d_operand = (self._buffer(k, 2 * inner + graphs, width) for k in ("operand", "d_operand"))
        z, dz = self._buffer("z", max(lv.sizes, default=0), width), self._buffer("dz", inner, width)
        pairs, d_pairs = (a[: 2 * inner].view(inner, 2 * width) for a in (operand, d_operand))

        operand.index_copy_(0, slots[:leaves], p["embed"].index_select(0, words))
        start = 0
        for n in lv.sizes:
            torch.mm(pairs[start : start + n], p["u"], out=z[:n])
            self._launch(fc_up, n, z, p["b"], operand, slots, leaves + start)
            start += n

        loss = self._loss(operand, at, d_operand, at, labels, lr)
        u_t = p["u"].t()
        for n in reversed(lv.sizes):
            start -= n
            self._launch(fc_down, n, d_operand, operand, slots, dz, leaves + start, leaves)
            torch.mm(dz[start : start + n], u_t, out=d_pairs[start : start + n])

        p["embed"].index_add_(0, words, d_operand.index_select(0, slots[:leaves]), alpha=-lr)
        torch.addmm(p["u"], pairs.t(), dz, alpha=-lr, out=p["u"])
        p["b"].add_(dz.sum(0), alpha=-lr)
        return loss


class TorchTritonCudaGraph(InCudaGraph, TorchTriton):
    """The same in a CUDA graph: the bound without persistence."""
