"""Accuracy and speed peer: the BiLSTM tagger of `cavs train --task tag` in PyTorch, rare words spelled by a character BiLSTM.

    pip install torch
    python -m bench.peers.torch_tagger TRAIN --dev DEV [--test TEST] [--program bilstm]

The recipe of the task `tag`, written a second time with autograd and no part of the engine; shared are the reader of the
files, the rule of which sentences make a batch, and the count of entities. The BiLSTM is `nn.LSTM` over packed sequences
(`--lstm packed`), or a loop over time steps by hand, both directions in one batched product (`--lstm loop`). Best epoch by
dev F1 of entities where labels are such, else by accuracy; it is tested once.
"""

import argparse
import time

import numpy as np
import torch
from torch.nn.functional import cross_entropy, dropout
from torch.nn.utils.rnn import PackedSequence

from cavs._train.batches import epoch_batches, strata
from cavs._train.chunks import Chunks, f1
from cavs._train.tagged import read_tagged
from cavs._train.task import configure, find

MAX_NORM, ADAM, EPSILON = 5.0, (0.9, 0.999), 1e-8


def glorot(rows, columns, gates=1):
    """Glorot uniform a gate, gates side by side."""
    bound = (6 / (rows + columns)) ** 0.5
    return torch.empty(rows, gates * columns).uniform_(-bound, bound)


def time_major(lengths):
    """Packing by hand: flat rows of sequences laid end to end, in packed order, forward and turned round.

    Returns (2, rows) and the number of sequences that are longer than t, for t = 0, 1, ...
    """
    lengths = np.asarray(lengths)
    order = np.argsort(-lengths, kind="stable")
    starts = (np.cumsum(lengths) - lengths)[order]
    sizes = lengths[order]
    live = (sizes[None, :] > np.arange(sizes[0])[:, None]).sum(1)
    t = np.repeat(np.arange(len(live)), live)
    k = np.arange(len(t)) - np.repeat(np.cumsum(live) - live, live)
    return np.stack([starts[k] + t, starts[k] + sizes[k] - 1 - t]), live, order


class BiLSTM:
    """One BiLSTM layer on packed rows: by `nn.LSTM`, or by a loop over time steps."""

    def __init__(self, inputs, hidden, kind):
        self.hidden, self.kind = hidden, kind
        self.weights = {}
        for name in ("forward", "backward"):
            b = torch.zeros(4 * hidden)
            b[hidden : 2 * hidden] = 1
            self.weights |= {f"{name}.w": glorot(inputs, hidden, 4), f"{name}.u": glorot(hidden, hidden, 4), f"{name}.b": b}
        if kind == "packed":
            # nn.LSTM keeps weights of its own: gates i, f, g, o, a row each; its second bias is held at zero.
            self.lstm = torch.nn.LSTM(inputs, hidden, bidirectional=True)
            with torch.no_grad():
                for name, end in (("forward", "l0"), ("backward", "l0_reverse")):
                    for ours, theirs in (("w", "weight_ih"), ("u", "weight_hh"), ("b", "bias_ih")):
                        getattr(self.lstm, f"{theirs}_{end}").copy_(swap_og(self.weights[f"{name}.{ours}"]).t())
                    getattr(self.lstm, f"bias_hh_{end}").zero_().requires_grad_(False)
            self.weights = {name: w for name, w in self.lstm.named_parameters() if w.requires_grad}
        for w in self.weights.values():
            w.requires_grad_()

    def __call__(self, x, lengths, ends):
        """h of all rows of `x`, sequences laid end to end: (rows, 2H); with `ends` a row a sequence."""
        index, live, order = time_major(lengths)
        forward = torch.from_numpy(index[0])
        if self.kind == "packed":
            packed = PackedSequence(x.index_select(0, forward), torch.from_numpy(live))
            out, (last, _) = self.lstm(packed)
            if not ends:
                return unpermute(out.data, forward)
            return unpermute(torch.cat([last[0], last[1]], 1), torch.from_numpy(order))
        both = torch.from_numpy(index)
        w, u, b = (torch.stack([self.weights[f"{d}.{k}"] for d in ("forward", "backward")]) for k in "wub")
        z = torch.baddbmm(b[:, None], x.index_select(0, both.view(-1)).view(2, -1, x.shape[1]), w)
        h = c = x.new_zeros(2, len(order), self.hidden)
        rows, states, start = [], [], 0
        for n in live.tolist():
            if n < h.shape[1]:
                states.append(h[:, n:])
                h, c = h[:, :n], c[:, :n]
            gates = torch.baddbmm(z[:, start : start + n], h, u)
            ifo, g = gates[..., : 3 * self.hidden].sigmoid(), gates[..., 3 * self.hidden :].tanh()
            i, f, o = ifo.chunk(3, -1)
            c = f * c + i * g
            h = o * c.tanh()
            rows.append(h)
            start += n
        if not ends:
            h = torch.cat(rows, 1)
            return torch.cat([unpermute(h[0], both[0]), unpermute(h[1], both[1])], 1)
        h = torch.cat([h, *states[::-1]], 1)
        return unpermute(torch.cat([h[0], h[1]], 1), torch.from_numpy(order))


