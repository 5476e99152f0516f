"""Our system under the peers' contract: schedule, then one jitted training step.

Graphs are read once (`load`), as a user's are from a file: that is where a vertex's height is computed, outside the clock,
and `reading` says how long it took. Inside the clock, every step: selecting the batch, its schedule (`cavs.schedules`, which
prepares the next few thousand vertices at once), padding the words, transfer (one vector, `cavs.together`), forward,
backward, SGD. JAX dispatches asynchronously, so the next batch is scheduled while this one computes; the clock runs until the
last step's losses are here. On a GPU a process of its own makes the schedules and a thread sends them ahead
(`process=True`, `cavs.prefetch`), both from within the clock: they start from nothing when it starts. On a CPU, whose cores
the step itself uses, the loop makes them between steps. The peers are synchronous by nature.
"""

import functools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs.vertex_programs import LSTM, BinaryTreeLSTM, ChildSumTreeLSTM, TreeFC

DEPTH = 8  # batches that wait on a GPU, and whether they are sent there ahead; else the step's call sends them
SEND_AHEAD = True
NO_WORD = 1 << 30  # out of every vocabulary: reads the last row and is never written


def program(cell: str, hidden: int, embed: int) -> Any:
    """The ready vertex program of a cell."""
    return {
        "tree_lstm": lambda: BinaryTreeLSTM(hidden, embed, leaf_inputs_only=True),
        "tree_fc": lambda: TreeFC(hidden),
        "lstm": lambda: LSTM(hidden, embed),
        "child_sum": lambda: ChildSumTreeLSTM(hidden, embed),
    }[cell]()


def graphs_of(samples: list[dict[str, Any]]) -> cavs.Graphs:
    """`cavs.Graphs` of graphs as `bench.cases` makes them; labels at roots, or at every vertex of a chain."""
    if "words" in samples[0]:
        words, labels = (np.concatenate([g[k] for g in samples]) for k in ("words", "labels"))
        return cavs.from_lengths([len(g["words"]) for g in samples], input_id=words, label=labels)
    sizes = np.array([len(g["word"]) for g in samples])
    words = np.concatenate([g["word"] for g in samples])
    label = np.full(len(words), -1)
    label[np.cumsum(sizes) - 1] = [g["label"] for g in samples]
    if "left" in samples[0]:
        both = np.concatenate([np.stack([g["left"], g["right"]], 1) for g in samples])
        counts, children = 2 * (both[:, 0] >= 0), both[both >= 0]
    else:
        counts = np.concatenate([np.diff(g["child_offsets"]) for g in samples])
        children = np.concatenate([g["children"] for g in samples])
    return cavs.Graphs.build(sizes, counts, children, input_id=words, label=label)


class Cavs:
    """One model; `fusion`, `eager`, `lazy` as in `cavs.Optimizations`, `policy` as in `schedule`, `engine` as in `run`."""

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
        ready = program(cell, params["out_w"].shape[0], params["embed"].shape[1])
        F = ready.vertex_function()
        if optimizations:
            state = F.state_tree.unflatten([(ready.hidden,)] * F.state_tree.num_leaves)
            F = cavs.VertexFunction(ready, state=state, arity=F.arity, optimizations=cavs.Optimizations(**optimizations))
        self._p = {k: jnp.array(v) for k, v in params.items() if k != "embed"}
        self._embed, self._policy, self._everywhere = jnp.array(params["embed"]), policy, cell == "lstm"
        self._step = _make_step(F, self._everywhere, engine)
        self._device, self._rates = device, {}
        self._shapes: list[Any] = []

    def params(self) -> dict[str, np.ndarray]:
        return {k: np.asarray(v) for k, v in (self._p | {"embed": self._embed}).items()}

    def load(self, batches: list[list[dict[str, Any]]]) -> list[Any]:
        """Reads a data set once: (graphs, which of them) for each batch."""
        start = time.perf_counter()
        graphs, sizes = graphs_of([g for b in batches for g in b]), [len(b) for b in batches]
        self.reading = (time.perf_counter() - start) / len(batches)
        order = np.arange(len(graphs))
        return [(graphs, i) for i in np.split(order, np.cumsum(sizes)[:-1])]

    def schedules(self, batches: list[Any], process: bool = False) -> Iterator[cavs.Together]:
        """All that the host does for these batches, one after another."""
        indices = (i for _, i in batches)
        prepared: Any = cavs.schedules(batches[0][0], indices, policy=self._policy, shapes=self._shapes, process=process)
        for graphs, sched in prepared:
            words = sched.pad(graphs.input_id, NO_WORD)
            if self._everywhere:
                yield cavs.together((sched, words, sched.pad(graphs.label, -1)))
            else:
                yield cavs.together((sched, words, graphs.label[graphs.vertex_offsets[1:] - 1]))

    def ahead(self, batches: list[Any]) -> Iterator[cavs.Together]:
        """The same as a training loop on this device should have it."""
        if self._device == "cpu":
            return self.schedules(batches)
        return cavs.prefetch(self.schedules(batches, process=True), _sent if SEND_AHEAD else lambda x: x, DEPTH)

    def run(self, batches: list[Any], lr: float = 0.05) -> list[float]:
        """Training steps one after another; the losses before each update."""
        return self.train(self.ahead(batches), lr)

    def train(self, batches: Iterable[cavs.Together], lr: float = 0.05) -> list[float]:
        """The same for batches as `schedules` or `ahead` prepare them."""
        if lr not in self._rates:
            self._rates[lr] = jax.device_put(np.float32(lr))
        losses, rate = [], self._rates[lr]
        for batch in batches:
            self._p, self._embed, loss = self._step(self._p, self._embed, batch, rate)
            losses.append(loss)
        jax.block_until_ready((self._p, self._embed))
        return [float(x) for x in jax.device_get(losses)]

    def step(self, batch: Any, lr: float = 0.05) -> float:
        return self.run(self.load([batch]) if isinstance(batch, list) else [batch], lr)[0]

    def compilations(self) -> int:
        """How many shapes of batches were compiled."""
        return self._step._cache_size()


def _sent(batch: cavs.Together) -> cavs.Together:
    return jax.tree.map(jnp.asarray, batch)  # half of what `jax.device_put` costs the host, seen with JAX 0.10 and 0.11


def _make_step(F: cavs.VertexFunction, everywhere: bool, engine: str | None) -> Any:
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, embed: Any, batch: cavs.Together, lr: Any) -> Any:
        sched, words, labels = batch.apart()

        def loss(params: Any, x: Any) -> Any:
            h = cavs.run(F, params, sched, x, at=None if everywhere else sched.roots, engine=engine)
            log_p = jax.nn.log_softmax(h @ params["out_w"] + params["out_b"])
            of_label = jnp.take_along_axis(log_p, labels[:, None], 1, mode="clip")[:, 0]
            if not everywhere:
                return -of_label.mean()
            return -jnp.where(labels >= 0, of_label, 0).sum() / sched.num_vertices

        x = embed.at[words].get(mode="clip")
        value, (d_params, d_x) = jax.value_and_grad(loss, (0, 1))(params, x)
        params = jax.tree.map(lambda p, d: p - lr * d, params, d_params)
        return params, embed.at[words].add(-lr * d_x, mode="drop"), value

    return step
