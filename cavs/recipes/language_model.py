"""A language model over a text, one sentence per line: an LSTM that predicts the next word.

    python language_model.py --data sentences.txt --out run
    python language_model.py predict run new.txt                    # scores each sentence

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
from cavs.recipes import PROGRAM, UNKNOWN, Data, Mistake, option

BEGIN, END = "<s>", "</s>"


@dataclasses.dataclass(frozen=True)
class LanguageOptions(recipes.RunOptions):
    """Options of the recipe."""

    program: str = option("lstm", PROGRAM)
    layers: int = option(1, "layers of --program lstm", least=1, most=1000)
    hidden: int = 200
    epochs: int = 10
    optimizer: str = "adam"
    lr: float = 0.002
    min_count: int = 2
    embeddings: str | None = option(None, "text file of word vectors in GloVe's format; other words are drawn at random")


class LanguageModel(recipes.Recipe):
    """A chain reads `<s> w1 w2`, and predicts `w1 w2 </s>`."""

    name, Options = "language_model", LanguageOptions
    needs = "a text file, one sentence per line"
    noun = "sentence"
    shows = "score your own sentences"

    @classmethod
    def read(cls, options: LanguageOptions) -> Data:
        parts = recipes.read_parts(cls, options, lambda path, name: cavs.io.read_text(path))
        words, vectors = recipes.vocabulary(options, parts, (UNKNOWN, BEGIN, END))
        parts = {name: to_predict(graphs, words) for name, graphs in parts.items()}
        program, *_ = vp.choose_program(options.program, parts, options.layers)
        return Data({"words": words, "program": program, "size": recipes.embedding_size(options, vectors)}, parts, vectors)

    def init(self, key: jax.Array, vectors: cavs.io.Vectors | None = None) -> dict[str, Any]:
        program, head, words = jax.random.split(key, 3)
        shape = self.options.hidden, len(self.facts["words"])
        return {
            "words": recipes.init_table(words, shape[1], self.facts["size"], vectors),
            "program": self.program.init(program),
            "w": jax.nn.initializers.glorot_uniform()(head, shape, jnp.float32),
            "b": jnp.zeros(shape[1], jnp.float32),
        }

    def collate(self, sample: Any) -> Any:
        label = sample.sched.pad(self.labels(sample.graphs, sample.present), -1)
        return sample.sched, sample.numbers.astype(np.int32), label

    def hidden(self, params: Any, batch: Any, key: jax.Array | None = None) -> Any:
        """h of all vertices, (Vp, H): words, dropout, the program, dropout."""
        sched, numbers, _ = batch
        keys = vp.split_key(vp.vertex_keys(key, sched, numbers), 2)
        drop = functools.partial(vp.dropout, rate=self.options.dropout)
        x = drop(cavs.data.rows(params["words"], sched.input_id), key=keys[0])
        return drop(vp.run_program(self.program, params["program"], sched, x), key=keys[1])

    def loss(self, params: Any, batch: Any, key: jax.Array | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        *_, label = batch
        total = cavs.data.softmax_loss(self.hidden(params, batch, key), params["w"], params["b"], label)[0]
        total = cavs.data.total(total)
        return total, {"loss": total, "count": cavs.data.total(label >= 0)}

    def scores(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        return {"perplexity": _perplexity(sums["loss"] / max(sums["count"], 1))}

    def baseline(self, train: Any, part: Any) -> dict[str, float]:
        """The perplexity of the frequencies of words, plus one."""
        counts = np.bincount(train.label, minlength=len(self.facts["words"])) + 1.0
        return {"unigram perplexity": float(np.exp(-np.log(counts / counts.sum())[part.label].mean()))}

    def nll(self, params: Any, graphs: cavs.Graphs) -> np.ndarray:
        """(V,) the negative log-likelihood of the word after each vertex."""

        def fun(params: Any, batch: Any) -> jax.Array:
            return cavs.data.softmax_loss(self.hidden(params, batch), params["w"], params["b"], batch[-1])[1]

        return cavs.data.predict(fun, params, self.in_order(graphs)).astype(np.float64)

    def predict(self, params: Any, path: str, vertices: bool, probabilities: bool) -> Iterator[dict[str, Any]]:
        if probabilities:
            raise Mistake("--probabilities: not valid with a language model. Omit it.")
        graphs = cavs.io.read_text(path)
        known = to_predict(graphs, self.facts["words"])
        nlls = np.split(self.nll(params, known), known.vertex_offsets[1:-1])
        scored = zip(cavs.data.sentences_of(graphs), nlls, strict=True)
        for number, line in enumerate(cavs.io.read_lines(path)):
            text, nll = next(scored) if line.strip() else ("", np.zeros(0))
            if vertices:
                for i, (word, x) in enumerate(zip((*text.split(), END)[: len(nll)], nll.tolist(), strict=True)):
                    yield {"sentence": number, "word": i, "text": word, "log_probability": -x}
            else:
                perplexity = _perplexity(nll.mean()) if text else math.nan
                yield {"sentence": number, "log_probability": 0 - float(nll.sum()), "perplexity": perplexity, "text": text}

    @classmethod
    def graphs(cls, path: str) -> cavs.Graphs:
        return cavs.io.read_text(path)

    def evaluate(self, params: Any, path: str) -> dict[str, Any]:
        graphs = to_predict(cavs.io.read_text(path), self.facts["words"])
        mean, unknown = float(self.nll(params, graphs).mean()), graphs.label == self.facts["words"].index(UNKNOWN)
        scores = {"sentences": len(graphs), "words": graphs.num_vertices, "unknown_words": int(unknown.sum()), "nll": mean}
        return scores | {"perplexity": _perplexity(mean)}


def _perplexity(nll: float) -> float:
    return math.exp(min(nll, 700))


def to_predict(graphs: cavs.Graphs, words: list[str]) -> cavs.Graphs:
    """Chains of words as chains that read `<s>` and the words, and whose labels are the words and `</s>`."""
    known = graphs.with_vocab(words, UNKNOWN).input_id
    assert known is not None
    inputs = np.insert(known, graphs.vertex_offsets[:-1], words.index(BEGIN))
    labels = np.insert(known, graphs.vertex_offsets[1:], words.index(END))
    return cavs.from_lengths(np.diff(graphs.vertex_offsets) + 1, input_id=inputs, label=labels, vocab=words)


if __name__ == "__main__":
    recipes.main(LanguageModel)
