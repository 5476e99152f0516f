"""Cavs under the contract of the peers (`bench.peers`): a `cavs.data.Loader` and a training step under `cavs.data.step`.

`load` reads the graphs once, as a user reads them from a file, and creates a loader over all batches, which chooses the shapes.
It computes the heights of vertices, outside the clock, and `reading` is its time. Every step inside the clock is planned,
scheduled with words and labels, transferred, and run. JAX dispatches asynchronously. The clock stops when the losses of the
last step have arrived.

On a GPU, a thread schedules, and a dispatch has as many training steps as a loader chooses for an epoch of `EPOCH` batches. A
run is an epoch: while it ends, the thread prepares the first `AHEAD` dispatches of the next one, as in a training loop.

Some applications have several graphs per sample. An encoder-decoder has chains and attention graphs. A tagger has chains in
both directions, and possibly the chains of letters of its rare words.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

import cavs
from bench.cells import APPLICATIONS, RNNS, TAGGERS
from bench.graphs import CHARACTERS
from cavs import vertex_programs as vp
from cavs._engines import choose
from cavs._engines.engine import Job
from cavs._run import run as _run
from cavs._run.plans import plan_of
from cavs.kernels import Target

EPOCH = 1024  # batches of an epoch, for which the training steps of one dispatch on a GPU are chosen
AHEAD = 2  # dispatches that are prepared ahead on a GPU
NO_WORD = 1 << 30  # beyond every vocabulary: reads the last row and is never written
ROOM = 8  # minimum number of spellings per batch; rounded up to a power of two, so that batches share compiled code
EVERYWHERE = (*RNNS, *TAGGERS, "encoder_decoder", "lattice_lstm")  # a label at every word; other models have one at the root


def program(cell: str, hidden: int, embed: int, classes: int = 0) -> Any:
    """Returns the ready vertex program of a cell. Taggers need the number of classes."""
    return {
        "tree_lstm": lambda: vp.BinaryTreeLSTM(hidden, embed, leaf_inputs_only=True),
        "tree_fc": lambda: vp.TreeFC(hidden),
        "lstm": lambda: vp.LSTM(hidden, embed),
        "gru": lambda: vp.GRU(hidden, embed),
        "child_sum": lambda: vp.ChildSumTreeLSTM(hidden, embed),
        "td_rnn": lambda: vp.TDRNN(hidden),
        "td_lstm": lambda: vp.TDLSTM(hidden),
        "rvnn": lambda: vp.RvNN(hidden, embed),
        "bilstm": lambda: vp.BiLSTMTagger(classes, hidden, embed, mlp=hidden),
        "char_bilstm": lambda: vp.CharBiLSTMTagger(classes, hidden, embed, CHARACTERS, embed // 4, mlp=hidden),
        "encoder_decoder": lambda: vp.EncoderDecoder(hidden, embed),
        "lattice_lstm": lambda: vp.LatticeLSTM(hidden, embed),
        "dagnn": lambda: vp.DAGNN(hidden, embed),
    }[cell]()


def graphs_of(samples: list[dict[str, Any]]) -> cavs.Graphs:
    """Converts graphs of `bench.cases` to `cavs.Graphs`, with labels at roots, or at every vertex of a chain."""
    if "words" in samples[0]:
        words, labels = (np.concatenate([g[k] for g in samples]) for k in ("words", "labels"))
        return cavs.from_lengths([len(g["words"]) for g in samples], input_id=words, label=labels)
    sizes = np.array([len(g["word"]) for g in samples])
    words = np.concatenate([g["word"] for g in samples])
    label = np.full(len(words), -1)
    label[np.cumsum(sizes) - 1] = [g["label"] for g in samples]
    if "left" in samples[0]:
        pairs = np.concatenate([np.stack([g["left"], g["right"]], 1) for g in samples])
        counts, children = 2 * (pairs[:, 0] >= 0), pairs[pairs >= 0]
    else:
        counts = np.concatenate([np.diff(g["child_offsets"]) for g in samples])
        children = np.concatenate([g["children"] for g in samples])
    return cavs.Graphs.build(sizes, counts, children, input_id=words, label=label)


def read(cell: str, batches: list[list[dict[str, Any]]]) -> Any:
    """Reads all samples of these batches. Returns the data sets of a loader.

    The loss is taken at all vertices with a label. Graphs with `input_id` read words from the embedding, except spellings.
    """
    samples = [g for batch in batches for g in batch]
    lengths = [len(g["words"]) for g in samples if "words" in g]
    if cell == "encoder_decoder":
        source, target = ([len(g[k]) for g in samples] for k in ("source", "target"))
        chains, pairs = vp.EncoderDecoder.graphs(source, target)
        none = [np.full(n, -1) for n in source]
        words, labels = ([x for n, g in zip(none, samples, strict=True) for x in (n, g[k])] for k in ("target", "labels"))
        return [_with(chains, [g["source"] for g in samples]), _with(pairs, words, labels)]
    if cell == "lattice_lstm":
        words = [x for g in samples for x in (g["words"], g["span_words"])]
        labels = [x for g in samples for x in (g["labels"], np.full(len(g["spans"]), -1))]
        return _with(vp.LatticeLSTM.graphs(lengths, [g["spans"] for g in samples]), words, labels)
    if cell in TAGGERS:
        chains = cavs.from_lengths(lengths)
        directions = [_with(chains, [g["words"] for g in samples], [g["labels"] for g in samples]), chains.reversed()]
        return directions + (_spellings(batches) if cell == "char_bilstm" else [])
    if cell in ("td_rnn", "td_lstm"):
        graphs = vp.TDRNN.graphs(lengths, words=np.concatenate([g["words"] for g in samples]))
        label = np.full(graphs.num_vertices, -1)
        label[graphs.vertex_offsets[1:] - 1] = [g["label"] for g in samples]
        return _with(graphs, [graphs.input_id], [label])
    graphs = graphs_of(samples)
    return vp.RvNN.add_kinds(graphs) if cell == "rvnn" else graphs


def _with(graphs: cavs.Graphs, words: list[Any], labels: list[Any] | None = None) -> cavs.Graphs:
    """Returns the graphs with words (-1 for no word) and labels."""
    ids = np.concatenate(words).astype(np.int32)
    label = None if labels is None else np.concatenate(labels).astype(np.int32)
    return dataclasses.replace(graphs, input_id=np.where(ids < 0, np.int32(NO_WORD), ids), label=label)


def _spellings(batches: list[list[dict[str, Any]]]) -> list[Any]:
    """Returns chains of the letters of rare words, in both directions: as many in every batch, filled up with graph 0."""
    letters = [np.zeros(1, int), *(s for batch in batches for g in batch for s in g["spellings"])]
    first = np.cumsum([1, *(len(g["spellings"]) for batch in batches for g in batch)])  # of each sample
    most = max(sum(len(g["spellings"]) for g in batch) for batch in batches)
    room = max(ROOM, 1 << (most - 1).bit_length())

    def pick(index: np.ndarray) -> np.ndarray:
        counts = first[index + 1] - first[index]
        picked = np.zeros(room, int)
        picked[: counts.sum()] = np.arange(counts.sum()) + (first[index] - counts.cumsum() + counts).repeat(counts)
        return picked

    chains = cavs.from_lengths([len(s) for s in letters], input_id=np.concatenate(letters))
    return [(chains, pick), (chains.reversed(), pick)]


class Cavs:
    """One model. The options are those of `cavs.Optimizations`, `cavs.schedule` (`policy`) and `cavs.run` (`engine`)."""

    def __init__(
        self,
        cell: str,
        params: dict[str, np.ndarray],
        threads: int = 2,
        device: str = "cpu",
        policy: str = "batching",
        engine: str | None = None,
        **optimizations: bool,
    ):
        (hidden, classes), embed = params["out_w"].shape, params["embed"].shape[1]
        ready = program(cell, hidden, embed, classes)
        self._cell, self._policy, self._engine, self._device, self._rate = cell, policy, engine, device, 0.0
        self._F = None  # an application may have several functions, and each chooses its engine
        if cell not in APPLICATIONS:
            F = self._F = ready.vertex_function()
            if optimizations:
                state = F.state_tree.unflatten([(ready.hidden,)] * F.state_tree.num_leaves)
                options = cavs.Optimizations(**optimizations)
                self._F = cavs.VertexFunction(ready, state=state, arity=F.arity, optimizations=options)
        dense = _nested({k: jnp.array(v) for k, v in params.items() if k != "embed"})
        self._state: Any = (dense, jnp.array(params["embed"]), jnp.float32(0))
        self._step = cavs.data.step(tune=0)(_training_step(ready, self._F, cell in EVERYWHERE, engine))

    def params(self) -> dict[str, np.ndarray]:
        dense, embed, _ = self._state
        leaves = {keystr(path, simple=True, separator="."): x for path, x in jax.tree.leaves_with_path(dense)}
        return {k: np.asarray(v) for k, v in (leaves | {"embed": embed}).items()}

    def load(self, batches: list[list[dict[str, Any]]]) -> list[np.ndarray]:
        """Reads a data set once, and chooses the shapes. Returns the indices of the samples of each batch."""
        start, sizes = time.perf_counter(), [len(b) for b in batches]
        self._data, self._asked = read(self._cell, batches), list[int]()
        self.reading = (time.perf_counter() - start) / len(batches)
        indices = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        self._all = cavs.data.Loader(self._data, indices, seed=None, policy=self._policy, ahead=0)
        # As many training steps in one dispatch as a loader of its users has.
        long = self._all if self._device == "cpu" else self._loader(indices * max(1, EPOCH // len(indices)), None, 0)
        self.steps = long.steps
        return indices

    def _loader(self, batches: Iterable[np.ndarray], steps: int | None, ahead: int) -> cavs.data.Loader:
        options: dict[str, Any] = {"seed": None, "policy": self._policy, "shapes": self._all}
        return cavs.data.Loader(self._data, batches, **options, steps=steps, ahead=ahead)

    def schedules(self, batches: list[np.ndarray]) -> Iterable[Any]:
        """Does all host work of these batches: yields schedules that hold words and labels."""
        return self._loader(iter(batches), 1, 0)

    def ahead(self, batches: list[np.ndarray]) -> Iterable[Any]:
        """Does the same as a training loop on this device does: yields what the step takes, on the device."""
        if self._device == "cpu":
            return self._loader(iter(batches), self.steps, 0)
        if (batch_ids := [*map(id, batches)]) != self._asked:
            self._asked, self._epochs = batch_ids, self._loader(batches, self.steps, AHEAD)
        return self._epochs  # the next epoch of the same batches

    def compile(self, batches: list[np.ndarray]) -> None:
        """Compiles in parallel all that a stream of these batches will run: each shape alone and in stacks."""
        by_shape: dict[Any, Any] = {}
        for stack in (*self.ahead(batches), *self.ahead([i for i in batches for _ in range(self.steps)])):
            by_shape.setdefault((jax.tree.structure(stack), *(x.shape for x in jax.tree.leaves(stack))), stack)
        # A later call of the step finds this code.
        lowered = [self._step.lower(self._state, stack) for stack in by_shape.values()]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda x: x.compile(), lowered))

    def warm(self, batches: list[np.ndarray]) -> None:
        """Runs a stack of each shape once."""
        if self._device != "cpu":
            self.run([i for i in batches for _ in range(self.steps)])
            self.run(batches)

    def engines(self, batches: list[np.ndarray]) -> list[str]:
        """Returns the names of the engines that run these batches."""
        if self._F is None:
            return []
        dense, embed, _ = self._state
        avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dense)
        plan = plan_of(self._F, avals, jax.ShapeDtypeStruct(embed.shape[1:], embed.dtype))
        shapes = {sched.shape: _run.kind_names(self._F, sched) for sched in self.schedules(batches)}
        jobs = [Job(plan, shape, kinds, Target.here()) for shape, kinds in shapes.items()]
        return sorted({choose.choose_engine(self._engine, job).name for job in jobs})

    def run(self, batches: list[np.ndarray], lr: float = 0.05) -> list[float]:
        """Runs training steps and returns the losses before each update."""
        return self.train(self.ahead(batches), lr)

    def train(self, batches: Iterable[Any], lr: float = 0.05) -> list[float]:
        """Does the same for batches prepared by `schedules` or `ahead`."""
        if lr != self._rate:
            self._rate, self._state = lr, (*self._state[:2], jax.device_put(np.float32(lr)))
        losses = []
        for batch in batches:
            self._state, values = self._step(self._state, batch)
            losses.append(values)
        jax.block_until_ready(self._state)
        return np.concatenate([np.atleast_1d(x) for x in jax.device_get(losses)]).tolist()

    def step(self, batch: Any, lr: float = 0.05) -> float:
        return self.run(self.load([batch]) if isinstance(batch, list) else [batch], lr)[0]

    def compilations(self) -> int:
        """Returns the number of compiled programs: batch shapes, alone and in stacks."""
        return self._step.compilations


def _training_step(ready: Any, F: cavs.VertexFunction | None, everywhere: bool, engine: str | None) -> Any:
    """Returns the training step of one batch: SGD of all parameters, and of the rows of the embedding that the batch reads."""

    def loss(params: Any, rows: list[jax.Array], scheds: tuple[cavs.Schedule, ...]) -> Any:
        """Returns the mean over the labels. `rows`: the vectors of the words, for each kind of graphs that reads words."""
        logits = _logits(ready, F, params, rows, scheds, everywhere, engine)
        labelled = next(s for s in scheds if "label" in s.shape.fields)
        labels = labelled.label if everywhere else labelled.label[labelled.roots]
        of_label = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1, mode="clip")[:, 0]
        return -jnp.where(labels >= 0, of_label, 0).sum() / (labels >= 0).sum()

    def step(state: Any, batch: Any) -> Any:
        params, embed, lr = state
        scheds = batch if isinstance(batch, tuple) else (batch,)
        readers = [s for s in scheds if "input_id" in s.shape.fields][: 1 if len(scheds) == 4 else None]  # not of letters
        words = [jnp.where(s.input_id < 0, NO_WORD, s.input_id) for s in readers]
        rows = [embed.at[w].get(mode="clip") for w in words]
        value, (d_params, d_rows) = jax.value_and_grad(loss, (0, 1))(params, rows, scheds)
        params = jax.tree.map(lambda p, d: p - lr * d, params, d_params)
        for w, d in zip(words, d_rows, strict=True):
            embed = embed.at[w].add(-lr * d, mode="drop")
        return (params, embed, lr), value

    return step


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Nests a flat dict: `encoder.w` becomes `w` in `encoder`."""
    out: dict[str, Any] = {}
    for name, value in flat.items():
        parent, (*parts, last) = out, name.split(".")
        for part in parts:
            parent = parent.setdefault(part, {})
        parent[last] = value
    return out


