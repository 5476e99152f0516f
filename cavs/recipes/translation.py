"""Translates sentences by an LSTM encoder-decoder with attention. Words are separated by spaces.

    python translation.py --data pairs.tsv --dev dev.tsv --out run  # source TAB target
    python translation.py predict run new.txt

To change the model, change `init` and `hidden`.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs import recipes, vertex_programs as vp
from cavs.recipes import UNKNOWN, Data, Mistake

END = "</s>"


@dataclasses.dataclass(frozen=True)
class TranslationOptions(recipes.RunOptions):
    """Options of the recipe."""

    hidden: int = 256
    batch: int = 32
    epochs: int = 10
    optimizer: str = "adam"
    lr: float = 0.001
    min_count: int = 2


class Translation(recipes.Recipe):
    """A target reads `</s> w1 w2`, and predicts `w1 w2 </s>`. The words of both languages are rows of one table.

    A part of the data is the two graphs of [`cavs.vertex_programs.EncoderDecoder`][]: chains of source words, and the pairs.
    """

    name, Options = "translation", TranslationOptions
    needs = "a file of sentence pairs, `source TAB target` on each line"
    noun = "pair"
    shows = "translate your own sentences"

    @classmethod
    def read(cls, options: TranslationOptions) -> Data:
        parts = recipes.read_parts(cls, options, lambda path, name: cavs.io.read_pairs(path))
        source, target = ({name: part[side] for name, part in parts.items()} for side in range(2))
        labels = recipes.vocabulary(options, target, (UNKNOWN, END))[0]
        words = [*dict.fromkeys((*labels, *recipes.vocabulary(options, source)[0]))]
        facts = {"words": words, "labels": labels, "size": recipes.embedding_size(options, None)}
        return Data(facts, {name: to_translate(part[0], part[1], facts) for name, part in parts.items()})

    @property
    def program(self) -> vp.EncoderDecoder:
        """The encoder-decoder."""
        return vp.EncoderDecoder(self.options.hidden, self.facts["size"])

    def init(self, key: jax.Array, vectors: cavs.io.Vectors | None = None) -> dict[str, Any]:
        program, head, words = jax.random.split(key, 3)
        shape = self.options.hidden, len(self.facts["labels"])
        return {
            "words": recipes.init_table(words, len(self.facts["words"]), self.facts["size"], vectors),
            "program": self.program.init(program),
            "w": jax.nn.initializers.glorot_uniform()(head, shape, jnp.float32),
            "b": jnp.zeros(shape[1], jnp.float32),
        }

    def collate(self, sample: Any) -> Any:
        (_, graphs), (source, pairs) = sample.graphs, sample.sched
        at = np.flatnonzero(graphs.height > 0).astype(np.int32)  # the target words
        label = self.labels(graphs, sample.present)[at]
        room = sum(pairs.shape.inner) - len(at)
        at, label = (np.pad(x, (0, room), constant_values=fill) for x, fill in ((at, 0), (label, -1)))
        return source, pairs, sample.numbers.astype(np.int32), at, label

    def hidden(self, params: Any, batch: Any, key: jax.Array | None = None, target: jax.Array | None = None) -> Any:
        """The pushes of the target words `at`, (R, H). `target` are other words of the pairs, (Vp,)."""
        source, pairs, numbers, at, _ = batch
        keys = vp.split_key(key, 3)
        drop = functools.partial(vp.dropout, rate=self.options.dropout)
        words = pairs.input_id if target is None else target
        x = drop(cavs.data.rows(params["words"], source.input_id), key=vp.vertex_keys(keys[0], source, numbers))
        y = drop(cavs.data.rows(params["words"], words), key=vp.vertex_keys(keys[1], pairs, numbers))
        a = self.program.run(params["program"], source, pairs, x, y, select=at)
        last = vp.vertex_keys(keys[2], pairs, numbers)
        return drop(a, key=None if last is None else last._replace(first=last.first[at], second=last.second[at]))

    def loss(self, params: Any, batch: Any, key: jax.Array | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        *_, label = batch
        total, _, right = cavs.data.softmax_loss(self.hidden(params, batch, key), params["w"], params["b"], label)
        total = cavs.data.total(total)
        return total, {"loss": total, "count": cavs.data.total(label >= 0), "right": cavs.data.total(right)}

    def scores(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        count = max(sums["count"], 1)
        return {"perplexity": math.exp(min(sums["loss"] / count, 700)), "words right": sums["right"] / count}

    def baseline(self, train: tuple[cavs.Graphs, ...], part: tuple[cavs.Graphs, ...]) -> dict[str, float]:
        """The perplexity of the frequencies of target words, plus one."""
        seen, label = (side[1].label[side[1].label >= 0] for side in (train, part))
        counts = np.bincount(seen, minlength=len(self.facts["labels"])) + 1.0
        return {"unigram perplexity": float(np.exp(-np.log(counts / counts.sum())[label].mean()))}

    def translate(self, params: Any, sources: cavs.Graphs, batch: int = 64) -> list[str]:
        """Greedy translations of chains of words. They never contain `<unk>`."""
        facts, index = self.facts, {word: i for i, word in enumerate(self.facts["words"])}
        rows, end = np.array([index[word] for word in facts["labels"]]), facts["labels"].index(END)
        known, compiled = sources.with_vocab(facts["words"], UNKNOWN), jax.jit(self.most_likely)
        lines, order = [""] * len(known), np.argsort(np.diff(known.vertex_offsets), kind="stable")
        for start in range(0, len(known), batch):
            numbers = order[start : start + batch]
            translations = vp.greedy(lambda *batch: compiled(params, *batch), known[numbers], rows, end)
            for g, words in zip(numbers.tolist(), translations, strict=True):
                lines[g] = " ".join(facts["labels"][i] for i in words)
        return lines

    def most_likely(self, params: Any, source: Any, pairs: Any, y: jax.Array, at: jax.Array) -> jax.Array:
        """The most likely word except `<unk>` after each of the rows `at`; `y` are the words of the targets so far."""
        a = self.hidden(params, (source, pairs, None, at, None), target=y)
        return (a @ params["w"] + params["b"][None]).at[:, self.facts["labels"].index(UNKNOWN)].set(-jnp.inf).argmax(-1)

    def predict(self, params: Any, path: str, vertices: bool, probabilities: bool) -> Iterator[dict[str, Any]]:
        if vertices or probabilities:
            flag = "--vertices" if vertices else "--probabilities"
            raise Mistake(f"{flag}: not valid with a translator. Omit it.")
        lines = [line.split("\t")[0].split(" ||| ")[0].strip() for line in cavs.io.read_lines(path)]
        translations = iter(self.translate(params, cavs.io.read_text(lines)) if any(lines) else ())
        for number, line in enumerate(lines):
            yield {"sentence": number, "text": next(translations) if line else ""}

    def evaluate(self, params: Any, path: str) -> dict[str, Any]:
        try:
            cavs.data.bleu([""], [""])
        except ModuleNotFoundError as error:
            raise Mistake(str(error)) from error
        sources, target = cavs.io.read_pairs(path)
        part = to_translate(sources, target, self.facts)
        sums = cavs.data.evaluate(self.sums, params, self.in_order(part))
        scores = {"pairs": len(sources), "words": int(sums["count"]), "nll": -self.score(sums)}
        scores |= {"perplexity": math.exp(min(-self.score(sums), 700)), "words_right": sums["right"] / max(sums["count"], 1)}
        return scores | cavs.data.bleu(self.translate(params, sources), cavs.data.sentences_of(target))

    @classmethod
    def graphs(cls, path: str) -> cavs.Graphs:
        sources, targets = cavs.io.read_pairs(path)
        words = [*dict.fromkeys((UNKNOWN, END, *sources.vocab, *targets.vocab))]
        pairs = to_translate(sources, targets, {"words": words, "labels": words})[1]
        return pairs.replace(label=None, vocab=words)


def to_translate(source: cavs.Graphs, target: cavs.Graphs, facts: Mapping[str, Any]) -> tuple[cavs.Graphs, cavs.Graphs]:
    """The graphs of the encoder and of the decoder for chains of words. Source vertices have the label -1."""
    words, labels, ends = facts["words"], facts["labels"], target.vertex_offsets
    row, label = (target.with_vocab(names, UNKNOWN).input_id for names in (words, labels))
    assert row is not None and label is not None
    row, label = np.insert(row, ends[:-1], words.index(END)), np.insert(label, ends[1:], labels.index(END))
    chains, pairs = vp.EncoderDecoder.graphs(np.diff(source.vertex_offsets), np.diff(ends) + 1)
    input_id, pair_labels = np.full((2, pairs.num_vertices), -1, np.int32)
    input_id[pairs.height > 0], pair_labels[pairs.height > 0] = row, label
    chains = chains.replace(input_id=source.with_vocab(words, UNKNOWN).input_id)
    return chains, pairs.replace(input_id=input_id, label=pair_labels)


if __name__ == "__main__":
    recipes.main(Translation)
