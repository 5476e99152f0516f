"""Peer: PyTorch levelled by hand with a hand-written backward; the strongest CPU peer we know how to write.

    pip install torch

Timed: levels from the raw arrays, forward, backward, SGD. There is no autograd. Products and
element-wise operations write into buffers that later steps reuse. Optimizations that autograd does
not have:

- lazy batching: after the loop, one product per weight over all vertices, which is also the SGD
  update (`addmm(W, Aᵀ, dZ, alpha=-lr, out=W)`);
- the local derivatives of all vertices are computed together before the backward loop and overwrite
  the activations, so that each backward level needs only a few multiplications;
- a tree node has one parent, so both passes gather: forward the states of the children, backward
  the gradients (row `slot[v]` of the table of child gradients). Nothing is scattered or added;
- tanh(x) is computed as 1 - 2 sigmoid(-2x), because PyTorch's tanh on a CPU takes ten times as long
  as its sigmoid. Buffers hold the sigmoid, and the operation that reads it applies "1 - 2".

Columns of the Tree-LSTM are in the order o, i, u, so that one multiplication covers i and u.
On short padded chains oneDNN's fused LSTM (`torch_packed_lstm`, padded) can still be faster.
"""

import numpy as np
import torch

from bench.peers.levels import chain_levels, tree_levels
from bench.peers.torch_peer import InCudaGraph, TorchPeer


