"""Entities in tag sequences, counted as the CoNLL shared tasks' `conlleval` does, for all sentences of a batch at once."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Pairs of neighbouring tags of the same type between which a chunk begins or ends (conlleval, 2004).
_STARTS = {"BB", "IB", "OB", "OI", "EE", "EI", "OE"}
_ENDS = {"BB", "BO", "IB", "IO", "EE", "EI", "EO"}


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Tables of where chunks begin and end, for C labels. Row and column C stand for a sentence boundary and for `O`.

    Attributes:
        starts: (C + 1, C + 1) bool: whether a chunk starts between a tag (row) and the next tag (column).
        ends: (C + 1, C + 1) bool: whether a chunk ends there.
        types: (C + 1,) int32, the type of each tag, an index of `names`.
        names: the names of the types, "" for that of `O`.
    """

    starts: np.ndarray
    ends: np.ndarray
    types: np.ndarray
    names: tuple[str, ...]

    @staticmethod
    def of(labels: tuple[str, ...]) -> "Chunks | None":
        """The tables for tags such as `O`, `B-PER`, `I-PER` (IOB1, IOB2, IOE, IOBES); `None` for labels of another form."""
        pairs = [tuple(label.split("-", 1)) if label[1:2] == "-" else (label, "") for label in (*labels, "O")]
        if any((tag != "O") != bool(kind) or tag not in "BIESO" for tag, kind in pairs) or all(tag == "O" for tag, _ in pairs):
            return None
        size = len(pairs)
        starts, ends = np.zeros((size, size), bool), np.zeros((size, size), bool)
        for a, (tag, kind) in enumerate(pairs):
            for b, (next_tag, next_kind) in enumerate(pairs):
                starts[a, b] = tag + next_tag in _STARTS or next_tag != "O" and kind != next_kind
                ends[a, b] = tag + next_tag in _ENDS or tag != "O" and kind != next_kind
        names = {kind: i for i, kind in enumerate(dict.fromkeys(kind for _, kind in pairs))}
        return Chunks(starts, ends, np.array([names[kind] for _, kind in pairs], np.int32), tuple(names))

    def count(self, right: jax.Array, guessed: jax.Array, graph: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Counts the true entities, the predicted entities, and those predicted with both ends and the type correct.

        Args:
            right: (V,) true labels, in sentence order. -1 means no label and counts as `O` on both sides.
            guessed: (V,) predicted labels.
            graph: (V,) index of each vertex's sentence.
        """
        outside = len(self.types) - 1
        first = jnp.append(True, graph[1:] != graph[:-1])

        def spans(label: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            label = jnp.where(right < 0, outside, label)
            before = jnp.where(first, outside, jnp.roll(label, 1))
            after = jnp.where(jnp.roll(first, -1), outside, jnp.roll(label, -1))
            rows = jnp.arange(len(label))
            ends = jnp.where(jnp.asarray(self.ends)[label, after], rows, len(label))
            return jnp.asarray(self.starts)[before, label], lax.cummin(ends, reverse=True), jnp.asarray(self.types)[label]

        (start, end, kind), (start_, end_, kind_) = spans(right), spans(guessed)
        both = start & start_ & (end == end_) & (kind == kind_)
        return start.sum(), start_.sum(), both.sum()

    def scores(self, true: np.ndarray, predicted: np.ndarray, graph: np.ndarray) -> "dict[str, Found]":
        """The entities "all" and of each type. The arguments are (V,) arrays, as those of `count`."""
        found, outside = {}, len(self.types) - 1
        for kind, name in [(None, "all"), *((i, name) for i, name in enumerate(self.names) if name)]:
            # Entities of other types become `O`, which neither begins nor ends another entity.
            sides = [x if kind is None else np.where((x >= 0) & (self.types[x] != kind), outside, x) for x in (true, predicted)]
            found[name] = Found(*map(int, self.count(*map(jnp.asarray, (*sides, graph)))))
        return found


class Found(NamedTuple):
    """Numbers of entities: the true ones, the predicted ones, and those predicted with both ends and the type correct."""

    true: int
    predicted: int
    both: int

    @property
    def f1(self) -> float:
        """Their F1."""
        return f1(*self)


def f1(right: float, guessed: float, both: float) -> float:
    """2 precision recall / (precision + recall), in [0, 1]; 0 if there is nothing to count."""
    return 2 * both / (right + guessed) if right + guessed else 0.0
