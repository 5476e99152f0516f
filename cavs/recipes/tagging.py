"""Tags every word of a sentence, such as parts of speech or entities, by a BiLSTM. Rare words are spelled letter by letter.

    python tagging.py --data ner.txt --dev ner.dev.txt --out run    # word|TAG, columns, or .conllu
    python tagging.py predict run new.txt

To change the model, change `program` and `logits`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import cavs
from cavs import recipes, vertex_programs as vp
from cavs.recipes import UNKNOWN, Data, Mistake, option

PROGRAMS = ("char-bilstm", "bilstm")


@dataclasses.dataclass(frozen=True)
class TaggingOptions(recipes.RunOptions):
    """Options of the recipe."""

    program: str = option("char-bilstm", f"one of {', '.join(PROGRAMS)}")
    column: str | None = option(None, "the column of the label (default: upos in .conllu; else the last)")
    layers: int = option(1, "layers of the BiLSTM", least=1, most=1000)
    embedding_size: int | None = option(None, "size of a word's vector (default: 128, or as in --embeddings)", least=1)
    char_size: int = option(32, "size of a character's vector", least=1)
    batch: int = 32
    epochs: int = 12
    optimizer: str = "adam"
    lr: float = 0.002
    dropout: float = option(0.3, "dropout of inputs, states and the hidden layer", least=0, most=0.999)
    min_count: int = option(5, "rarer words are spelled", least=1)
    embeddings: str | None = option(None, "text file of word vectors in GloVe's format; other words are drawn at random")


class Tagging(recipes.Recipe):
    """Word vectors or spelled words, a BiLSTM, a tanh layer, and a softmax over the tags."""

    name, Options = "tagging", TaggingOptions
    needs = "a file of tagged sentences"
    noun = "sentence"
    shows = "tag your own sentences"

    @classmethod
    def read(cls, options: TaggingOptions) -> Data:
        parts = recipes.read_parts(cls, options, lambda path, name: _read(path, options.column, recipes.flag(name)))
        words, vectors = recipes.vocabulary(options, parts)
        labels, program = cavs.data.label_names(parts.values()), vp.complete(options.program, PROGRAMS)
        spelled = program == "char-bilstm"
        letters = dict.fromkeys(letter for word in parts["train"].vocab for letter in word)
        facts = {"words": words, "labels": labels, "program": program, "letters": (UNKNOWN, *letters) if spelled else ()}
        facts |= {"size": recipes.embedding_size(options, vectors, 128)}
        if spelled and facts["size"] % 2:
            name = "embedding-size" if vectors is None else "embeddings"
            got = f"--{name}: got vectors of size {facts['size']}; expected an even number"
            raise Mistake(f"{got}: each direction computes one half of a word's vector.")
        parts = {name: cavs.data.with_labels(g, labels) for name, g in parts.items()}
        notes = recipes.unseen_labels({name: g.label for name, g in parts.items()}, labels)
        return Data(facts, {name: vp.spelled_chains(g, words, facts["letters"]) for name, g in parts.items()}, vectors, notes)

    @property
    def program(self) -> Any:
        """The tagger, whose `init` and `run` are those of the model."""
        options, facts = self.options, self.facts
        shared: dict[str, Any] = {"labels": len(facts["labels"]), "hidden": options.hidden, "inputs": facts["size"]}
        shared |= {"mlp": options.hidden, "layers": options.layers, "dropout": options.dropout}
        if not facts["letters"]:
            return vp.BiLSTMTagger(**shared)
        return vp.CharBiLSTMTagger(**shared, characters=len(facts["letters"]), char_inputs=options.char_size)

    def init(self, key: jax.Array, vectors: cavs.io.Vectors | None = None) -> dict[str, Any]:
        program, words = jax.random.split(key)
        table = recipes.init_table(words, len(self.facts["words"]), self.facts["size"], vectors)
        return {"words": table, "program": self.program.init(program)}

    def sources(self, part: tuple[cavs.Graphs, ...]) -> list[Any]:
        return vp.spelled_sources(part, self.options.batch)

    def collate(self, sample: Any) -> Any:
        (words, turned, *spellings), (sched, back, *letter_scheds) = sample.graphs, sample.sched
        label, spelled = self.labels(words, sample.present), ()
        if spellings:
            spelled = (*letter_scheds, letter_scheds[0].pad(spellings[0].input_id, 0), sched.pad(vp.spelled_in(turned)[1], -1))
        return sched, back, sample.numbers.astype(np.int32), sched.pad(label, -1), spelled

    def logits(self, params: Any, batch: Any, key: jax.Array | None = None) -> Any:
        """(Vp, labels) logits of every word."""
        sched, back, numbers, _, spelled = batch
        x, keys = cavs.data.rows(params["words"], sched.input_id), vp.vertex_keys(key, sched, numbers)
        if not spelled:
            return self.program.run(params["program"], sched, back, x, key=keys)
        chars, chars_back, letters, place = spelled
        vectors = self.program.vectors(params["program"], chars, chars_back, letters)
        return self.program.run(params["program"], sched, back, x, vectors, place, key=keys)

    def loss(self, params: Any, batch: Any, key: jax.Array | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        label, logits = batch[3], self.logits(params, batch, key)
        labelled = label >= 0
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(label, 0))
        total = cavs.data.total(jnp.where(labelled, nll, 0))
        right = labelled & (logits.argmax(-1) == label)
        return total, {"loss": total, "count": cavs.data.total(labelled), "right": cavs.data.total(right)}

    def held_out(self, params: Any, part: tuple[cavs.Graphs, ...], loader: cavs.data.Loader) -> dict[str, float]:
        """The metrics of all batches, with the entities of whole sentences: true, predicted, and both."""
        sums = super().held_out(params, part, loader)
        if not cavs.data.is_tagging(self.facts["labels"]):
            return sums
        one_device = self.options.devices == 1  # predictions are those of one device
        predicted = cavs.data.predict(self.best, params, loader if one_device else self.in_order(part))
        return sums | self.entities(part[0], part[0].label, predicted)["all"]._asdict()

    def best(self, params: Any, batch: Any) -> jax.Array:
        """(Vp,) the most likely tag of every word."""
        return self.logits(params, batch).argmax(-1)

    def entities(self, graphs: cavs.Graphs, true: Any, best: Any, labels: Any = None) -> dict[str, cavs.data.Found]:
        """Counts the entities of tagged sentences. A word without a label is outside of all of them."""
        names = (*(labels or self.facts["labels"]), "O")
        sides = [[names[i] for i in np.where(true < 0, -1, x).tolist()] for x in (true, best)]
        spans = [*pairwise(graphs.vertex_offsets.tolist())]
        return cavs.data.span_scores(*([side[a:b] for a, b in spans] for side in sides))

    def scores(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        count = max(sums["count"], 1)
        entities = cavs.data.Found(*(int(sums.get(name, 0)) for name in ("true", "predicted", "both")))
        of_entities = {"F1": entities.f1} if entities.true + entities.predicted else {}
        return {"loss": sums["loss"] / count, "accuracy": sums["right"] / count, **of_entities}

    def score(self, sums: Mapping[str, float]) -> float:
        scores = self.scores(sums)
        return float(scores.get("F1", scores["accuracy"]) or 0.0)

    def baseline(self, train: tuple[cavs.Graphs, ...], part: tuple[cavs.Graphs, ...]) -> dict[str, float]:
        seen, label = (side[0].label[side[0].label >= 0] for side in (train, part))
        return {"majority": float((label == np.bincount(seen).argmax()).mean())}

    def probabilities(self, params: Any, graphs: cavs.Graphs) -> np.ndarray:
        """(V, labels) the probabilities of the labels of every word."""
        bare = graphs.replace(label=None, label_names=None)
        p = lambda params, batch: jax.nn.softmax(self.logits(params, batch))  # noqa: E731
        return cavs.data.predict(p, params, self.in_order(vp.spelled_chains(bare, self.facts["words"], self.facts["letters"])))

    def predict(self, params: Any, path: str, vertices: bool, probabilities: bool) -> Iterator[dict[str, Any]]:
        if probabilities and not vertices:
            raise Mistake("--probabilities: got it without --vertices; expected both for a tagger: one line per word.")
        graphs = self._read_new(path)
        labels, p, words = self.facts["labels"], self.probabilities(params, graphs), cavs.data.words_of(graphs)
        best, spans = p.argmax(1), pairwise(graphs.vertex_offsets.tolist())
        for number, line in enumerate(_lines(path, graphs)):
            a, b = next(spans) if line else (0, 0)
            if not vertices:
                yield {"sentence": number, "text": " ".join(f"{words[i]}|{labels[best[i]]}" for i in range(a, b))}
            for i in range(a, b) if vertices else ():
                cells = {"sentence": number, "word": i - a, "label": labels[best[i]], "probability": float(p[i, best[i]])}
                cells |= {"text": words[i]}
                yield cells | ({"probabilities": dict(zip(labels, p[i].tolist(), strict=True))} if probabilities else {})

    def evaluate(self, params: Any, path: str) -> dict[str, Any]:
        graphs, labels = _read(path, self.options.column, "FILE"), self.facts["labels"]
        labels = [*dict.fromkeys((*labels, *graphs.label_names))]
        true, best = cavs.data.with_labels(graphs, labels).label, self.probabilities(params, graphs).argmax(1)
        assert true is not None
        scores = {"sentences": len(graphs), "words": cavs.data.ConfusionMatrix.of(labels, true, best)}
        if cavs.data.is_tagging(labels):
            scores["entities"] = self.entities(graphs, true, best, labels)
        return scores

    def _read_new(self, path: str) -> cavs.Graphs:
        """Reads sentences, whose tags do not matter. Raises a `Mistake` if the tags in a `.txt` may be words of plain text."""
        try:
            graphs = cavs.io.read_tagged(path, self.options.column, labelled=False)
        except cavs.io.FormatError:
            raise
        except ValueError:  # the file does not have the column of the training data
            graphs = cavs.io.read_tagged(path, labelled=False)
        tags = graphs.label_names or ()
        if not tags or ".txt" not in Path(path).suffixes or {*tags} & {*self.facts["labels"]}:
            return graphs
        got = f"FILE: got {path} with the tags {', '.join(map(repr, tags[:5]))}, none of which the model has"
        raise Mistake(
            f"{got}; expected one of its tags, or plain text, one sentence per line, without blank lines and tabs. If they are "
            "columns, call the file FILE.tsv."
        )

    @classmethod
    def graphs(cls, path: str) -> cavs.Graphs:
        return cavs.io.read_tagged(path, labelled=False)


def _read(path: str, column: str | None, where: str) -> cavs.Graphs:
    try:
        graphs = cavs.io.read_tagged(path, column)
    except ValueError as error:
        raise Mistake(f"--{error}" if str(error).startswith("column") else f"{where}: {error}") from error
    if graphs.label is None or not (graphs.label >= 0).any():
        raise Mistake(f"{where}: got {path} without labels; expected one at every word. To tag it, write: predict")
    return graphs


def _lines(path: str, graphs: cavs.Graphs) -> list[bool]:
    """Whether each line of the output has a sentence. Blank lines of plain text, one sentence per line, keep their place."""
    counts = [len(line.encode().split()) for line in cavs.io.read_lines(path)]  # bytes: only ASCII white space separates words
    plain = [count for count in counts if count] == np.diff(graphs.vertex_offsets).tolist()
    return [count > 0 for count in counts] if plain else [True] * len(graphs)


if __name__ == "__main__":
    recipes.main(Tagging)
