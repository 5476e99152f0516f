"""Our system on the applications (`bench.applications`) under the peers' contract: schedule, then one jitted training step.

As `bench.ours`: reading is outside the clock, everything from selecting the batch to updated parameters is inside.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from bench.ours import NO_WORD, graphs_of
from cavs.vertex_programs import DAGNN, TDLSTM, TDRNN, EncoderDecoder, LatticeLSTM, RvNN


def program(cell: str, hidden: int, embed: int) -> Any:
    """The ready vertex program of a cell."""
    return {
        "td_rnn": lambda: TDRNN(hidden),
        "td_lstm": lambda: TDLSTM(hidden),
        "rvnn": lambda: RvNN(hidden, embed),
        "encoder_decoder": lambda: EncoderDecoder(hidden, embed),
        "lattice_lstm": lambda: LatticeLSTM(hidden, embed),
        "dagnn": lambda: DAGNN(hidden, embed),
    }[cell]()


def _read(cell: str, samples: list[dict[str, Any]]) -> tuple[tuple[cavs.Graphs, ...], list[np.ndarray]]:
    """All samples as graphs, and the labels of each sample."""
    if cell == "encoder_decoder":
        source, target = ([len(g[k]) for g in samples] for k in ("source", "target"))
        chains, pairs = EncoderDecoder.graphs(source, target)
        chains = _with_words(chains, np.concatenate([g["source"] for g in samples]))
        pairs = _with_words(pairs, np.concatenate([x for g in samples for x in (np.full(len(g["source"]), -1), g["target"])]))
        return (chains, pairs), [np.concatenate([np.full(len(g["source"]), -1), g["labels"]]) for g in samples]
    if cell == "lattice_lstm":
        words = np.concatenate([x for g in samples for x in (g["words"], g["span_words"])])
        graphs = LatticeLSTM.graphs([len(g["words"]) for g in samples], [g["spans"] for g in samples], input_id=words)
        return (graphs,), [np.concatenate([g["labels"], np.full(len(g["spans"]), -1)]) for g in samples]
    labels = [np.array([g["label"]]) for g in samples]
    if cell in ("td_rnn", "td_lstm"):
        return (TDRNN.graphs([len(g["words"]) for g in samples], words=np.concatenate([g["words"] for g in samples])),), labels
    graphs = graphs_of(samples)
    return (RvNN.add_kinds(graphs) if cell == "rvnn" else graphs,), labels


def _with_words(graphs: cavs.Graphs, words: np.ndarray) -> cavs.Graphs:
    counts = np.diff(graphs.child_offsets)
    return cavs.Graphs.build(np.diff(graphs.vertex_offsets), counts, graphs.children, input_id=words)


class CavsApplication:
    """One application, trained."""

    def __init__(
        self, cell: str, params: dict[str, np.ndarray], threads: int = 2, device: str = "cpu", engine: str | None = None
    ):
        self._cell, self._everywhere = cell, cell in ("encoder_decoder", "lattice_lstm")
        mine: dict[str, Any] = {k: jnp.array(v) for k, v in params.items() if k != "embed"}
        if cell == "encoder_decoder":
            mine["encoder"] = {k: mine.pop("encoder_" + k) for k in ("w", "u", "b")}
        self._p, self._embed = mine, jnp.array(params["embed"])
        self._step = _make_step(program(cell, params["out_w"].shape[0], params["embed"].shape[1]), self._everywhere, engine)
        self._shapes: tuple[list[Any], ...] = ([], [])

    def params(self) -> dict[str, np.ndarray]:
        mine: dict[str, Any] = dict(self._p)
        mine |= {"encoder_" + k: v for k, v in mine.pop("encoder", {}).items()}
        return {k: np.asarray(v) for k, v in (mine | {"embed": self._embed}).items()}

    def load(self, batches: list[list[dict[str, Any]]]) -> list[Any]:
        """Reads a data set once: (graphs, labels, which of them) for each batch."""
        start = time.perf_counter()
        graphs, labels = _read(self._cell, [g for b in batches for g in b])
        self.reading = (time.perf_counter() - start) / len(batches)
        index = np.split(np.arange(len(labels)), np.cumsum([len(b) for b in batches])[:-1])
        return [(graphs, labels, i) for i in index]

    def schedule(self, batch: Any) -> tuple[Any, ...]:
        """All that the host does for a batch."""
        graphs, labels, index = batch
        graphs = [g[index] for g in graphs]
        scheds = [cavs.schedule(g, shapes=shapes) for g, shapes in zip(graphs, self._shapes, strict=False)]
        words = [_padded(s, g.input_id) for s, g in zip(scheds, graphs, strict=True)]
        label = np.concatenate([labels[i] for i in index])
        return scheds, words, scheds[-1].pad(label, -1) if self._everywhere else label

    def run(self, batches: list[Any], lr: float = 0.05) -> list[float]:
        """Training steps one after another; the losses before each update."""
        losses = []
        for batch in batches:
            self._p, self._embed, loss = self._step(self._p, self._embed, *self.schedule(batch), lr)
            losses.append(loss)
        jax.block_until_ready((self._p, self._embed, losses))
        return [float(x) for x in losses]

    def step(self, batch: Any, lr: float = 0.05) -> float:
        return self.run(self.load([batch]) if isinstance(batch, list) else [batch], lr)[0]

    def compilations(self) -> int:
        """How many shapes of batches were compiled."""
        return self._step._cache_size()


def _padded(sched: cavs.Schedule, ids: Any) -> np.ndarray:
    return sched.pad(np.where(ids < 0, NO_WORD, ids).astype(np.int32), NO_WORD)


def _make_step(ready: Any, everywhere: bool, engine: str | None) -> Any:
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, embed: Any, scheds: list[cavs.Schedule], words: list[Any], labels: Any, lr: Any) -> Any:
        def loss(params: Any, rows: list[Any]) -> Any:
            if isinstance(ready, EncoderDecoder):
                h = ready.run(params, *scheds, *rows)
            else:
                at = None if everywhere else scheds[0].roots
                h = cavs.run(ready.vertex_function(), params, scheds[0], rows[0], at=at, engine=engine)
            log_p = jax.nn.log_softmax(h @ params["out_w"] + params["out_b"])
            of_label = jnp.take_along_axis(log_p, labels[:, None], 1, mode="clip")[:, 0]
            return -jnp.where(labels >= 0, of_label, 0).sum() / (labels >= 0).sum()

        rows = [embed.at[w].get(mode="clip") for w in words]
        value, (d_params, d_rows) = jax.value_and_grad(loss, (0, 1))(params, rows)
        params = jax.tree.map(lambda p, d: p - lr * d, params, d_params)
        for w, d in zip(words, d_rows, strict=True):
            embed = embed.at[w].add(-lr * d, mode="drop")
        return params, embed, value

    return step
