"""The model of `cavs train --task regress` in PyTorch: does a library's training reach the same R2?

    python -m bench.peers.torch_regress train.jsonl --dev dev.jsonl --test test.jsonl --seed 0

The files are those of `cavs train`: one graph with a label per line. Model, initial distributions, loss and optimiser are as in

    cavs train --task regress train.jsonl --dev dev.jsonl --test test.jsonl --seed 0 --program dagnn --hidden 64 \\
        --embedding-size 64 --optimizer adam --lr 0.002 --dropout 0 --weight-decay 0 --clip 0 --batch 50 --epochs 15

It shares no code with Cavs. Random numbers differ, so compare the means of some seeds.
"""

import argparse
import json
import time

import numpy as np
import torch


def read(path, words):
    """Graphs as (children, words, label). `words` numbers the words, and grows."""
    graphs = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            graph = json.loads(line)
            ids = [words.setdefault(word, len(words)) for word in graph["inputs"]]
            graphs.append((graph["children"], ids, graph["label"]))
    return graphs


class Batch:
    """Graphs whose vertices are sorted by height: `levels` has the words of each, and its edges (parent, child)."""

    def __init__(self, graphs):
        height, children, words, self.roots = [], [], [], []
        for kids, ids, _ in graphs:
            base, own = len(height), [None] * len(kids)

            def rise(v, kids=kids, own=own):
                if own[v] is None:
                    own[v] = 1 + max((rise(k) for k in kids[v]), default=-1)
                return own[v]

            height += [rise(v) for v in range(len(kids))]
            children += [[base + k for k in some] for some in kids]
            words += ids
            (root,) = {*range(len(kids))} - {k for some in kids for k in some}
            self.roots.append(base + root)
        height = np.array(height)
        order = np.argsort(height, kind="stable")
        row = np.empty(len(order), np.int64)
        row[order] = np.arange(len(order))
        self.roots = torch.tensor(row[self.roots])
        self.words = torch.tensor(np.array(words)[order])
        self.levels, first = [], 0
        for count in np.bincount(height).tolist():
            edges = [(i, row[k]) for i, v in enumerate(order[first : first + count]) for k in children[v]]
            self.levels.append((count, torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T))
            first += count
        self.label = torch.tensor([label for _, _, label in graphs], dtype=torch.float32)


class Net(torch.nn.Module):
    """word vectors -> DAGNN (Thost and Chen, 2021) -> a linear layer with one output at the root."""

    def __init__(self, num_words, size, hidden):
        super().__init__()

        def glorot(rows, columns, gates):
            limit = (6 / (rows + columns)) ** 0.5
            return torch.nn.Parameter(torch.empty(rows, gates * columns).uniform_(-limit, limit))

        self.table = torch.nn.Parameter(0.1 * torch.randn(num_words, size))
        self.score = glorot(hidden, 1, 1)
        self.w, self.u = glorot(size, hidden, 3), glorot(hidden, hidden, 3)
        self.b, self.d = (torch.nn.Parameter(torch.zeros(n)) for n in (3 * hidden, hidden))
        self.out = torch.nn.Linear(hidden, 1)
        torch.nn.init.zeros_(self.out.weight)
        torch.nn.init.zeros_(self.out.bias)
        self.hidden = hidden

    def forward(self, batch):
        x = self.table[batch.words] @ self.w + self.b
        states, first = x.new_zeros(0, self.hidden), 0
        for count, (parent, child) in batch.levels:
            weight = (states[child] @ self.score)[:, 0].exp()  # |h| < 1: no need to take the maximum off
            total = x.new_zeros(count).index_add(0, parent, weight).clamp(min=1e-30)
            m = x.new_zeros(count, self.hidden).index_add(0, parent, weight[:, None] * states[child]) / total[:, None]
            x_r, x_z, x_n = x[first : first + count].chunk(3, 1)
            h_r, h_z, h_n = (m @ self.u).chunk(3, 1)
            r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
            n = torch.tanh(x_n + r * (h_n + self.d))
            states = torch.cat([states, (1 - z) * n + z * m])
            first += count
        return self.out(states[batch.roots])[:, 0]


def r2(net, batches, mean, scale):
    """The coefficient of determination over all graphs."""
    with torch.no_grad():
        guess = torch.cat([mean + scale * net(batch) for batch in batches]).double()
    true = torch.cat([batch.label for batch in batches]).double()
    return 1 - float(((guess - true) ** 2).sum() / ((true - true.mean()) ** 2).sum())


def main():
    parser = argparse.ArgumentParser(description="The twin of `cavs train --task regress --program dagnn` in PyTorch.")
    for name in ("train", "--dev", "--test"):
        parser.add_argument(name, **({"required": True} if name.startswith("-") else {}))
    for name, value in (("seed", 0), ("hidden", 64), ("batch", 50), ("epochs", 15)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=0.002)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng, words = np.random.default_rng(args.seed), {}
    train, dev, test = (read(path, words) for path in (args.train, args.dev, args.test))
    net = Net(len(words), args.hidden, args.hidden)
    optimiser = torch.optim.Adam(net.parameters(), args.lr)
    labels = np.array([label for _, _, label in train])
    mean, scale = float(labels.mean()), float(labels.std())
    held_out = [[Batch(part[i : i + 500]) for i in range(0, len(part), 500)] for part in (dev, test)]
    best, start = (-np.inf, 0, 0), time.time()
    for epoch in range(1, args.epochs + 1):
        order = rng.permutation(len(train))
        for i in range(0, len(order), args.batch):
            batch = Batch([train[k] for k in order[i : i + args.batch]])
            loss = torch.nn.functional.mse_loss(net(batch), (batch.label - mean) / scale)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        dev_r2, test_r2 = (r2(net, part, mean, scale) for part in held_out)
        best = max(best, (dev_r2, test_r2, epoch))
        print(f"epoch {epoch}: dev R2 {dev_r2:.4f}, test R2 {test_r2:.4f}, {time.time() - start:.0f} s", flush=True)
    print(f"seed {args.seed}: the best epoch is {best[2]}: dev R2 {best[0]:.4f}, test R2 {best[1]:.4f}")


if __name__ == "__main__":
    main()
