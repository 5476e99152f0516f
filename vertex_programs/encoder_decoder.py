"""The LSTM encoder-decoder with attention over the source words."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._initialisers import glorot, one_program
from cavs.vertex_programs._types import Array, Integers
from cavs.vertex_programs.lstm import LSTM, lstm_state


def sentence_pairs(source: Integers, target: Integers) -> tuple[cavs.Graphs, cavs.Graphs]:
    """Builds the graphs of an encoder and of its decoder.

    Neither is padded to the longest sentence.

    Args:
        source: The length of each source sentence, int[G], at least 1.
        target: The length of each target sentence, int[G], at least 1.

    Returns:
        A pair of graphs. The first is `cavs.from_lengths(source)`. The vertices of the second are the source words (leaves)
        followed by the target words. Child 0 of a target word is the previous target word (the last source word for the
        first target word). Its other children are all (other) source words.

    Raises:
        ValueError: If a length is no integer, or below 1, or `source` and `target` differ in size.
    """
    s, t = (x if x.size else x.astype(int) for x in map(np.asarray, (source, target)))
    if s.shape != t.shape or s.ndim != 1 or {s.dtype.kind, t.dtype.kind} - {*"iu"} or (s < 1).any() or (t < 1).any():
        got = f"source, target: got {s.tolist()} and {t.tolist()}"
        raise ValueError(f"{got}; expected two 1-d arrays of integers, of equal size, all >= 1. Write np.diff(offsets).")
    sizes, pair = s + t, np.repeat(np.arange(len(s)), s + t)
    number = np.arange(sizes.sum()) - (np.cumsum(sizes) - sizes)[pair]
    step = number - s[pair]  # of the target; negative at sources
    counts = np.where(step < 0, 0, s[pair] + (step > 0))
    edge = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    owner = np.repeat(np.arange(len(number)), counts)
    children = np.where(edge == 0, number[owner] - 1, edge - 1)
    return cavs.from_lengths(s), cavs.Graphs.build(sizes, counts, children)


@dataclasses.dataclass(frozen=True)
class EncoderDecoder:
    """LSTM encoder-decoder with attention: the translation model of Echo (Zheng et al., 2020), section 2.2.

    The score is that of Bahdanau, Cho and Bengio, 2015; input feeding follows Luong, Pham and Manning, 2015, section 3.3.

        source s: k_s = h_s W_key, with h_s and c_s of an LSTM encoder
        target t: c, h = LSTM([x, a'], c', h')
                  p    = softmax over sources s of tanh(h W_query + k_s) score
                  a    = tanh([h, sum_s p_s h_s] W_out)

    c', h' and a' belong to the previous target word. The first target word reads c' and h' of the last source word, and
    zeros for a'. Target words push a, from which the next word is predicted. Source words push zeros.

    The leaves of the decoder pull the pushes of the encoder, and attention is a `gather_all` over them: a target word
    reads the source rows in place. Only the scores are stored per pair of target and source word. The backward pass
    computes the tanh again, as Echo does.

    `init` returns a dict of parameters:

    - `encoder`: the parameters of `LSTM`
    - `w` (E, 4H), `u` (2H, 4H) for [h', a'], `b` (4H,), as in `LSTM`
    - `key` (H, H), `query` (H, H), `score` (H,), `out` (2H, H)

    Attributes:
        hidden: H, the size of the state.
        inputs: E, the size of the vectors of source and target words.
        dtype: The dtype of the initial parameters.
    """

    hidden: int
    inputs: int
    dtype: DTypeLike = jnp.float32

    graphs = staticmethod(sentence_pairs)

    @one_program
    def init(self, key: jax.Array) -> dict[str, Any]:
        """Returns the initial parameters; the weights are drawn from `key`."""
        h, keys = self.hidden, jax.random.split(key, 7)
        decoder = LSTM(h, self.inputs, self.dtype)
        return {
            "encoder": decoder.init(keys[0]),
            **decoder.init(keys[1]),
            "u": glorot(keys[2], 2 * h, h, self.dtype, gates=4),
            "key": glorot(keys[3], h, h, self.dtype),
            "query": glorot(keys[4], h, h, self.dtype),
            "score": glorot(keys[5], h, 1, self.dtype)[:, 0],
            "out": glorot(keys[6], 2 * h, h, self.dtype),
        }

    def encoder(self, params: dict[str, Any], v: cavs.Vertex) -> None:
        """Computes one vertex of the encoder, an LSTM that pushes both c and h."""
        before = v.gather(0)
        state = lstm_state(before["h"] @ params["u"] + (v.pull() @ params["w"] + params["b"]), before["c"])
        v.scatter(state)
        v.push(state)

    def __call__(self, params: dict[str, Any], v: cavs.Vertex) -> None:
        """Computes one vertex of the decoder."""
        if v.is_leaf():
            h, a = v.pull("h"), jnp.zeros_like(v.pull("h"))
            v.scatter({"c": v.pull("c"), "h": h, "a": a, "key": h @ params["key"], "source": jnp.bool_(True)})
            return v.push(a)
        before = v.gather(0)
        z = jnp.concatenate([before["h"], before["a"]]) @ params["u"] + (v.pull("x") @ params["w"] + params["b"])
        state = lstm_state(z, before["c"])
        query = state["h"] @ params["query"]

        def score(source: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return jnp.where(source["source"], jnp.tanh(query + source["key"]) @ params["score"], -1e9), source["h"]

        context = v.gather_all(score, reduce="softmax")
        a = jnp.tanh(jnp.concatenate([state["h"], context]) @ params["out"])
        v.scatter({**state, "a": a, "key": jnp.zeros_like(a), "source": jnp.bool_(False)})
        v.push(a)

    def run(
        self,
        params: dict[str, Any],
        source: cavs.Schedule,
        pairs: cavs.Schedule,
        x: Array,
        y: Array,
        *,
        select: Integers | None = None,
    ) -> jax.Array:
        """Runs the encoder and the decoder.

        Args:
            params: The parameters, as returned by `init`.
            source: A schedule of the first graphs of `EncoderDecoder.graphs`.
            pairs: A schedule of the second graphs.
            x: Vectors of the source words, (number of source words, E), as `inputs` of `cavs.run`.
            y: Rows for all vertices of the pairs, float[V, E], read at target words.
            select: The vertices to return, or None for all.

        Returns:
            a of each vertex of the pairs, (V, H).
        """
        states = cavs.run(self.encoder_function(), params["encoder"], source, x)
        place = _place(source, pairs, len(y))
        rows = {name: s.at[place].get(mode="fill", fill_value=0) for name, s in states.items()}
        decoder = {name: p for name, p in params.items() if name != "encoder"}
        return cavs.run(self.vertex_function(), decoder, pairs, {"x": y, **rows}, select=select)

    @functools.cache  # noqa: B019  (equal programs share F for the life of the process)
    def encoder_function(self) -> cavs.VertexFunction[dict[str, jax.Array]]:
        """Returns `F` of the encoder. Equal programs return the same object, so that they share compiled code."""
        return cavs.VertexFunction[dict[str, jax.Array]](self.encoder, state=dict.fromkeys("ch", (self.hidden,)), arity=1)

    @functools.cache  # noqa: B019  (equal programs share F for the life of the process)
    def vertex_function(self) -> cavs.VertexFunction[jax.Array]:
        """Returns `F` of the decoder. Equal programs return the same object, so that they share compiled code."""
        state: dict[str, Any] = dict.fromkeys(("a", "c", "h", "key"), (self.hidden,))
        return cavs.VertexFunction(self, state=state | {"source": jax.ShapeDtypeStruct((), bool)}, arity=1)


def _place(source: cavs.Schedule, pairs: cavs.Schedule, rows: int) -> jax.Array:
    """Returns the row of each vertex of the pairs among the sources; out of range for target words and padding."""
    graphs, graph = pairs.shape.graphs, pairs.graph[:rows]
    ends, source_ends = jnp.asarray(pairs.graph_end), jnp.asarray(source.graph_end)
    sizes, lengths = jnp.diff(ends, prepend=0), jnp.diff(source_ends, prepend=0)
    number = jnp.arange(rows, dtype=ends.dtype) - (ends - sizes).at[graph].get(mode="clip")
    row = (source_ends - lengths).at[graph].get(mode="clip") + number
    is_source = (graph < graphs) & (number < lengths.at[graph].get(mode="clip"))
    return jnp.where(is_source, row, source.shape.vertices)


def greedy(best: Callable[..., Array], source: cavs.Graphs, rows: Array, end: int) -> list[list[int]]:
    """Decodes greedily: chooses the most likely next word, given the words before it, until the word `end`.

    One schedule serves all steps, because later words do not change earlier ones. A target has at most 2 n + 10 words for n
    source words.

    Args:
        best: `best(source, pairs, y, at)` returns the next word, int[G] below C, after each of the rows `at`, int[G],
            for two schedules that include `input_id`, and the words y, (V,), of the targets so far.
        source: Chains whose `input_id` are the words of the sources.
        rows: The input that stands for each of the C words, (C,), as a target word of `y`.
        end: The word that ends a target. Its input begins each of them.

    Returns:
        The words of each target, without `end`.
    """
    if not len(source):
        return []
    rows, lengths = np.asarray(rows), 2 * np.diff(source.vertex_offsets) + 10
    chains, pairs = sentence_pairs(np.diff(source.vertex_offsets), lengths)
    inputs = np.full(pairs.num_vertices, -1, np.int32)
    inputs[pairs.height > 0] = rows[end]
    chains = dataclasses.replace(chains, input_id=source.input_id)
    scheds = [cavs.schedule(g, fields=("input_id",)) for g in (chains, dataclasses.replace(pairs, input_id=inputs))]
    first = np.flatnonzero(pairs.height > 0)[np.cumsum(lengths) - lengths]
    y = np.array(scheds[1].input_id)
    running, words = np.ones(len(source), bool), []
    for t in range(int(lengths.max())):
        at = np.minimum(first + t, first + lengths - 1)
        next_words = np.asarray(best(*scheds, y, at.astype(np.int32)))
        words.append(np.where(running, next_words, end))
        running &= (next_words != end) & (t + 1 < lengths)
        if not running.any():
            break
        y[(at + 1)[running]] = rows[next_words[running]]
    return [sentence[: (*sentence, end).index(end)] for sentence in np.stack(words, 1).tolist()]
