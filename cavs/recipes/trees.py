"""Classifies trees, chains and DAGs: a label at the roots or at every vertex.

    python trees.py --data train.txt --dev dev.txt --out run        # without --data: the reviews that come with cavs
    python trees.py evaluate run test.txt
    python trees.py predict run new.txt --vertices

To change the model, change `init` and `hidden`.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs import recipes, vertex_programs as vp
from cavs.recipes import PROGRAM, UNKNOWN, Data, Mistake, option

REVIEWS = tuple(cavs.data.example(f"reviews.{part}") for part in ("train", "dev"))
REVIEW_LABELS = ("very negative", "negative", "neutral", "positive", "very positive")
WHERE = (None, "root", "all")


@dataclasses.dataclass(frozen=True)
class TreeOptions(recipes.RunOptions):
    """Options of the recipe."""

    program: str | None = option(None, PROGRAM)
    layers: int = option(1, "layers of --program lstm", least=1, most=1000)
    loss: str | None = option(None, "vertices of the loss (default: all, if any but roots have labels)", choices=WHERE)
    score: str | None = option(None, "vertices of the score (default: root in trees of phrases)", choices=WHERE)
    embeddings: str | None = option(None, "text file of word vectors in GloVe's format; other words are drawn at random")
    weight_decay: float = 1e-5


class Trees(recipes.Recipe):
    """A vertex program, and a softmax over the labels."""

    name, Options = "trees", TreeOptions

    @classmethod
    def read(cls, options: TreeOptions) -> Data:
        shipped = not options.train
        if shipped:
            options = dataclasses.replace(options, train=REVIEWS[:1], dev=options.dev or REVIEWS[1])
        parts = recipes.read_parts(cls, options, _read_labelled)
        words, vectors = recipes.vocabulary(options, parts)
        labels = cavs.data.label_names(parts.values())
        parts = {name: cavs.data.with_labels(g.with_vocab(words, UNKNOWN), labels) for name, g in parts.items()}
        notes = recipes.unseen_labels({name: g.label for name, g in parts.items()}, labels)
        program, arity, reads = vp.choose_program(options.program, parts, options.layers)
        label, root = parts["train"].label, cavs.data.is_root(parts["train"])
        loss = options.loss or ("all" if (label[~root] >= 0).any() else "root")
        # The label of a phrase summarises its subtree, so that of the root describes the graph. If inner vertices read words,
        # as in dependency trees, the root is a word like any other.
        rooted = bool((label[root] >= 0).any())
        score = options.score or ("root" if loss == "root" or rooted and not reads else "all")
        if "root" in (loss, score) and not rooted:
            flag = "--loss" if loss == "root" else "--score"
            raise Mistake(f"{flag}: got root, but no root in {options.train[0]} has a label. Write {flag} all.")
        if "root" in (loss, score):
            of = lambda g, where: g.label[cavs.data.is_root(g) | (where == "all")]  # noqa: E731  (the labels that count)
            counted = {"train": of(parts["train"], loss), "dev": of(parts["dev"], score)}
            recipes.unseen_labels(counted, labels, "labels of roots (--score)" if score == "root" else "labels")
        facts = {"words": words, "labels": REVIEW_LABELS if shipped else labels, "program": program, "arity": arity}
        facts |= {"reads": reads, "loss": loss, "score": score, "size": recipes.embedding_size(options, vectors)}
        return Data(facts, parts, vectors, notes)

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
        sched, graphs = sample.sched, sample.graphs
        label, root = self.labels(graphs, sample.present), cavs.data.is_root(graphs)
        return sched, sample.numbers.astype(np.int32), sched.pad(label, -1), sched.pad(root, False)

    def hidden(self, params: Any, batch: Any, key: jax.Array | None = None) -> Any:
        """h of all vertices, (Vp, H): words, dropout, the program, dropout."""
        sched, numbers, *_ = batch
        keys = vp.split_key(vp.vertex_keys(key, sched, numbers), 2)
        drop = functools.partial(vp.dropout, rate=self.options.dropout)
        x = drop(cavs.data.rows(params["words"], sched.input_id), key=keys[0])
        return drop(vp.run_program(self.program, params["program"], sched, x), key=keys[1])

    def loss(self, params: Any, batch: Any, key: jax.Array | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        *_, label, root = batch
        counts = (label >= 0) & (root | (self.facts["loss"] == "all"))
        h = self.hidden(params, batch, key)
        total, _, right = cavs.data.softmax_loss(h, params["w"], params["b"], label, counts)
        total = cavs.data.total(total)
        of = {"count": counts, "right": right, "vertices": label >= 0, "root_right": right & root, "roots": (label >= 0) & root}
        return total, {"loss": total, **{name: cavs.data.total(x) for name, x in of.items()}}

    def scores(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        scores = {"loss": sums["loss"] / max(sums["count"], 1)}
        scores |= {"accuracy (roots)": sums["root_right"] / sums["roots"]} if sums["roots"] else {}
        return scores | ({"accuracy (vertices)": sums["right"] / sums["vertices"]} if sums["vertices"] > sums["roots"] else {})

    def score(self, sums: Mapping[str, float]) -> float:
        right, count = ("root_right", "roots") if self.facts["score"] == "root" else ("right", "vertices")
        return sums[right] / max(sums[count], 1)

    def baseline(self, train: cavs.Graphs, part: cavs.Graphs) -> dict[str, float]:
        """How often the most frequent label of the training data is right, where the score is computed."""
        seen, label = (g.label[cavs.data.is_root(g) | (self.facts["score"] == "all")] for g in (train, part))
        seen, label = seen[seen >= 0], label[label >= 0]
        return {"majority": float((label == np.bincount(seen).argmax()).mean())} if len(seen) and len(label) else {}

    def probabilities(self, params: Any, graphs: cavs.Graphs, path: str) -> np.ndarray:
        """(V, C) the probabilities of the labels at every vertex."""
        known = graphs.with_vocab(self.facts["words"], UNKNOWN).replace(label=None, label_names=None)
        vp.check_fit(self.facts["program"], known, f"FILE: {path}", self.program)
        p = lambda params, batch: jax.nn.softmax(self.hidden(params, batch) @ params["w"] + params["b"][None])  # noqa: E731
        return cavs.data.predict(p, params, self.in_order(known))

    def predict(self, params: Any, path: str, vertices: bool, probabilities: bool) -> Iterator[dict[str, Any]]:
        graphs, numbers = self._read_new(path)
        labels, p = self.facts["labels"], self.probabilities(params, graphs, path)
        graph, texts = cavs.data.graph_of(graphs), cavs.data.phrases_of(graphs) if vertices else cavs.data.sentences_of(graphs)
        for row in range(len(graph)) if vertices else np.flatnonzero(cavs.data.is_root(graphs)).tolist():
            g, best = int(graph[row]), int(p[row].argmax())
            line = {"graph": numbers[g]} | ({"vertex": row - int(graphs.vertex_offsets[g])} if vertices else {})
            line |= {"label": labels[best], "probability": float(p[row, best]), "text": texts[row if vertices else g]}
            yield line | ({"probabilities": dict(zip(labels, p[row].tolist(), strict=True))} if probabilities else {})

    def evaluate(self, params: Any, path: str) -> dict[str, Any]:
        graphs = _read_labelled(path, "file")
        names = graphs.label_names
        if not self.options.train:  # the reviews have numbers, and the labels names
            names = [dict(zip("01234", REVIEW_LABELS, strict=True)).get(name, name) for name in names]
        used = [names[i] for i in np.unique(graphs.label[graphs.label >= 0])]
        if not set(used) & set(self.facts["labels"]):
            expected = ", ".join(self.facts["labels"])
            raise Mistake(f"FILE: got {path} with the labels {', '.join(used[:5])}; expected some of {expected}.")
        labels = [*dict.fromkeys((*self.facts["labels"], *names))]
        true = cavs.data.with_labels(graphs.replace(label_names=names), labels).label
        assert true is not None
        best = self.probabilities(params, graphs, path).argmax(1)
        targets = (np.where(cavs.data.is_root(graphs), true, -1), true)
        roots, vertices = (cavs.data.ConfusionMatrix.of(labels, target, best) for target in targets)
        scores = {"roots": roots} if roots.count else {}
        return {"graphs": len(graphs)} | scores | ({"vertices": vertices} if vertices.count > roots.count else {})

    def _read_new(self, path: str) -> tuple[cavs.Graphs, Sequence[int]]:
        """Reads the graphs to predict, and their numbers. A model of chains also reads plain text, one sentence per line."""
        lines = cavs.io.read_lines(path) if ".txt" in Path(path).suffixes else []
        if (start := "\n".join(lines).lstrip()[:60])[:1] in ("(", ""):
            graphs = recipes.read_graphs(path)
            return graphs, range(len(graphs))
        if vp.PROGRAMS[self.facts["program"]].arity == 1:
            return cavs.io.read_text(lines), [number for number, line in enumerate(lines) if line.strip()]
        raise Mistake(
            f"FILE: got {path}, plain text that begins with {start.splitlines()[0]!r}; expected graphs, because the program "
            f"{self.facts['program']} reads trees or DAGs. Write each sentence as a tree in brackets, (2 (2 not) (1 bad))."
        )


def _read_labelled(path: str, name: str) -> cavs.Graphs:
    graphs = recipes.read_graphs(path, name)
    prefix = f"{recipes.flag(name)}: got {path}"
    numbers = graphs.label if graphs.graph_label is None else graphs.graph_label
    if numbers is not None and numbers.ndim > 1:
        got = f"{prefix} with several numbers per label, of shape {numbers.shape[1:]}"
        raise Mistake(f"{got}; expected one label each, as every --task does. For several write a loop with cavs.data.Loader.")
    if graphs.graph_label is not None or numbers is not None and numbers.dtype != np.int32:
        raise Mistake(f"{prefix} with numbers to predict as labels. Write: cavs train --task regression FILE")
    if graphs.label is None or not (graphs.label >= 0).any():
        raise Mistake(f"{prefix} without labels; expected a label at each root or at every vertex. To label it, write: predict")
    return graphs


if __name__ == "__main__":
    recipes.main(Trees)