class TorchManual(TorchPeer):
    """One model, trained by hand-written batched levels."""

    def __init__(self, cell, params, threads=2, device="cpu"):
        super().__init__(cell, params, threads, device)
        self._train_cell = {"tree_lstm": self._tree_lstm, "tree_fc": self._tree_fc, "lstm": self._lstm}[cell]
        self._p = self._reordered(self._p)

    def _ours(self):
        return self._reordered(self._p)

    def schedule(self, batch):
        return chain_levels(batch) if self._cell == "lstm" else tree_levels(batch)

    @torch.no_grad()
    def _train(self, batch, lr):
        return self._train_cell(batch, lr)

    def _reordered(self, p):
        """`p` with the blocks i and o of the Tree-LSTM's columns swapped; its own inverse."""
        swapped = {k: p[k].chunk(3, -1) for k in ("w_iou", "u_iou", "b_iou") if self._cell == "tree_lstm"}
        return p | {k: torch.cat([o, i, u], -1) for k, (i, o, u) in swapped.items()}

    def _head(self, h, labels, lr, dh):
        """Returns the loss of the rows `h`, writes their gradient to `dh`, and updates the output layer."""
        w, b, labels = self._p["out_w"], self._p["out_b"], self._send(labels)[:, None]
        log_p = torch.log_softmax(torch.addmm(b, h, w), 1)
        loss = -log_p.gather(1, labels).mean()
        d = log_p.exp_()
        d.scatter_add_(1, labels, d.new_full((1, 1), -1.0).expand_as(labels)).mul_(1.0 / len(h))
        torch.mm(d, w.t(), out=dh)
        torch.addmm(w, h.t(), d, alpha=-lr, out=w)
        b.add_(d.sum(0), alpha=-lr)
        return loss

    def _tree_lstm(self, batch, lr):
        p, width = self._p, self._p["u_f"].shape[0]
        lv = tree_levels(batch)
        leaves, inner, roots = len(lv.words), len(lv.left), len(lv.roots)
        nodes, sizes = leaves + inner, [leaves, *lv.sizes]
        pair_sizes = [2 * n for n in lv.sizes]
        words, kids, slot = (self._send(a) for a in (lv.words, *_with_slots(lv.blocks(), lv.roots, nodes)))

        x = torch.index_select(p["embed"], 0, words, out=self._buffer("x", leaves, p["embed"].shape[1]))
        gates = self._buffer("gates", nodes, 3 * width)
        h, c, tc, spare = (self._buffer(k, nodes, width) for k in ("h", "c", "tc", "spare"))
        hk, ck = (self._buffer(k, 2 * inner, width) for k in ("hk", "ck"))
        fk, dhk = (self._buffer(k, 2 * inner + roots, width) for k in ("fk", "dhk"))
        hs, iu = (self._buffer(k, inner, width) for k in ("hs", "iu"))
        o, i, u = gates.view(nodes, 3, width).unbind(1)
        by = gates_by, o_by, _, _, _, tc_by, _ = [a.split(sizes) for a in (gates, o, i, u, c, tc, h)]
        by_inner = [a.split(lv.sizes) for a in (hs, iu)]
        by_pair = _, _, ck_by, fk_by, dhk_by = [a[: 2 * inner].split(pair_sizes) for a in (kids, hk, ck, fk, dhk)]

        torch.addmm(p["b_iou"], x, p["w_iou"], out=gates[:leaves])
        for t, (gt, ot, it, ut, ct, tct, ht) in enumerate(zip(*by, strict=True)):
            iut = ct  # a leaf's c is i * u and no more
            if t:
                n, (hst, iut) = len(ht), (a[t - 1] for a in by_inner)
                kt, hkt, ckt, fkt, _ = (a[t - 1] for a in by_pair)
                torch.index_select(h, 0, kt, out=hkt)
                torch.index_select(c, 0, kt, out=ckt)
                torch.add(hkt[:n], hkt[n:], out=hst)
                torch.addmm(p["b_iou"], hst, p["u_iou"], out=gt)
                torch.addmm(p["b_f"], hkt, p["u_f"], out=fkt)
                fkt.sigmoid_()
                ckt.mul_(fkt)
                torch.add(ckt[:n], ckt[n:], out=ct)
            ut.mul_(-2)
            gt.sigmoid_()
            torch.addcmul(it, it, ut, value=-2, out=iut)
            if t:
                ct.add_(iut)
            torch.mul(ct, -2, out=tct).sigmoid_()
            torch.addcmul(ot, ot, tct, value=-2, out=ht)

        # Local derivatives, in place: o := dh/do, tc := dh/dc / 2, (i, u) := dc/d(i, u), ck := dc/df.
        _gate_derivatives(h, o, tc, spare)
        for y, rows in ((c[:leaves], slice(leaves)), (iu, slice(leaves, nodes))):
            _gate_derivatives(y, i[rows], u[rows], spare[rows])
        u.mul_(2)
        torch.addcmul(ck, ck, fk[: 2 * inner], value=-1, out=ck)

        # Down the levels: gates, ck become gradients before the activation, fk those of the children's c.
        loss = self._head(h.index_select(0, self._send(lv.roots)), lv.labels, lr, dhk[2 * inner :])
        fk[2 * inner :].zero_()
        iu_gates = gates[:, width:].view(nodes, 2, width).split(sizes)
        u_iou_t, u_f_t, slots = p["u_iou"].t(), p["u_f"].t(), slot.split(sizes)
        buffers = [self._buffer(k, max(sizes), width) for k in ("dh", "dc")]
        for t in range(len(sizes) - 1, -1, -1):
            n, (dh, dc) = sizes[t], (a[: sizes[t]] for a in buffers)
            torch.index_select(dhk, 0, slots[t], out=dh)
            torch.index_select(fk, 0, slots[t], out=dc)
            dc.addcmul_(dh, tc_by[t], value=2)
            o_by[t].mul_(dh)
            iu_gates[t].mul_(dc[:, None])
            if t:
                dft, fkt, dhkt = ck_by[t - 1], fk_by[t - 1], dhk_by[t - 1]
                dft.view(2, n, width).mul_(dc)
                fkt.view(2, n, width).mul_(dc)
                torch.mm(gates_by[t], u_iou_t, out=dh)
                torch.mm(dft, u_f_t, out=dhkt)
                dhkt.view(2, n, width).add_(dh)

        _sgd(p["embed"], words, gates[:leaves] @ p["w_iou"].t(), lr)
        _affine_sgd(p["w_iou"], p["b_iou"], x, gates[:leaves], lr)
        _affine_sgd(p["u_iou"], p["b_iou"], hs, gates[leaves:], lr)
        _affine_sgd(p["u_f"], p["b_f"], hk, ck, lr)
        return loss

    def _tree_fc(self, batch, lr):
        p, width = self._p, self._p["b"].shape[0]
        lv = tree_levels(batch)
        leaves, inner, roots = len(lv.words), len(lv.left), len(lv.roots)
        nodes, pair_sizes = leaves + inner, [2 * n for n in lv.sizes]
        words, kids, slot = (self._send(a) for a in (lv.words, *_with_slots(lv.pairs(), lv.roots, nodes)))

        h, dh = self._buffer("h", nodes, width), self._buffer("dh", nodes, width)
        hk, dhk = self._buffer("hk", 2 * inner, width), self._buffer("dhk", 2 * inner + roots, width)
        torch.index_select(p["embed"], 0, words, out=h[:leaves])
        by_level = [a[leaves:].split(lv.sizes) for a in (h, dh, slot)]
        by_pair = [a[: 2 * inner].split(pair_sizes) for a in (kids, hk, dhk)]
        one = torch.ones((), device=self._device)
        for ht, kt, hkt in zip(by_level[0], by_pair[0], by_pair[1], strict=True):
            torch.index_select(h, 0, kt, out=hkt)
            torch.addmm(p["b"], hkt.view(-1, 2 * width), p["u"], out=ht)
            torch.sub(one, ht.mul_(-2).sigmoid_(), alpha=2, out=ht)

        loss = self._head(h.index_select(0, self._send(lv.roots)), lv.labels, lr, dhk[2 * inner :])
        u_t = p["u"].t()
        for ht, dht, st, dhkt in zip(*(reversed(a) for a in (*by_level, by_pair[2])), strict=True):
            torch.index_select(dhk, 0, st, out=dht)
            torch.ops.aten.tanh_backward.grad_input(dht, ht, grad_input=dht)
            torch.mm(dht, u_t, out=dhkt.view(-1, 2 * width))

        torch.index_select(dhk, 0, slot[:leaves], out=dh[:leaves])
        _sgd(p["embed"], words, dh[:leaves], lr)
        _affine_sgd(p["u"], p["b"], hk.view(-1, 2 * width), dh[leaves:], lr)
        return loss

    def _lstm(self, batch, lr):
        """Chains are sorted by length, longest first, so the chains that continue at t are the first rows of those at t-1."""
        p, width = self._p, self._p["u"].shape[0]
        lv = chain_levels(batch)
        nodes, sizes, words = len(lv.words), lv.sizes, self._send(lv.words)

        x = torch.index_select(p["embed"], 0, words, out=self._buffer("x", nodes, p["embed"].shape[1]))
        gates = torch.addmm(p["b"], x, p["w"], out=self._buffer("gates", nodes, 4 * width))
        names = ("h", "c", "tc", "ig", "hp", "cp", "dh", "spare")
        h, c, tc, ig, hp, cp, dh, spare = (self._buffer(k, nodes, width) for k in names)
        i, f, o, g = gates.view(nodes, 4, width).unbind(1)
        by = [a.split(sizes) for a in (gates, i, f, o, g, h, c, tc, ig, hp, cp)]
        gates_by, _, _, o_by, g_by, h_by, c_by, tc_by, *_ = by
        for t, (gt, it, ft, ot, ut, ht, ct, tct, igt, hpt, cpt) in enumerate(zip(*by, strict=True)):
            n = sizes[t]
            if t:
                hpt.copy_(h_by[t - 1][:n])
                gt.addmm_(hpt, p["u"])
            ut.mul_(-2)
            gt.sigmoid_()
            torch.addcmul(it, it, ut, value=-2, out=igt)
            if t:
                torch.mul(ft, c_by[t - 1][:n], out=cpt)
                torch.add(igt, cpt, out=ct)
            else:
                cpt.zero_()
                ct.copy_(igt)
            torch.mul(ct, -2, out=tct).sigmoid_()
            torch.addcmul(ot, ot, tct, value=-2, out=ht)

        # Local derivatives, in place: tc := dh/dc / 2, o := dh/do, (i, f, g) := dc/d(i, f, g).
        loss = self._head(h, lv.labels, lr, dh)
        _gate_derivatives(h, o, tc, spare)
        _gate_derivatives(ig, i, g, spare)
        g.mul_(2)
        keep = ig.copy_(f)
        torch.addcmul(cp, cp, f, value=-1, out=f)

        dc = self._buffer("dc", sizes[0], width).zero_()
        dhs, keeps, u_t = dh.split(sizes), keep.split(sizes), p["u"].t()
        if_gates = gates.view(nodes, 4, width)[:, :2].split(sizes)
        for t in range(len(sizes) - 1, -1, -1):
            n, dht = sizes[t], dhs[t]
            dct = dc[:n].addcmul_(dht, tc_by[t], value=2)
            o_by[t].mul_(dht)
            g_by[t].mul_(dct)
            if_gates[t].mul_(dct[:, None])
            if t:
                dhs[t - 1][:n].addmm_(gates_by[t], u_t)
                dct.mul_(keeps[t])

        after_first = slice(sizes[0], nodes)
        _sgd(p["embed"], words, gates @ p["w"].t(), lr)
        _affine_sgd(p["w"], p["b"], x, gates, lr)
        torch.addmm(p["u"], hp[after_first].t(), gates[after_first], alpha=-lr, out=p["u"])
        return loss


class TorchCudaGraph(InCudaGraph, TorchManual):
    """The same in a CUDA graph, one a batch: an upper bound, not a way to train on changing graphs."""


def _with_slots(kids, roots, nodes):
    """`kids` and its inverse: where a node's gradient lies, the roots' after all children's."""
    slot = np.empty(nodes, np.int64)
    slot[kids] = np.arange(len(kids))
    slot[roots] = np.arange(len(kids), nodes)
    return kids, slot


def _gate_derivatives(y, gate, q, spare):
    """Of y = gate * tanh(x) with q = sigmoid(-2x): gate := dy/d(gate before its sigmoid), q := dy/dx / 2."""
    torch.sub(gate, y, out=spare)
    torch.addcmul(spare, spare, q, value=-1, out=q)
    torch.addcmul(y, y, gate, value=-1, out=gate)


def _sgd(table, rows, grad, lr):
    table.index_add_(0, rows, grad, alpha=-lr)


def _affine_sgd(w, b, a, dz, lr):
    torch.addmm(w, a.t(), dz, alpha=-lr, out=w)
    b.add_(dz.sum(0), alpha=-lr)