def _logits(ready: Any, F: Any, params: Any, rows: Any, scheds: Any, everywhere: bool, engine: str | None) -> jax.Array:
    if isinstance(ready, (vp.BiLSTMTagger, vp.CharBiLSTMTagger)):
        out = {"w": params["mlp_w"], "b": params["mlp_b"], "v": params["out_w"], "c": params["out_b"]}
        tagger = {"bilstm": [{k: params[k] for k in ("forward", "backward")}], **out}
        (sched, back, *of_spellings), (x,) = scheds, rows
        if isinstance(ready, vp.BiLSTMTagger):
            return ready.run(tagger, sched, back, x)
        char_params = {"tagger": tagger, "spell": [params["spell"]], "characters": params["characters"]}
        forward, backward = of_spellings
        vectors = ready.vectors(char_params, forward, backward, jnp.maximum(forward.input_id, 0))
        rare = sched.input_id == NO_WORD
        return ready.run(char_params, sched, back, x, vectors, jnp.where(rare, jnp.cumsum(rare) - 1, -1))
    if isinstance(ready, vp.EncoderDecoder):
        (source, pairs), (x, y) = scheds, rows
        h = ready.run(params, source, pairs, x, y)
    else:
        F = F or ready.vertex_function()
        h = cavs.run(F, params, scheds[0], rows[0], select=None if everywhere else scheds[0].roots, engine=engine)
    return h @ params["out_w"] + params["out_b"]
