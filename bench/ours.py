"""Cavs under the contract of the peers (`bench.peers`): schedule, then one jitted training step.

`load` reads the graphs once, as a user reads them from a file. It computes the heights of vertices, outside the clock, and
`reading` is its time. Every step inside the clock selects the batch, schedules it (`_feed.schedules`, which prepares the
next few thousand vertices at once, with words and labels), transfers one vector, and runs a training step. JAX dispatches
asynchronously, so the next batch is scheduled while the current one computes. The clock stops when the losses of the last
step have arrived.

On a GPU, worker processes schedule (`workers=WORKERS`). Batches of equal shape, each with its own graphs, are sent together:
one transfer and one dispatch for 16 or 32 training steps (`_feed.stacked`, `lax.scan`), in which XLA runs independent
kernels in parallel (`cavs.concurrent_jit`). A thread stacks and sends the batches (`_feed.prefetch`), unless they are
small. All of this happens inside the clock: nothing is prepared before it starts. On a CPU the step itself uses all cores, so
the loop schedules between steps.
"""

import concurrent.futures
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs._engines import choose
from cavs._feed.packed import Packed
from cavs._feed.prefetch import prefetch
from cavs._feed.schedules import schedules
from cavs._feed.stacked import stacked
from cavs._run import run as _run
from cavs._run.plans import plan_of
from cavs.vertex_programs import LSTM, BinaryTreeLSTM, ChildSumTreeLSTM, TreeFC

STACK, FEW = 16, 8  # training steps in one dispatch on a GPU; twice as many for batches of at most FEW graphs
UNROLL = 4  # training steps in one CUDA graph
WORKERS = max(1, min(8, (os.cpu_count() or 1) // 2))  # processes that schedule on a GPU machine
NO_WORD = 1 << 30  # beyond every vocabulary: reads the last row and is never written


def program(cell: str, hidden: int, embed: int) -> Any:
    """Returns the ready vertex program of a cell."""
    return {
        "tree_lstm": lambda: BinaryTreeLSTM(hidden, embed, leaf_inputs_only=True),
        "tree_fc": lambda: TreeFC(hidden),
        "lstm": lambda: LSTM(hidden, embed),
        "child_sum": lambda: ChildSumTreeLSTM(hidden, embed),
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
        both = np.concatenate([np.stack([g["left"], g["right"]], 1) for g in samples])
        counts, children = 2 * (both[:, 0] >= 0), both[both >= 0]
    else:
        counts = np.concatenate([np.diff(g["child_offsets"]) for g in samples])
        children = np.concatenate([g["children"] for g in samples])
    return cavs.Graphs.build(sizes, counts, children, input_id=words, label=label)


def stack_of(sizes: list[int]) -> int:
    """Returns the number of training steps in one dispatch, for batches of these numbers of graphs."""
    return STACK if max(sizes) > FEW else 2 * STACK


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
        ready = program(cell, params["out_w"].shape[0], params["embed"].shape[1])
        F = ready.vertex_function()
        if optimizations:
            state = F.state_tree.unflatten([(ready.hidden,)] * F.state_tree.num_leaves)
            F = cavs.VertexFunction(ready, state=state, arity=F.arity, optimizations=cavs.Optimizations(**optimizations))
        self._p = {k: jnp.array(v) for k, v in params.items() if k != "embed"}
        self._embed, self._policy, self._everywhere = jnp.array(params["embed"]), policy, cell == "lstm"
        self._F, self._engine = F, engine
        self._step = make_step(_loss(F, self._everywhere, engine), _parts, stacked=device != "cpu")
        self._device, self._rates = device, {}
        self._shapes: list[Any] = []
        self._warm, self._stack = False, 1

    def params(self) -> dict[str, np.ndarray]:
        return {k: np.asarray(v) for k, v in (self._p | {"embed": self._embed}).items()}

    def load(self, batches: list[list[dict[str, Any]]]) -> list[Any]:
        """Reads a data set once. Returns (graphs, indices of graphs) for each batch."""
        start = time.perf_counter()
        graphs, sizes = graphs_of([g for b in batches for g in b]), [len(b) for b in batches]
        self.reading = (time.perf_counter() - start) / len(batches)
        order, self._stack = np.arange(len(graphs)), stack_of(sizes)
        return [(graphs, i) for i in np.split(order, np.cumsum(sizes)[:-1])]

    def schedules(self, batches: list[Any], workers: int = 0) -> Iterator[Any]:
        """Does all host work of these batches: yields schedules that hold words and labels."""
        indices, with_ids = (i for _, i in batches), ("input_id", "label")
        shapes = tuple(self._shapes) if workers > 1 else self._shapes
        options: Any = {"policy": self._policy, "shapes": shapes, "fields": with_ids, "workers": workers}
        return (sched for _, sched in schedules(batches[0][0], indices, **options))

    def ahead(self, batches: list[Any]) -> Iterator[Any]:
        """Does the same in the way recommended for a training loop on this device."""
        if self._device == "cpu":
            return self.schedules(batches)
        workers = WORKERS if self._warm else 1  # several, if no shape is new
        stacks = stacked(self.schedules(batches, workers=workers), self._stack)
        return prefetch(stacks, jax.device_put) if self._stack == STACK else stacks

    def compile(self, batches: list[Any], lr: float = 0.05) -> None:
        """Compiles in parallel all that a stream of these batches will run: each shape alone and in stacks."""
        each: dict[Any, Any] = {}
        for batch in self.schedules(batches):
            each.setdefault(jax.tree.structure(batch), {})[*(x.shape for x in jax.tree.leaves(batch))] = batch
        counts, distinct = (1, self._stack), [b for of in each.values() for b in of.values()]
        stacks = [jax.tree.map(lambda x, n=n: np.stack([x] * n), b) for b in distinct for n in counts]
        # A later call of the step finds this code.
        lowered = [self._step.lower(self._p, self._embed, stack, np.float32(lr)) for stack in stacks]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda x: x.compile(), lowered))

    def warm(self, batches: list[Any]) -> None:
        """Runs a stack of each shape once, and starts the processes that schedule."""
        if self._device != "cpu":
            self.train(stacked((b for b in self.schedules(batches) for _ in range(self._stack)), self._stack))
            self._warm = True
            self.run(batches)

    def engines(self, batches: list[Any]) -> list[str]:
        """Returns the names of the engines that run these batches."""
        if self._F is None:
            return []
        avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._p)
        plan = plan_of(self._F, avals, jax.ShapeDtypeStruct(self._embed.shape[1:], self._embed.dtype))
        shapes = {sched.shape: _run.kind_names(self._F, sched) for sched in self.schedules(batches)}
        found = {choose.choose_engine(self._engine, plan, shape, kinds) for shape, kinds in shapes.items()}
        return sorted(map(choose.name_of, found))

    def run(self, batches: list[Any], lr: float = 0.05) -> list[float]:
        """Runs training steps and returns the losses before each update."""
        return self.train(self.ahead(batches), lr)

    def train(self, batches: Iterable[Any], lr: float = 0.05) -> list[float]:
        """Does the same for batches prepared by `schedules` or `ahead`."""
        if lr not in self._rates:
            self._rates[lr] = jax.device_put(np.float32(lr))
        losses, rate = [], self._rates[lr]
        for batch in batches:
            self._p, self._embed, loss = self._step(self._p, self._embed, batch, rate)
            losses.append(loss)
        jax.block_until_ready((self._p, self._embed))
        return np.concatenate([np.atleast_1d(x) for x in jax.device_get(losses)]).tolist()

    def step(self, batch: Any, lr: float = 0.05) -> float:
        return self.run(self.load([batch]) if isinstance(batch, list) else [batch], lr)[0]

    def compilations(self) -> int:
        """Returns the number of compiled batch shapes."""
        return self._step._cache_size()


