"""Cavs under the contract of the peers (`bench.peers`): a `cavs.data.Loader` and a training step under `cavs.data.step`.

`load` reads the graphs once, as a user reads them from a file, and creates a loader over all batches, which chooses the shapes.
It computes the heights of vertices, outside the clock, and `reading` is its time. Every step inside the clock is planned,
scheduled with words and labels, transferred, and run. JAX dispatches asynchronously. The clock stops when the losses of the
last step have arrived.

On a GPU, a thread schedules, and a dispatch has 16 or 32 training steps. A run is an epoch: while it ends, the thread
prepares the first `AHEAD` dispatches of the next one, as in a training loop.
"""

import concurrent.futures
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs._engines import choose
from cavs._engines.engine import Job
from cavs._run import run as _run
from cavs._run.plans import plan_of
from cavs.kernels import Target
from cavs.vertex_programs import LSTM, BinaryTreeLSTM, ChildSumTreeLSTM, TreeFC

STEPS, FEW = 16, 8  # training steps in one dispatch on a GPU; twice as many for batches of at most FEW graphs
AHEAD = 2  # dispatches that are prepared ahead on a GPU
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
        self._everywhere, self._policy = cell == "lstm", policy
        self._F, self._engine = F, engine
        self._begin(params, {k: jnp.array(v) for k, v in params.items() if k != "embed"}, device)
        self._step = cavs.data.step(tune=0)(make_step(_loss(F, self._everywhere, engine), _parts))

    def _begin(self, params: dict[str, np.ndarray], dense: Any, device: str) -> None:
        self._state: Any = (dense, jnp.array(params["embed"]), jnp.float32(0))
        self._device, self._rate = device, 0.0
        self._asked: list[np.ndarray] | None = None

    def params(self) -> dict[str, np.ndarray]:
        return {k: np.asarray(v) for k, v in (self._state[0] | {"embed": self._state[1]}).items()}

    def load(self, batches: list[list[dict[str, Any]]]) -> list[np.ndarray]:
        """Reads a data set once. Returns the indices of the graphs of each batch."""
        start, sizes = time.perf_counter(), [len(b) for b in batches]
        self._data: Any = graphs_of([g for b in batches for g in b])
        self.reading = (time.perf_counter() - start) / len(batches)
        return self._chosen(sizes)

    def _chosen(self, sizes: list[int]) -> list[np.ndarray]:
        """Chooses the shapes for batches of consecutive graphs. Returns the indices of the graphs of each batch."""
        indices = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        self._all = cavs.data.Loader(self._data, indices, seed=None, policy=self._policy, ahead=0)
        # On a CPU as many training steps in one dispatch as a loader of its users has.
        self.steps = self._all.steps if self._device == "cpu" else STEPS if max(sizes) > FEW else 2 * STEPS
        return indices

    def _loader(self, batches: Iterable[np.ndarray], steps: int, ahead: int) -> cavs.data.Loader:
        options: dict[str, Any] = {"seed": None, "policy": self._policy, "shapes": self._all}
        return cavs.data.Loader(self._data, batches, **options, steps=steps, ahead=ahead)

    def schedules(self, batches: list[np.ndarray]) -> Iterable[Any]:
        """Does all host work of these batches: yields schedules that hold words and labels."""
        return self._loader(iter(batches), 1, 0)

    def ahead(self, batches: list[np.ndarray]) -> Iterable[Any]:
        """Does the same as a training loop on this device does: yields what the step takes, on the device."""
        if self._device == "cpu":
            return self._loader(iter(batches), self.steps, 0)
        known = self._asked
        if known is None or len(known) != len(batches) or any(a is not b for a, b in zip(known, batches, strict=True)):
            self._asked, self._epochs = batches, self._loader(batches, self.steps, AHEAD)
        return self._epochs  # the next epoch of the same batches

    def compile(self, batches: list[np.ndarray]) -> None:
        """Compiles in parallel all that a stream of these batches will run: each shape alone and in stacks."""
        each: dict[Any, Any] = {}
        for some in (*self.ahead(batches), *self.ahead([i for i in batches for _ in range(self.steps)])):
            each.setdefault((jax.tree.structure(some), *(x.shape for x in jax.tree.leaves(some))), some)
        # A later call of the step finds this code.
        lowered = [self._step.lower(self._state, some) for some in each.values()]
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
        for some in batches:
            self._state, values = self._step(self._state, some)
            losses.append(values)
        jax.block_until_ready(self._state)
        return np.concatenate([np.atleast_1d(x) for x in jax.device_get(losses)]).tolist()

    def step(self, batch: Any, lr: float = 0.05) -> float:
        return self.run(self.load([batch]) if isinstance(batch, list) else [batch], lr)[0]

    def compilations(self) -> int:
        """Returns the number of compiled programs: batch shapes, alone and in stacks."""
        return self._step.compilations


def make_step(loss: Any, parts_of: Any) -> Any:
    """Returns the training step of one batch: SGD of all parameters, and of the rows of the embedding that the batch reads.

    Args:
        loss: The loss, `loss(params, rows, parts)`.
        parts_of: Splits a batch into parts. The second part is the words, an array or a tree of arrays; `rows` has the
            same structure.
    """

    def step(state: Any, batch: Any) -> Any:
        params, embed, lr = state
        parts = parts_of(batch)
        words = parts[1]
        rows = jax.tree.map(lambda w: embed.at[w].get(mode="clip"), words)
        value, (d_params, d_rows) = jax.value_and_grad(loss, (0, 1))(params, rows, parts)
        params = jax.tree.map(lambda p, d: p - lr * d, params, d_params)
        for w, d in zip(jax.tree.leaves(words), jax.tree.leaves(d_rows), strict=True):
            embed = embed.at[w].add(-lr * d, mode="drop")
        return (params, embed, lr), value

    return step


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
