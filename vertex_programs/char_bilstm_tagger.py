"""The BiLSTM tagger that spells rare words: word chains whose inputs are pushes of character chains."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs.bilstm import BiLSTM
from cavs.vertex_programs.bilstm_tagger import BiLSTMTagger


@dataclasses.dataclass(frozen=True)
class CharBiLSTMTagger:
    """BiLSTM tagger with a character BiLSTM for rare words: Ling et al., 2015 (arXiv 1508.02096), section 3; VPPS's
    application BiLSTMwChar (Khorasani et al., 2018, section IV): words seen fewer than 5 times are spelled.

    A net of nets. The spellings of a batch's rare words are one batch of chains of their own, as long as the words; what
    both directions know at their ends is the word's vector, wherever it occurs.

    **Fields:** `labels`, `hidden`, `inputs`, `mlp`, `layers`, `dropout`, `dtype` as those of `BiLSTMTagger`, `inputs`
    even: each direction over characters has half of it; `characters`, how many there are; `char_inputs`, size of a
    character's vector.
    **Parameters:** `tagger`, those of `BiLSTMTagger`; `spell`, of the character BiLSTM; `characters` (characters,
    char_inputs).
    """

    labels: int
    hidden: int
    inputs: int
    characters: int
    char_inputs: int = 20
    mlp: int = 32
    layers: int = 1
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @property
    def tagger(self) -> BiLSTMTagger:
        """The tagger over words."""
        return BiLSTMTagger(self.labels, self.hidden, self.inputs, self.mlp, self.layers, self.dropout, self.dtype)

    @property
    def spell(self) -> BiLSTM:
        """The BiLSTM over characters."""
        return BiLSTM(self.inputs // 2, self.char_inputs, 1, self.dtype)

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Initial parameters; vectors of characters are normal with deviation 0.1."""
        keys = jax.random.split(key, 3)
        characters = 0.1 * jax.random.normal(keys[2], (self.characters, self.char_inputs), self.dtype)
        return {"tagger": self.tagger.init(keys[0]), "spell": self.spell.init(keys[1]), "characters": characters}

    def vectors(self, params: Any, spelling: cavs.Schedule, spelling_back: cavs.Schedule, characters: Any) -> jax.Array:
        """The vectors (S, E) of S spelled words, whose chains have the `characters` (C,), numbers of rows of the table."""
        x = params["characters"][characters]
        return self.spell.run(params["spell"], spelling, spelling_back, x, ends=True)

    def run(
        self, params: Any, sched: cavs.Schedule, back: cavs.Schedule, inputs: Any, vectors: Any, spelled: Any, key: Any = None
    ) -> jax.Array:
        """Logits of every word, as `BiLSTMTagger.run`.

        **Arguments:** `inputs` (V, E), read at frequent words; `vectors` (S, E) of spelled ones; `spelled` (V,) the row of
        `vectors` of each word, -1 at frequent ones.
        """
        x = jnp.where((spelled >= 0)[:, None], vectors[spelled], inputs)
        return self.tagger.run(params["tagger"], sched, back, x, key=key)
