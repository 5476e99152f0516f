"""Accuracy peer: the BiLSTM tagger of `cavs train --task tag` in PyTorch, rare words spelled by a character BiLSTM.

    pip install torch
    python -m bench.peers.torch_tagger TRAIN --dev DEV [--test TEST] [--program bilstm]

The recipe `tagging`, written a second time with autograd and no part of the engine; shared are the reader of the
files, the rule of which sentences make a batch, and the count of entities. The BiLSTM is that of `torch_bilstm`, `--lstm
packed` or `loop`. Best epoch by dev F1 of entities where labels are such, else by accuracy; it is tested once.
"""

import argparse
import time

import numpy as np
import torch
from torch.nn.functional import cross_entropy, dropout

from bench.peers.torch_bilstm import BiLSTM
from cavs._feed.sampler import epoch_batches, strata
from cavs.data import is_tagging, span_scores
from cavs.io import read_tagged
from cavs.recipes import tagging

MAX_NORM, ADAM, EPSILON = 5.0, (0.9, 0.999), 1e-8


def glorot(rows, columns, gates=1):
    """Glorot uniform weights for each gate, gates side by side."""
    bound = (6 / (rows + columns)) ** 0.5
    return torch.empty(rows, gates * columns).uniform_(-bound, bound)


def lstm_bias(hidden):
    """Zeros, and ones at the forget gate."""
    b = torch.zeros(4 * hidden)
    b[hidden : 2 * hidden] = 1
    return b


def bilstm(inputs, hidden, kind):
    """A BiLSTM with initial weights."""
    values = {}
    for name in ("forward", "backward"):
        values |= {f"{name}.w": glorot(inputs, hidden, 4), f"{name}.u": glorot(hidden, hidden, 4)}
        values[f"{name}.b"] = lstm_bias(hidden)
    return BiLSTM(values, kind)


class Tagger:
    """Parameters, forward and Adam; rows of the table of words have Adam states of their own, that stand while not read."""

    def __init__(self, config, num_words, labels, num_characters, lstm="packed"):
        self._config, hidden, size = config, config.hidden, config.embedding_size
        self.labels = labels
        self.embed = torch.randn(num_words, size) * 0.1
        self._bilstm = bilstm(size, hidden, lstm)
        self.weights = {
            "w": glorot(2 * hidden, hidden),
            "b": torch.zeros(hidden),
            "v": glorot(hidden, len(labels)),
            "c": torch.zeros(len(labels)),
        } | {f"bilstm.{k}": w for k, w in self._bilstm.weights.items()}
        if num_characters:
            self._spell = bilstm(config.char_size, size // 2, lstm)
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
        h = self._bilstm(dropout(rows.index_select(0, batch["word"]), rate, training), batch["lengths"])
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
        right, count, sides = 0, 0, ([], [])
        for numbers in strata(np.array([len(s) for s in part["sentences"]]), size, None):
            batch = batch_of(part, numbers[numbers >= 0])
            guess, labels = self.logits(self.embed[batch["words"]], batch, training=False).argmax(1), batch["labels"]
            right, count, ends = right + int((guess == labels).sum()), count + len(labels), np.cumsum(batch["lengths"])[:-1]
            for side, ids in zip(sides, (labels, guess), strict=True):
                side += [[self.labels[i] for i in some] for some in np.split(ids.numpy(), ends)]
        return right / count, span_scores(*sides)["all"].f1 if is_tagging(self.labels) else 0.0


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
    """Returns the arguments of a step: distinct rows of the table, distinct words to spell, and an index for each word."""
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
    config = tagging.TaggingOptions(**given | {"train": (given["train"],)}).checked()
    facts = tagging.Tagging.read(config).facts
    words, labels, characters = facts["words"], facts["labels"], facts["letters"]
    torch.manual_seed(config.seed)
    paths = {"train": config.train[0], "dev": config.dev, "test": config.test}
    parts = {k: part_of(path, config, words, labels, characters) for k, path in paths.items() if path}
    model, best, values = Tagger(config, len(words), labels, len(characters), lstm), (-1.0, 0), None
    sizes = np.array([len(s) for s in parts["train"]["sentences"]])
    for epoch in range(config.epochs):
        start, losses = time.perf_counter(), []
        for numbers in epoch_batches(sizes, config.batch, "balanced", config.seed, epoch):
            losses.append(model.step(batch_of(parts["train"], numbers[numbers >= 0])))
        seconds = time.perf_counter() - start
        right, entities = model.evaluate(parts["dev"])
        shown = f"dev accuracy {100 * right:.2f} %, F1 {100 * entities:.2f}"
        print(f"epoch {epoch + 1}: {seconds:.1f} s, loss {np.mean(losses):.4f}, {shown}", flush=True)
        score = entities if is_tagging(labels) else right
        if score > best[0]:
            best, values = (score, epoch + 1), model.copy()
    model.load(values)
    print(f"best epoch {best[1]}: dev {100 * best[0]:.2f}")
    if "test" in parts:
        right, entities = model.evaluate(parts["test"])
        print(f"test accuracy {100 * right:.2f} %, F1 {100 * entities:.2f}")


if __name__ == "__main__":
    main()
