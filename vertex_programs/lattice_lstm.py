"""The Lattice LSTM of Zhang and Yang."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cavs
from cavs.vertex_programs._initialisers import glorot


def lattices(lengths: Sequence[int], words: Sequence[Any], *, input_id: Any = None) -> cavs.Graphs:
    """Lattices over the characters of sentences, and the words of a lexicon that are found in them.

    **Arguments:** `lengths` (G,), the characters; `words[g]` (W, 2), the first and the last character of each word of
    lattice g, first < last. `input_id` (V,): what the vertices read.

    **Returns:** graphs whose vertices are the characters, then the words, of the kinds "character" and "word". Child 0 of
    a character is the one before it; then come the words that end with it. The child of a word is its first character.

    **Raises:** `ValueError` that names the lattice for words that are no such pairs.
    """
    if len(words) != len(lengths):
        raise ValueError(f"lattices: words has {len(words)} entries, wanted {len(lengths)}: one per lattice.")
    sizes: list[int] = []
    counts, children, kind = ([np.zeros(0, np.int64)] for _ in range(3))
    for g, (n, pairs) in enumerate(zip(lengths, words, strict=True)):
        spans = np.asarray(pairs, np.int64).reshape(-1, 2)
        first, last = spans.T
        if ((first < 0) | (first >= last) | (last >= n)).any():
            raise ValueError(f"lattices: words[{g}] is {spans.tolist()}, wanted pairs 0 <= first < last < {n}.")
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
    """Lattice LSTM: Zhang and Yang, 2018 (arXiv 1805.02023), section 3.2, equations 11-15, over `LatticeLSTM.graphs(...)`.

    Characters are a chain; a word of a lexicon that spans characters b .. e is a vertex above b and below e. So a
    character has any number of children (the character before, the words that end with it), and any number of parents.

        word:      i, f, g = sigmoid, sigmoid, tanh (x W_word + h_b U_word + b_word)
                   c = f c_b + i g
        character: i, f, o, g = sigmoid, sigmoid, sigmoid, tanh (x W + h' U + b)
                   l_k = sigmoid(x W_link + c_k U_link + b_link), for each word k that ends here
                   c = (e^i g + sum_k e^l_k c_k) / (e^i + sum_k e^l_k); without words f c' + i g
                   h = o tanh(c)

    **Fields:** `hidden`, H; `inputs`, E, of characters and words; `dtype` of the initial parameters.
    **Parameters:** `w` (E, 4H), `u` (H, 4H), `b` (4H,), columns i, f, o, g; `w_word` (E, 3H), `u_word` (H, 3H), `b_word`
    (3H,), columns i, f, g; `w_link` (E, H), `u_link` (H, H), `b_link` (H,). Biases of the gates f start at 1.
    **Pushes** h of characters; zeros of words.
    """

    hidden: int
    inputs: int
    dtype: Any = jnp.float32

    graphs = staticmethod(lattices)

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Initial parameters."""
        params, h = {}, self.hidden
        for name, k, gates in zip(("", "_word", "_link"), jax.random.split(key, 3), (4, 3, 1), strict=True):
            keys = jax.random.split(k)
            params["w" + name] = glorot(keys[0], self.inputs, h, self.dtype, gates)
            params["u" + name] = glorot(keys[1], h, h, self.dtype, gates)
            params["b" + name] = jnp.zeros(gates * h, self.dtype).at[h : (2 if gates > 1 else 1) * h].set(1)
        return params

    def word(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """The vertex function of words."""
        first = v.gather(0)
        z = first["h"] @ params["u_word"] + (v.pull() @ params["w_word"] + params["b_word"])
        i, f, g = jnp.split(z, 3)
        c = jax.nn.sigmoid(f) * first["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
        v.scatter({"c": c, "h": jnp.zeros_like(c), "word": jnp.bool_(True)})
        v.push(jnp.zeros_like(c))

    def character(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """The vertex function of characters."""
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

    @functools.cache  # noqa: B019  (equal programs share F for good)
    def vertex_function(self) -> cavs.VertexFunction:
        """F by kinds; the same object for equal programs, so that they share compiled code."""
        state = {"c": (self.hidden,), "h": (self.hidden,), "word": jax.ShapeDtypeStruct((), bool)}
        return cavs.VertexFunction({"character": self.character, "word": self.word}, state=state, arity=1)
