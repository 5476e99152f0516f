"""Accuracy peer: sentiment of SST trees in PyTorch, a binary child-sum Tree-LSTM trained on the label of every vertex.

    pip install torch
    python -m bench.peers.torch_sst TRAIN --dev DEV --test TEST

The recipe of the sentiment model, written a second time with autograd and no part of the engine: only the reader of
the trees is shared. Levels come from `levels.py`, the table of live rows from `torch_levelled.py`. An epoch prints its
training time, the mean loss over all labelled vertices and dev accuracy at the roots; the best epoch is tested once.
"""

import argparse
import time

import numpy as np
import torch
from torch.nn.functional import cross_entropy, dropout

import cavs
from bench.peers.levels import tree_levels
from bench.peers.torch_levelled import carry

CLASSES, UNKNOWN, MAX_NORM = 5, "<unk>", 5.0


def trees_of(graphs):
    """One dict a tree: what `tree_levels` takes, and the height and label of every vertex."""
    fan_in = np.diff(graphs.child_offsets)
    inner = fan_in > 0
    if not (fan_in[inner] == 2).all():
        raise ValueError("torch_sst: every inner vertex needs two children; binarise the trees.")
    left, right = np.full((2, len(fan_in)), -1)
    left[inner], right[inner] = graphs.children[0::2], graphs.children[1::2]
    trees = []
    for start, end in zip(graphs.vertex_offsets[:-1], graphs.vertex_offsets[1:], strict=True):
        at = slice(start, end)
        tree = {"left": left[at], "right": right[at], "word": graphs.input_id[at], "label": graphs.label[end - 1]}
        trees.append(tree | {"height": graphs.height[at], "labels": graphs.label[at]})
    return trees


def labels_by_row(batch):
    """Labels in the row order of `tree_levels`: by height, of one height in the order of the batch."""
    height = np.concatenate([tree["height"] for tree in batch])
    labels = np.concatenate([tree["labels"] for tree in batch])
    return torch.from_numpy(labels[np.argsort(height, kind="stable")].astype(np.int64))


def glorot(rows, columns, gates=1):
    """Glorot uniform weights for each gate, gates side by side."""
    bound = (6 / (rows + columns)) ** 0.5
    return torch.empty(rows, gates * columns).uniform_(-bound, bound)