def make_step(loss: Any, parts_of: Any = Packed.unpack, stacked: bool = False) -> Any:
    """Returns one jitted training step: SGD of all parameters, and of the rows of the embedding that the batch reads.

    Args:
        loss: The loss, `loss(params, rows, parts)`.
        parts_of: Splits a batch into parts. The second part is the words, an array or a tree of arrays; `rows` has the
            same structure.
        stacked: Whether a batch is a stack of batches. The step then runs them in order and returns all losses.
    """

    def step(params: Any, embed: Any, batch: Any, lr: Any) -> Any:
        parts = parts_of(batch)
        words = parts[1]
        rows = jax.tree.map(lambda w: embed.at[w].get(mode="clip"), words)
        value, (d_params, d_rows) = jax.value_and_grad(loss, (0, 1))(params, rows, parts)
        params = jax.tree.map(lambda p, d: p - lr * d, params, d_params)
        for w, d in zip(jax.tree.leaves(words), jax.tree.leaves(d_rows), strict=True):
            embed = embed.at[w].add(-lr * d, mode="drop")
        return params, embed, value

    def steps(params: Any, embed: Any, batches: Any, lr: Any) -> Any:
        def one(state: tuple[Any, Any], batch: Any) -> Any:
            params, embed, value = step(*state, batch, lr)
            return (params, embed), value

        state, values = jax.lax.scan(one, (params, embed), batches, unroll=UNROLL)
        return *state, values

    return cavs.concurrent_jit(steps if stacked else step, donate_argnums=(0, 1))


def _parts(sched: cavs.Schedule) -> tuple[Any, ...]:
    """Returns a schedule and its words and labels."""
    return sched, jnp.where(sched.input_id < 0, NO_WORD, sched.input_id), sched.label


def _loss(F: cavs.VertexFunction, everywhere: bool, engine: str | None) -> Any:
    """Returns the mean loss over roots, or over all vertices, as a function for `make_step`."""

    def loss(params: Any, x: Any, parts: tuple[Any, ...]) -> Any:
        sched, _, labels = parts
        h = cavs.run(F, params, sched, x, select=None if everywhere else sched.roots, engine=engine)
        log_p = jax.nn.log_softmax(h @ params["out_w"] + params["out_b"])
        labels = labels if everywhere else labels[sched.roots]
        of_label = jnp.take_along_axis(log_p, labels[:, None], 1, mode="clip")[:, 0]
        if not everywhere:
            return -of_label.mean()
        return -jnp.where(labels >= 0, of_label, 0).sum() / sched.num_vertices

    return loss
