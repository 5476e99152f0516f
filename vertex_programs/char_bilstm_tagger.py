"""The BiLSTM tagger with a character BiLSTM for rare words."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import cavs
from cavs.vertex_programs._dropout import Key
from cavs.vertex_programs._initialisers import one_program
from cavs.vertex_programs._types import Array, Integers
from cavs.vertex_programs.bilstm import BiLSTM
from cavs.vertex_programs.bilstm_tagger import BiLSTMTagger


@dataclasses.dataclass(frozen=True)
class CharBiLSTMTagger:
    """BiLSTM tagger with a character BiLSTM for rare words: Ling et al., 2015 (arXiv 1508.02096), section 3.

    It is the application BiLSTMwChar of VPPS (Khorasani et al., 2018, section IV), in which words seen fewer than 5 times
    are spelled. The spellings of a batch's rare words form one batch of chains of their own. The final states of both
    directions over a spelling are the vector of the word, at each of its occurrences.

    `init` returns a dict of parameters:

    - `tagger`: the parameters of `BiLSTMTagger`
    - `spell`: the parameters of the character BiLSTM
    - `characters` (characters, char_inputs), normal with standard deviation 0.1

    Attributes:
        labels: C, the number of labels.
        hidden: H, the size of the state of each direction.
        inputs: E, the size of x. Must be even: each direction over characters has E / 2 units.
        characters: The number of characters.
        char_inputs: The size of a character's vector.
        mlp: M, the size of the tagger's hidden layer.
        layers: The number of layers of the tagger's BiLSTM.
        dropout: The dropout rate of the tagger.
        dtype: The dtype of the initial parameters.
    """

    labels: int
    hidden: int
    inputs: int
    characters: int
    char_inputs: int = 20
    mlp: int = 32
    layers: int = 1
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32

    @property
    def tagger(self) -> BiLSTMTagger:
        """The tagger over words."""
        return BiLSTMTagger(self.labels, self.hidden, self.inputs, self.mlp, self.layers, self.dropout, self.dtype)

    @property
    def spell(self) -> BiLSTM:
        """The BiLSTM over characters."""
        return BiLSTM(self.inputs // 2, self.char_inputs, 1, self.dtype)

    @one_program
    def init(self, key: jax.Array) -> dict[str, Any]:
        """Returns the initial parameters; the weights are drawn from `key`."""
        keys = jax.random.split(key, 3)
        characters = 0.1 * jax.random.normal(keys[2], (self.characters, self.char_inputs), self.dtype)
        return {"tagger": self.tagger.init(keys[0]), "spell": self.spell.init(keys[1]), "characters": characters}

    def vectors(
        self, params: dict[str, Any], spelling: cavs.Schedule, spelling_back: cavs.Schedule, characters: Integers
    ) -> Array:
        """Computes the vectors of the spelled words.

        Args:
            params: The parameters, as returned by `init`.
            spelling: A schedule of the chains of characters, one chain per spelled word.
            spelling_back: A schedule of the reversed chains.
            characters: The index of each vertex's character, (number of vertices,).

        Returns:
            One vector per spelled word, (S, E).
        """
        x = cavs.data.rows(params["characters"], jnp.asarray(characters))
        return self.spell.run(params["spell"], spelling, spelling_back, x, ends=True)

    def run(
        self,
        params: dict[str, Any],
        sched: cavs.Schedule,
        back: cavs.Schedule,
        inputs: Array,
        vectors: Array,
        spelled: Array,
        key: Key | None = None,
    ) -> jax.Array:
        """Computes the logits of every word.

        Args:
            params: The parameters, as returned by `init`.
            sched: A schedule of the chains of words.
            back: A schedule of the reversed chains.
            inputs: Word vectors, float[V, E], read at frequent words.
            vectors: The vectors of the spelled words, (S, E), as returned by `vectors`.
            spelled: For each word its row of `vectors`, or -1 for a frequent word, int[V].
            key: A key of `jax.random` for dropout, or None for no dropout.

        Returns:
            The logits, (V, C), as from `BiLSTMTagger.run`.
        """
        x = jnp.where((spelled >= 0)[:, None], vectors[spelled], inputs)
        return self.tagger.run(params["tagger"], sched, back, x, key=key)
