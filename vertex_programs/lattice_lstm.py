"""The Lattice LSTM of Zhang and Yang."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._initialisers import glorot, one_program
from cavs.vertex_programs._types import Array, Integers


def lattices(lengths: Sequence[int], words: Sequence[Array], *, input_id: Integers | None = None) -> cavs.Graphs:
    """Builds lattices from the characters of sentences and the lexicon's words found in them.

    Args:
        lengths: The number of characters of each sentence, int[G].
        words: For each sentence the first and last character of each word, (W, 2), with first < last.
        input_id: What each vertex reads, int[V].

    Returns:
        Graphs whose vertices are the characters, followed by the words, with the kinds "character" and "word". Child 0 of a
        character is the previous character; its other children are the words that end with it. The child of a word is
        its first character.

    Raises:
        ValueError: If `words` holds an invalid pair; the message names the lattice.
    """
    if len(words) != len(lengths):
        raise ValueError(f"words: got {len(words)} entries; expected {len(lengths)}, one per lattice.")
    sizes: list[int] = []
    counts, children, kind = ([np.zeros(0, np.int64)] for _ in range(3))
    for g, (n, pairs) in enumerate(zip(lengths, words, strict=True)):
        spans = np.asarray(pairs, np.int64).reshape(-1, 2)
        first, last = spans.T
        if ((first < 0) | (first >= last) | (last >= n)).any():
            raise ValueError(f"words[{g}]: got {spans.tolist()}; expected pairs 0 <= first < last < {n}.")
        number = np.arange(n, n + len(spans))
        owner = np.concatenate([np.arange(1, n), last, number])
        child = np.concatenate([np.arange(n - 1), number, first])
        counts.append(np.bincount(owner, minlength=n + len(spans)))
        children.append(child[np.argsort(owner, kind="stable")])
        kind.append((np.arange(n + len(spans)) >= n).astype(np.int64))
        sizes.append(n + len(spans))
    flat = [np.concatenate(x) for x in (counts, children, kind)]
    return cavs.Graphs.build(sizes, *flat[:2], kind=flat[2], kind_names=("character", "word"), input_id=input_id)


@dataclasses.dataclass(frozen=True)
class LatticeLSTM:
    """Lattice LSTM: Zhang and Yang, 2018 (arXiv 1805.02023), section 3.2, equations 11-15.

    It runs over `LatticeLSTM.graphs(...)`. Characters form a chain. A lexicon's word that spans the characters b .. e is a
    parent of b and a child of e. A character therefore has any number of children (the previous character and the words that
    end with it) and any number of parents.

        word:      i, f, g = sigmoid, sigmoid, tanh (x W_word + h_b U_word + b_word)
                   c = f c_b + i g
        character: i, f, o, g = sigmoid, sigmoid, sigmoid, tanh (x W + h' U + b)
                   l_k = sigmoid(x W_link + c_k U_link + b_link), for each word k that ends here
                   c = (e^i g + sum_k e^l_k c_k) / (e^i + sum_k e^l_k), or f c' + i g if no word ends here
                   h = o tanh(c)

    Characters push h; words push zeros. `init` returns a dict of parameters, in which the biases of the gates f and of l are
    initialised to 1:

    - `w` (E, 4H), `u` (H, 4H), `b` (4H,), with columns i, f, o, g
    - `w_word` (E, 3H), `u_word` (H, 3H), `b_word` (3H,), with columns i, f, g
    - `w_link` (E, H), `u_link` (H, H), `b_link` (H,)

    Attributes:
        hidden: H, the size of the state.
        inputs: E, the size of the vectors of characters and words.
        dtype: The dtype of the initial parameters.
    """

    hidden: int
    inputs: int
    dtype: DTypeLike = jnp.float32

    graphs = staticmethod(lattices)

    @one_program
    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Returns the initial parameters; the weights are drawn from `key`."""
        params, h = {}, self.hidden
        for name, k, gates in zip(("", "_word", "_link"), jax.random.split(key, 3), (4, 3, 1), strict=True):
            keys = jax.random.split(k)
            params["w" + name] = glorot(keys[0], self.inputs, h, self.dtype, gates)
            params["u" + name] = glorot(keys[1], h, h, self.dtype, gates)
            params["b" + name] = jnp.zeros(gates * h, self.dtype).at[h : (2 if gates > 1 else 1) * h].set(1)
        return params

    def word(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """Computes one word."""
        first = v.gather(0)
        z = first["h"] @ params["u_word"] + (v.pull() @ params["w_word"] + params["b_word"])
        i, f, g = jnp.split(z, 3)
        c = jax.nn.sigmoid(f) * first["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
        v.scatter({"c": c, "h": jnp.zeros_like(c), "word": jnp.bool_(True)})
        v.push(jnp.zeros_like(c))

    def character(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """Computes one character."""
        before, x = v.gather(0), v.pull()
        i, f, o, g = jnp.split(before["h"] @ params["u"] + (x @ params["w"] + params["b"]), 4)
        i, g, link = jax.nn.sigmoid(i), jnp.tanh(g), x @ params["w_link"] + params["b_link"]

        def weighted(word: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
            weight = jnp.where(word["word"], jnp.exp(jax.nn.sigmoid(word["c"] @ params["u_link"] + link)), 0)
            return weight, weight * word["c"]

        weight, c_words = v.gather_all(weighted)
        mixed = (jnp.exp(i) * g + c_words) / (jnp.exp(i) + weight)
        c = jnp.where(v.num_children() > 1, mixed, jax.nn.sigmoid(f) * before["c"] + i * g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        v.scatter({"c": c, "h": h, "word": jnp.bool_(False)})
        v.push(h)

    @functools.cache  # noqa: B019  (equal programs share F for the life of the process)
    def vertex_function(self) -> cavs.VertexFunction[jax.Array]:
        """Returns `F`, with one function per kind. Equal programs return the same object and share compiled code."""
        state = {"c": (self.hidden,), "h": (self.hidden,), "word": jax.ShapeDtypeStruct((), bool)}
        return cavs.VertexFunction({"character": self.character, "word": self.word}, state=state, arity=1)
