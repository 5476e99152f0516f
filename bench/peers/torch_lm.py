"""Perplexity peer: the language model of `cavs train --task lm` in PyTorch, `nn.LSTM` over packed sentences.

    pip install torch
    python -m bench.peers.torch_lm TRAIN --dev DEV [--hidden 128 --vocab-size 10000 --epochs 2]

The recipe `language_model`, written a second time with autograd and no part of the engine; shared are the reader of the
text and the rule of which sentences make a batch, so that both take the same steps. An epoch prints its training time and
perplexities; every line is one sentence, whose words and end are predicted.
"""

import argparse
import dataclasses
import math
import time

import numpy as np
import torch
from torch.nn.functional import cross_entropy, dropout
from torch.nn.utils.rnn import PackedSequence

from bench.peers.levels import time_major
from bench.peers.torch_peer import to_torch
from bench.peers.torch_tagger import ADAM, EPSILON, MAX_NORM, glorot, lstm_bias
from cavs._feed.sampler import epoch_batches, strata
from cavs.recipes import language_model


class LanguageModel:
    """Parameters, forward and Adam; rows of the table of words have Adam states of their own, that stand while not read."""

    def __init__(self, config, num_words):
        self._config, hidden, size = config, config.hidden, config.embedding_size
        self.embed = torch.randn(num_words, size) * 0.1
        self._lstm = torch.nn.LSTM(size, hidden)
        with torch.no_grad():
            self._lstm.weight_ih_l0.copy_(to_torch(glorot(size, hidden, 4)))
            self._lstm.weight_hh_l0.copy_(to_torch(glorot(hidden, hidden, 4)))
            self._lstm.bias_ih_l0.copy_(to_torch(lstm_bias(hidden)))
            self._lstm.bias_hh_l0.zero_().requires_grad_(False)
        self._out_w, self._out_b = glorot(hidden, num_words).requires_grad_(), torch.zeros(num_words, requires_grad=True)
        self._weights = [*(w for w in self._lstm.parameters() if w.requires_grad), self._out_w, self._out_b]
        self._adam = torch.optim.Adam(self._weights, lr=config.lr, betas=ADAM, eps=EPSILON)
        self._m, self._v, self._steps = torch.zeros_like(self.embed), torch.zeros_like(self.embed), 0

    def loss(self, rows, batch, training, reduction="mean"):
        """Returns the loss of all positions, in packed order. `rows` are the rows of the table that the batch reads."""
        rate = self._config.dropout
        x = dropout(rows.index_select(0, batch["word"]), rate, training)
        h = dropout(self._lstm(PackedSequence(x, batch["live"]))[0].data, rate, training)
        return cross_entropy(torch.addmm(self._out_b, h, self._out_w), batch["labels"], reduction=reduction)

    def step(self, batch):
        """One training step; returns the loss before it."""
        words = batch["words"]
        rows = self.embed[words].requires_grad_()
        loss = self.loss(rows, batch, training=True)
        grads = torch.autograd.grad(loss, [rows, *self._weights])
        with torch.no_grad():
            norm = torch.stack(torch._foreach_norm(grads)).norm()
            torch._foreach_mul_(grads, (MAX_NORM / norm).clamp(max=1.0))
            for weight, grad in zip(self._weights, grads[1:], strict=True):
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
    def perplexity(self, graphs, size=80):
        """exp of the mean over all words."""
        total, count = 0.0, 0
        for numbers in strata(np.diff(graphs.vertex_offsets), size, None):
            batch = batch_of(graphs, numbers[numbers >= 0])
            total += float(self.loss(self.embed[batch["words"]], batch, training=False, reduction="sum"))
            count += len(batch["labels"])
        return math.exp(total / count)


def batch_of(graphs, numbers):
    """Returns the arguments of a step, in packed order."""
    some = graphs[numbers]
    index, live, _ = time_major(np.diff(some.vertex_offsets))
    words, word = np.unique(some.input_id[index], return_inverse=True)
    labels = torch.from_numpy(some.label[index].astype(np.int64))
    return {
        "words": torch.from_numpy(words.astype(np.int64)),
        "word": torch.from_numpy(word),
        "live": torch.from_numpy(live),
        "labels": labels,
    }


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.peers.torch_lm", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("train", metavar="TRAIN", help="as for cavs train --task lm")
    parser.add_argument("--dev", required=True)
    for name, kind in (("hidden", int), ("embedding-size", int), ("epochs", int), ("batch", int), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS)
    for name, kind in (("lr", float), ("dropout", float), ("min-count", int), ("vocab-size", int)):
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=2)
    given = vars(parser.parse_args())
    torch.set_num_threads(given.pop("threads"))
    options = language_model.LanguageOptions(**given | {"train": (given["train"],)}).checked()
    data = language_model.LanguageModel.read(options)
    config, train, dev = dataclasses.replace(options, embedding_size=data.facts["size"]), data.parts["train"], data.parts["dev"]
    torch.manual_seed(config.seed)
    model, best = LanguageModel(config, len(data.facts["words"])), math.inf
    sizes = np.diff(train.vertex_offsets)
    for epoch in range(config.epochs):
        start, total, count = time.perf_counter(), 0.0, 0
        for numbers in epoch_batches(sizes, config.batch, "balanced", config.seed, epoch):
            batch = batch_of(train, numbers[numbers >= 0])
            total, count = total + model.step(batch) * len(batch["labels"]), count + len(batch["labels"])
        seconds = time.perf_counter() - start
        held_out = model.perplexity(dev)
        best = min(best, held_out)
        print(f"epoch {epoch + 1}: {seconds:.1f} s, perplexity {math.exp(total / count):.2f}, dev {held_out:.2f}", flush=True)
    print(f"best dev {best:.2f}")


if __name__ == "__main__":
    main()