class SentimentTreeLSTM:
    """Parameters, forward and Adagrad."""

    def __init__(self, num_words, args):
        self._args, hidden = args, args.hidden
        self.embed = torch.randn(num_words, args.embedding_size) * 0.1
        self.weights = {
            "w_iou": glorot(args.embedding_size, hidden, 3),
            "u_iou": glorot(hidden, hidden, 3),
            "b_iou": torch.zeros(3 * hidden),
            "u_f": glorot(hidden, hidden),
            "b_f": torch.ones(hidden),
            "out_w": glorot(hidden, CLASSES),
            "out_b": torch.zeros(CLASSES),
        }
        for weight in self.weights.values():
            weight.requires_grad_()
        self._embed_sum = torch.zeros_like(self.embed)
        self._sums = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}

    def copy(self):
        """Values of all parameters, for `load`."""
        return self.embed.clone(), {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def load(self, values):
        self.embed.copy_(values[0])
        for name, weight in self.weights.items():
            weight.copy_(values[1][name])

    def logits(self, x, levels, training):
        """Logits of all vertices, in the row order of `levels`, from the words' embeddings."""
        hidden, rate = self._args.hidden, self._args.dropout
        states = [self._leaf(dropout(x, rate, training))]

        def inner(kids):
            states.append(self._inner(kids))
            return states[-1]

        carry(states[0], levels, levels.blocks(), inner)
        h = torch.cat(states)[:, :hidden]
        return torch.addmm(self.weights["out_b"], dropout(h, rate, training), self.weights["out_w"])

    def _leaf(self, x):
        """A row of states is [h, c]."""
        i, o, u = torch.addmm(self.weights["b_iou"], x, self.weights["w_iou"]).chunk(3, 1)
        c = i.sigmoid() * u.tanh()
        return torch.cat([o.sigmoid() * c.tanh(), c], 1)

    def _inner(self, kids):
        """`kids` are the first children of a level and then the second ones."""
        p, n = self.weights, len(kids) // 2
        h, c = kids.chunk(2, 1)
        i, o, u = torch.addmm(p["b_iou"], h[:n] + h[n:], p["u_iou"]).chunk(3, 1)
        fc = torch.addmm(p["b_f"], h, p["u_f"]).sigmoid() * c
        c = i.sigmoid() * u.tanh() + fc[:n] + fc[n:]
        return torch.cat([o.sigmoid() * c.tanh(), c], 1)

    def step(self, batch):
        """One training step; returns the summed loss and the number of labelled vertices."""
        args, levels, labels = self._args, tree_levels(batch), labels_by_row(batch)
        words, position = torch.from_numpy(levels.words).unique(return_inverse=True)
        rows = self.embed[words].requires_grad_()
        logits = self.logits(rows.index_select(0, position), levels, training=True)
        loss = cross_entropy(logits, labels, ignore_index=-1)
        weights = list(self.weights.values())
        grads = torch.autograd.grad(loss, [rows, *weights], materialize_grads=True)
        with torch.no_grad():
            norm = torch.stack([grad.norm() for grad in grads]).norm()
            scale = (MAX_NORM / norm).clamp(max=1.0)
            d_rows, *grads = (grad * scale for grad in grads)
            for weight, grad, total in zip(weights, grads, self._sums.values(), strict=True):
                if weight.ndim > 1:
                    grad += args.weight_decay * weight
                total += grad * grad
                weight -= args.lr * grad / (total + 1e-10).sqrt()
            self._embed_sum[words] += d_rows * d_rows
            self.embed[words] -= args.embedding_lr * d_rows / (self._embed_sum[words] + 1e-10).sqrt()
        count = int((labels >= 0).sum())
        return loss.item() * count, count

    @torch.no_grad()
    def accuracy(self, trees, size=250):
        """Accuracy at the roots and at all labelled vertices."""
        root_hits, hits, count = 0, 0, 0
        for start in range(0, len(trees), size):
            batch = trees[start : start + size]
            levels, labels = tree_levels(batch), labels_by_row(batch)
            logits = self.logits(self.embed[torch.from_numpy(levels.words)], levels, training=False)
            hit = logits.argmax(1) == labels
            root_hits += int(hit[torch.from_numpy(levels.roots)].sum())
            hits, count = hits + int(hit.sum()), count + int((labels >= 0).sum())
        return root_hits / len(trees), hits / count


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.peers.torch_sst", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("train", metavar="TRAIN", help="trees in brackets, labels 0 to 4; .gz is read too")
    parser.add_argument("--dev", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=150)
    parser.add_argument("--embedding-size", type=int, default=300)
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--embedding-lr", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=1e-5)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="default 1, as levels are small")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    graphs = cavs.read_trees(args.train)
    vocab = tuple(dict.fromkeys((*graphs.vocab, UNKNOWN)))
    train, dev, test = (
        trees_of(g.with_vocab(vocab, unknown=UNKNOWN)) for g in (graphs, cavs.read_trees(args.dev), cavs.read_trees(args.test))
    )
    model, best, best_epoch, values = SentimentTreeLSTM(len(vocab), args), -1.0, 0, None
    for epoch in range(1, args.epochs + 1):
        start, total, count = time.perf_counter(), 0.0, 0
        order = torch.randperm(len(train)).tolist()
        for first in range(0, len(order), args.batch):
            loss, n = model.step([train[i] for i in order[first : first + args.batch]])
            total, count = total + loss, count + n
        seconds = time.perf_counter() - start
        root, _ = model.accuracy(dev)
        print(f"epoch {epoch}: {seconds:.1f} s, train loss {total / count:.4f}, dev root {100 * root:.2f} %", flush=True)
        if root > best:
            best, best_epoch, values = root, epoch, model.copy()
    if values:
        model.load(values)
    root, every = model.accuracy(test)
    print(f"epoch {best_epoch}: test root {100 * root:.2f} %, test all vertices {100 * every:.2f} %")


if __name__ == "__main__":
    main()
