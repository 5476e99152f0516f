"""Predicts numbers: of vertices, of roots, or of whole graphs.

    python regression.py --data designs.jsonl --out run             # {"children": [[], [0]], "label": 0.73}
    python regression.py predict run new.jsonl

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

WHERE = (None, "root", "all")


@dataclasses.dataclass(frozen=True)
class RegressionOptions(recipes.RunOptions):
    """Options of the recipe."""

    program: str | None = option(None, PROGRAM)
    layers: int = option(1, "layers of --program lstm", least=1, most=1000)
    loss: str | None = option(None, "where the loss is (default: all, if not only roots have numbers)", choices=WHERE)
    embeddings: str | None = option(None, "text file of word vectors in GloVe's format; other words are drawn at random")
    weight_decay: float = 1e-5


class Regression(recipes.Recipe):
    """A vertex program, and a linear layer with one output, trained on squared errors."""

    name, Options = "regression", RegressionOptions
    needs = "a file of graphs with numbers as labels"
    shows = "predict the numbers of your own graphs"
    names_vertices = False  # whether predictions of roots name the vertex, too, as graphs may have several

    @classmethod
    def read(cls, options: RegressionOptions) -> Data:
        parts = cls.read_parts(options)
        at = _where(options, parts["train"])
        parts = {name: _with_targets(g, at, recipes.flag(name, part=True)) for name, g in parts.items()}
        words, vectors = recipes.vocabulary(options, parts)
        parts = {name: g.with_vocab(words, UNKNOWN) for name, g in parts.items()}
        program, arity, reads = vp.choose_program(options.program, parts, options.layers)
        values = targets(parts["train"], at)
        values = values[~np.isnan(values)]
        facts = {"words": words, "program": program, "arity": arity, "reads": reads, "at": at, "mean": float(values.mean())}
        facts |= {"scale": float(values.std()) or 1.0, "size": recipes.embedding_size(options, vectors)}
        return Data(facts, parts, vectors)

    @classmethod
    def read_parts(cls, options: RegressionOptions) -> dict[str, cavs.Graphs]:
        """The graphs of all files."""
        return recipes.read_parts(cls, options, cls.read_file)

    @classmethod
    def read_file(cls, path: str, name: str = "file") -> cavs.Graphs:
        """The graphs of a file. Whole numbers become float64, too, so that files with and without fractions can be joined."""
        graphs = recipes.read_graphs(path, name)
        fields, names = {"label": graphs.label, "graph_label": graphs.graph_label}, graphs.label_names
        if names is not None:
            if not all(map(str.isdecimal, names)):
                return graphs
            fields["label"] = np.array([*map(float, names), np.nan])[graphs.label]
        return graphs.replace(label_names=None, **{key: x if x is None else x.astype(np.float64) for key, x in fields.items()})

    def init(self, key: jax.Array, vectors: cavs.io.Vectors | None = None) -> dict[str, Any]:
        program, words = jax.random.split(key)
        return {
            "words": recipes.init_table(words, len(self.facts["words"]), self.facts["size"], vectors),
            "program": self.program.init(program),
            "w": jnp.zeros(self.options.hidden, jnp.float32),  # the first prediction is the mean
            "b": jnp.zeros((), jnp.float32),
        }

    def collate(self, sample: Any) -> Any:
        sched, graphs, present = sample.sched, sample.graphs, sample.present
        # Standardised in 64 bits: in 32, numbers far from zero that differ a little are equal.
        target = (targets(graphs, self.facts["at"]) - self.facts["mean"]) / self.facts["scale"]
        if self.facts["at"] == "graph":
            target = np.where(present, target, np.nan)
        else:
            target = sched.pad(np.where(np.repeat(present, np.diff(graphs.vertex_offsets)), target, np.nan), np.nan)
        root = sched.pad(cavs.data.is_root(graphs), False)
        return sched, sample.numbers.astype(np.int32), target.astype(np.float32), root

    def hidden(self, params: Any, batch: Any, key: jax.Array | None = None) -> Any:
        """h of all vertices, (Vp, H): words, dropout, the program, dropout."""
        sched, numbers, *_ = batch
        keys = vp.split_key(vp.vertex_keys(key, sched, numbers), 2)
        drop = functools.partial(vp.dropout, rate=self.options.dropout)
        x = drop(cavs.data.rows(params["words"], sched.input_id), key=keys[0])
        return drop(vp.run_program(self.program, params["program"], sched, x), key=keys[1])

    def standardised(self, params: Any, batch: Any, at: str, key: jax.Array | None = None) -> jax.Array:
        """Predictions minus the mean, over the scale: (Vp,), or for `at` "graph" (G,), the means over the roots."""
        sched, _, _, root = batch
        values = self.hidden(params, batch, key) @ params["w"] + params["b"]
        if at != "graph":
            return values
        graphs = sched.shape.graphs
        over_roots = lambda x: jax.ops.segment_sum(jnp.where(root, x, 0), sched.graph, graphs + 1)[:graphs]  # noqa: E731
        return over_roots(values) / jnp.maximum(over_roots(jnp.ones_like(values)), 1)

    def loss(self, params: Any, batch: Any, key: jax.Array | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        *_, target, _ = batch
        labelled = ~jnp.isnan(target)
        distance = jnp.where(labelled, target, 0)
        values = self.standardised(params, batch, self.facts["at"], key)
        total = cavs.data.total(jnp.where(labelled, values - distance, 0) ** 2)
        sums = {"count": labelled, "distance": distance, "square": distance**2}
        return total, {"loss": total, **{name: cavs.data.total(x) for name, x in sums.items()}}

    def scores(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        error, distance, square = (sums[name] / max(sums["count"], 1) for name in ("loss", "distance", "square"))
        spread, scale = max(square - distance**2, 0), self.facts["scale"]
        alike = spread <= max(1e-9 * square, 1e-12)  # rounding of equal targets
        r2 = None if alike else 1 - error / spread
        return {"RMSE": scale * math.sqrt(error), "R2": r2, "standard deviation": scale * math.sqrt(spread)}

    def values(self, params: Any, graphs: cavs.Graphs, path: str, at: str) -> np.ndarray:
        """The predictions of graphs (G,), or of all vertices (V,)."""
        known = graphs.with_vocab(self.facts["words"], UNKNOWN).replace(label=None, label_names=None, graph_label=None)
        vp.check_fit(self.facts["program"], known, f"FILE: {path}", self.program)
        fun = lambda params, batch: self.standardised(params, batch, at)  # noqa: E731
        predictions = cavs.data.predict(fun, params, self.in_order(known), "graphs" if at == "graph" else "vertices")
        return self.facts["mean"] + self.facts["scale"] * predictions.astype(np.float64)

    def predict(self, params: Any, path: str, vertices: bool, probabilities: bool) -> Iterator[dict[str, Any]]:
        if probabilities:
            raise Mistake(f"--probabilities: not valid with a model of --task {self.name}. Omit it.")
        graphs, at = self.read_file(path), "all" if vertices else self.facts["at"]
        values, graph = self.values(params, graphs, path, at).tolist(), cavs.data.graph_of(graphs).tolist()
        named = at != "graph" and (vertices or self.names_vertices)
        texts = self.texts(path, graphs) if named else cavs.data.sentences_of(graphs)
        roots = range(len(graphs)) if at == "graph" else np.flatnonzero(cavs.data.is_root(graphs)).tolist()
        for row in range(len(graph)) if vertices else roots:
            g = row if at == "graph" else graph[row]
            place = {"graph": g} | ({"vertex": row - int(graphs.vertex_offsets[g])} if named else {})
            yield place | {"prediction": values[row], "text": texts[row if named else g]}

    def texts(self, path: str, graphs: cavs.Graphs) -> list[str]:
        """The text beside each vertex."""
        return cavs.data.phrases_of(graphs)

    def pairs(self, params: Any, path: str) -> tuple[np.ndarray, np.ndarray]:
        """The targets of a file, and the predictions for them."""
        at = self.facts["at"]
        graphs = _with_targets(self.read_file(path), at, f"FILE: {path}")
        true, guess = targets(graphs, at), self.values(params, graphs, path, at)
        labelled = ~np.isnan(true)
        return true[labelled], guess[labelled]

    def evaluate(self, params: Any, path: str) -> dict[str, Any]:
        return dict(cavs.data.errors(*self.pairs(params, path)))

    def draw(self, ax: Any, params: Any, path: str) -> None:
        true, guess = self.pairs(params, path)
        ax.plot(true, guess, ".", alpha=min(1.0, 30 / math.sqrt(len(true))), markersize=4)
        ends = [min(true.min(), guess.min()), max(true.max(), guess.max())]
        ax.plot(ends, ends, color="tab:gray", linewidth=1)
        ax.set(xlabel="true", ylabel="predicted", title=f"{len(true):,} labels")

    @classmethod
    def graphs(cls, path: str) -> cavs.Graphs:
        return cls.read_file(path)


def targets(graphs: cavs.Graphs, at: str) -> np.ndarray:
    """(G,) or (V,) float64 targets, NaN where there is none: of graphs, of roots, or of vertices."""
    labels = graphs.graph_label if at == "graph" else graphs.label
    if labels is None or labels.ndim > 1 or at != "graph" and graphs.label_names is not None:
        return np.full(len(graphs) if at == "graph" else graphs.num_vertices, np.nan)
    return np.where(cavs.data.is_root(graphs), labels, np.nan) if at == "root" else np.array(labels, np.float64)


def _where(options: RegressionOptions, train: cavs.Graphs) -> str:
    """Where the targets are: "graph", "root" or "all"."""
    if train.graph_label is not None:
        if options.loss is not None:
            raise Mistake(f"--loss: got {options.loss}, but the labels of {options.train[0]} are those of graphs. Omit --loss.")
        return "graph"
    inner = np.where(cavs.data.is_root(train), np.nan, targets(train, "all"))
    return options.loss or ("root" if np.isnan(inner).all() else "all")


def _with_targets(graphs: cavs.Graphs, at: str, where: str) -> cavs.Graphs:
    """The graphs with float64 targets. Raises a `Mistake` if there are none, or they are not single finite numbers."""
    labels = graphs.graph_label if at == "graph" else graphs.label
    if labels is not None and labels.ndim > 1:
        raise Mistake(
            f"{where}: got labels of shape {labels.shape[1:]}; expected one number each. For several write a loop with "
            "cavs.data.Loader."
        )
    values = targets(graphs, at)
    if np.isnan(values).all() or np.isinf(values).any():
        noun = {"graph": "each graph", "root": "each root", "all": "vertices"}[at]
        got = "infinite labels" if np.isinf(values).any() else f"no numbers as labels of {noun}"
        example = '{"children": [[], [0]], "label": 0.73} or "labels": [null, 0.73] in .jsonl'
        raise Mistake(f"{where}: got {got}; expected finite numbers such as {example}.")
    return graphs.replace(label_names=None, **({"graph_label": values, "label": None} if at == "graph" else {"label": values}))


if __name__ == "__main__":
    recipes.main(Regression)
