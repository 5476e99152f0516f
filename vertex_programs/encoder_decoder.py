"""An encoder-decoder LSTM with attention: a chain over the source, and a graph in which each target word reads all of it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs.vertex_programs._initialisers import glorot
from cavs.vertex_programs.lstm import LSTM, lstm_state


def sentence_pairs(source: Any, target: Any) -> tuple[cavs.Graphs, cavs.Graphs]:
    """The graphs of an encoder and of its decoder: chains over the sources, and, for attention, targets over sources.

    **Arguments:** `source`, `target` (G,): the lengths of the sentences of each pair, at least 1.

    **Returns:** `cavs.from_lengths(source)`, and graphs whose vertices are the source's words (leaves), then the target's.
    Child 0 of a target word is the word before it, of the first one the last source word; the other children are all
    (other) source words. No row is padded to the longest sentence.

    **Raises:** `ValueError` for lengths below 1, or of unlike number.
    """
    s, t = np.asarray(source), np.asarray(target)
    if s.shape != t.shape or s.ndim != 1 or (s < 1).any() or (t < 1).any():
        raise ValueError(f"sentence_pairs: got lengths {s.tolist()} and {t.tolist()}, wanted as many of each, all >= 1.")
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
    """LSTM encoder-decoder with attention: the translation model of Echo (Zheng et al., 2020), section 2.2, after Bahdanau,
    Cho and Bengio, 2015 (the score) and Luong, Pham and Manning, 2015, section 3.3 (input feeding).

        source s: k_s = h_s W_key, with h_s, c_s of an LSTM encoder
        target t: c, h = LSTM([x, a'], c', h'), which start with those of the last source word, a' with zeros
                  p = softmax over sources s of tanh(h W_query + k_s) score
                  a = tanh([h, sum_s p_s h_s] W_out)

    The decoder's leaves are the encoder's pushes and attention is `gather_all` over them: a target word reads the source
    rows where they are. Scores alone are kept per (target, source) pair; the backward runs the tanh again, as Echo does.

    **Fields:** `hidden`, H; `inputs`, E, of source and target words; `dtype` of the initial parameters.
    **Parameters:** `encoder`, those of `LSTM`; `w` (E, 4H), `u` (2H, 4H) for [h', a'], `b` (4H,), as of `LSTM`; `key`
    (H, H), `query` (H, H), `score` (H,), `out` (2H, H).
    **Pushes** a at targets, to predict the next word from; zeros at sources.
    """

    hidden: int
    inputs: int
    dtype: Any = jnp.float32

    graphs = staticmethod(sentence_pairs)

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Initial parameters."""
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
        """The vertex function of the encoder: an LSTM that pushes c too."""
        before = v.gather(0)
        state = lstm_state(before["h"] @ params["u"] + (v.pull() @ params["w"] + params["b"]), before["c"])
        v.scatter(state)
        v.push(state)

    def __call__(self, params: dict[str, Any], v: cavs.Vertex) -> None:
        """The vertex function of the decoder."""
        if v.is_leaf():
            h, a = v.pull("h"), jnp.zeros_like(v.pull("h"))
            v.scatter({"c": v.pull("c"), "h": h, "a": a, "key": h @ params["key"], "source": jnp.bool_(True)})
            v.push(a)
            return
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
        self, params: dict[str, Any], source: cavs.Schedule, pairs: cavs.Schedule, x: Any, y: Any, *, select: Any = None
    ) -> jax.Array:
        """a of all vertices of the pairs, or `select` some: (V, H).

        `x` (V of the sources, E) and `y` (V of the pairs, E), read at targets, as `inputs` of `cavs.run`.
        """
        states = cavs.run(self.encoder_function(), params["encoder"], source, x)
        place = _place(source, pairs, len(y))
        rows = {name: s.at[place].get(mode="fill", fill_value=0) for name, s in states.items()}
        decoder = {name: p for name, p in params.items() if name != "encoder"}
        return cavs.run(self.vertex_function(), decoder, pairs, {"x": y, **rows}, select=select)

    @functools.cache  # noqa: B019  (equal programs share F for good)
    def encoder_function(self) -> cavs.VertexFunction:
        """F of the encoder; the same object for equal programs, so that they share compiled code."""
        return cavs.VertexFunction(self.encoder, state={"c": (self.hidden,), "h": (self.hidden,)}, arity=1)

    @functools.cache  # noqa: B019  (equal programs share F for good)
    def vertex_function(self) -> cavs.VertexFunction:
        """F of the decoder; the same object for equal programs, so that they share compiled code."""
        state: dict[str, Any] = dict.fromkeys(("a", "c", "h", "key"), (self.hidden,))
        return cavs.VertexFunction(self, state=state | {"source": jax.ShapeDtypeStruct((), bool)}, arity=1)


def _place(source: cavs.Schedule, pairs: cavs.Schedule, rows: int) -> jax.Array:
    """For each vertex of the pairs its row among the sources; out of range at targets and in padding."""
    graphs, graph = pairs.shape.graphs, pairs.graph[:rows]
    ends, source_ends = jnp.asarray(pairs.graph_end), jnp.asarray(source.graph_end)
    sizes, lengths = jnp.diff(ends, prepend=0), jnp.diff(source_ends, prepend=0)
    number = jnp.arange(rows) - (ends - sizes).at[graph].get(mode="clip")
    row = (source_ends - lengths).at[graph].get(mode="clip") + number
    is_source = (graph < graphs) & (number < lengths.at[graph].get(mode="clip"))
    return jnp.where(is_source, row, source.shape.vertices)