def swap_og(w):
    """Gate order i, f, o, g to PyTorch's i, f, g, o along the last axis, and back."""
    i, f, o, g = w.chunk(4, -1)
    return torch.cat([i, f, g, o], -1)


def unpermute(x, order):
    """The rows in the order in which `order` took them."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return x.index_select(0, back)


class Tagger:
    """Parameters, forward and Adam; rows of the table of words have Adam states of their own, that stand while not read."""

    def __init__(self, config, num_words, labels, num_characters, lstm="packed"):
        self._config, hidden, size = config, config.hidden, config.embedding_size
        self.chunks = Chunks.of(labels)
        self.embed = torch.randn(num_words, size) * 0.1
        self._bilstm = BiLSTM(size, hidden, lstm)
        self.weights = {
            "w": glorot(2 * hidden, hidden),
            "b": torch.zeros(hidden),
            "v": glorot(hidden, len(labels)),
            "c": torch.zeros(len(labels)),
        } | {f"bilstm.{k}": w for k, w in self._bilstm.weights.items()}
        if num_characters:
            self._spell = BiLSTM(config.char_size, size // 2, lstm)
            self.weights |= {f"spell.{k}": w for k, w in self._spell.weights.items()}
            self.weights["characters"] = torch.randn(num_characters, config.char_size) * 0.1
        for weight in self.weights.values():
            weight.requires_grad_()
        self._adam = torch.optim.Adam(self.weights.values(), lr=config.lr, betas=ADAM, eps=EPSILON)
        self._m, self._v, self._steps = torch.zeros_like(self.embed), torch.zeros_like(self.embed), 0

    def copy(self):
        """Values of all parameters, for `load`."""
        return self.embed.clone(), {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def load(self, values):
        self.embed.copy_(values[0])
        for name, weight in self.weights.items():
            weight.copy_(values[1][name])

    def logits(self, rows, batch, training):
        """Logits of all words; `rows` are those of the table that the batch reads."""
        p, rate = self.weights, self._config.dropout
        if batch["texts"]:
            characters = p["characters"].index_select(0, torch.from_numpy(np.concatenate(batch["texts"])))
            spelled = self._spell(characters, [len(text) for text in batch["texts"]], ends=True)
            rows = torch.cat([rows, spelled])
        h = self._bilstm(dropout(rows.index_select(0, batch["word"]), rate, training), batch["lengths"], ends=False)
        m = torch.addmm(p["b"], dropout(h, rate, training), p["w"]).tanh()
        return torch.addmm(p["c"], dropout(m, rate, training), p["v"])

    def step(self, batch):
        """One training step; returns the loss before it."""
        words, labels = batch["words"], batch["labels"]
        rows = self.embed[words].requires_grad_()
        loss = cross_entropy(self.logits(rows, batch, training=True), labels, ignore_index=-1)
        weights = list(self.weights.values())
        grads = torch.autograd.grad(loss, [rows, *weights], materialize_grads=True)
        with torch.no_grad():
            norm = torch.stack(torch._foreach_norm(grads)).norm()
            torch._foreach_mul_(grads, (MAX_NORM / norm).clamp(max=1.0))
            for weight, grad in zip(weights, grads[1:], strict=True):
                weight.grad = grad
            self._adam.step()
            self._steps += 1
            m = self._m[words].mul_(ADAM[0]).add_(grads[0], alpha=1 - ADAM[0])
            v = self._v[words].mul_(ADAM[1]).addcmul_(grads[0], grads[0], value=1 - ADAM[1])
            self._m[words], self._v[words] = m, v
            m, v = m / (1 - ADAM[0] ** self._steps), v / (1 - ADAM[1] ** self._steps)
            self.embed[words] -= self._config.lr * m / (v.sqrt() + EPSILON)
        return loss.item()

    @torch.no_grad()
    def evaluate(self, part, size=128):
        """Accuracy and F1 of entities."""
        totals = np.zeros(5)
        for numbers in strata(np.array([len(s) for s in part["sentences"]]), size, None):
            batch = batch_of(part, numbers[numbers >= 0])
            guess, labels = self.logits(self.embed[batch["words"]], batch, training=False).argmax(1), batch["labels"]
            totals[:2] += int((guess == labels).sum()), len(labels)
            if self.chunks:
                graph = np.repeat(np.arange(len(batch["lengths"])), batch["lengths"])
                totals[2:] += [int(n) for n in self.chunks.count(labels.numpy(), guess.numpy(), graph)]
        return totals[0] / totals[1], f1(*totals[2:])


def part_of(path, config, words, labels, characters):
    """Sentences of a file: rows of the table, beyond its end words to spell; labels; and the spellings."""
    graphs = read_tagged(path, config.column)
    rare, texts, row = {}, [], []
    index, letters = {w: i for i, w in enumerate(words)}, {c: i for i, c in enumerate(characters)}
    for word in graphs.vocab:
        if word in index or not characters:
            row.append(index.get(word, 0))
        else:
            row.append(len(words) + rare.setdefault(word, len(rare)))
            texts.append(np.array([letters.get(c, 0) for c in word]))
    number = {label: i for i, label in enumerate(labels)}
    cut = graphs.vertex_offsets[1:-1]
    tags = np.array([number[name] for name in graphs.label_names])[graphs.label]
    sentences, tags = np.split(np.array(row)[graphs.input_id], cut), np.split(tags, cut)
    return {"sentences": sentences, "labels": tags, "texts": texts, "num_words": len(words)}


def batch_of(part, numbers):
    """What a step takes: distinct rows of the table, distinct words to spell, and for each word which it is."""
    sentences = [part["sentences"][i] for i in numbers]
    ids, word = np.unique(np.concatenate(sentences), return_inverse=True)
    known = int(np.searchsorted(ids, part["num_words"]))
    return {
        "lengths": [len(s) for s in sentences],
        "words": torch.from_numpy(ids[:known]),
        "word": torch.from_numpy(word),
        "texts": [part["texts"][i - part["num_words"]] for i in ids[known:].tolist()],
        "labels": torch.from_numpy(np.concatenate([part["labels"][i] for i in numbers])),
    }


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.peers.torch_tagger", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("train", metavar="TRAIN", help="as for cavs train --task tag")
    parser.add_argument("--dev", required=True)
    parser.add_argument("--test")
    for name, kind in (("program", str), ("column", str), ("hidden", int), ("embedding-size", int), ("char-size", int)):
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS)
    for name, kind in (("epochs", int), ("batch", int), ("lr", float), ("dropout", float), ("min-count", int), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS)
    parser.add_argument("--lstm", choices=("packed", "loop"), default="packed")
    parser.add_argument("--threads", type=int, default=2)
    given = vars(parser.parse_args())
    lstm, threads = given.pop("lstm"), given.pop("threads")
    torch.set_num_threads(threads)
    task = find("tag")
    config, data = task.read(configure(given | {"task": "tag"}))
    torch.manual_seed(config.seed)
    characters = data.facts["characters"]
    paths = {"train": config.train, "dev": config.dev, "test": config.test}
    parts = {k: part_of(path, config, data.words, data.labels, characters) for k, path in paths.items() if path}
    model, best, values = Tagger(config, len(data.words), data.labels, len(characters), lstm), (-1.0, 0), None
    sizes = np.array([len(s) for s in parts["train"]["sentences"]])
    for epoch in range(config.epochs):
        start, losses = time.perf_counter(), []
        for numbers in epoch_batches(sizes, config.batch, config.seed, epoch):
            losses.append(model.step(batch_of(parts["train"], numbers[numbers >= 0])))
        seconds = time.perf_counter() - start
        right, entities = model.evaluate(parts["dev"])
        shown = f"dev accuracy {100 * right:.2f} %, F1 {100 * entities:.2f}"
        print(f"epoch {epoch + 1}: {seconds:.1f} s, loss {np.mean(losses):.4f}, {shown}", flush=True)
        score = entities if model.chunks else right
        if score > best[0]:
            best, values = (score, epoch + 1), model.copy()
    model.load(values)
    print(f"best epoch {best[1]}: dev {100 * best[0]:.2f}")
    if "test" in parts:
        right, entities = model.evaluate(parts["test"])
        print(f"test accuracy {100 * right:.2f} %, F1 {100 * entities:.2f}")


if __name__ == "__main__":
    main()
