"""Predicts how often each gate of a netlist is 1 under random inputs. Simulation gives the targets, so any netlist will do.

    python netlists.py --data a.bench b.bench --dev c.bench --out run
    python netlists.py predict run d.bench --vertices

This probability depends on the whole cone of a gate. Few circuits exist, and some kinds of gates occur in one or two of them,
so eight variants of each training circuit, with half of the gates of other kinds, are trained on as well if there is a `--dev`.
To change the model, change `init` and `hidden`, as in `regression.py`, from which they come.
"""

import dataclasses

import numpy as np

import cavs
from cavs import recipes
from cavs.recipes import Mistake, option
from cavs.recipes.regression import Regression, RegressionOptions

SHARE = 0.5  # of the gates of a variant are drawn anew
_SINGLE, _SEVERAL = ("NOT", "BUF"), ("AND", "NAND", "OR", "NOR", "XOR", "XNOR")


@dataclasses.dataclass(frozen=True)
class NetlistOptions(RegressionOptions):
    """Options of the recipe."""

    program: str | None = "dagnn"
    variants: int = option(8, "variants of each training circuit, if there is a --dev", least=0)
    optimizer: str = "adam"
    lr: float = 0.003
    batch: int = 8
    dropout: float = 0.0


class Netlists(Regression):
    """A regression whose targets are simulated. A gate reads its kind and, if it has several inputs, their number (`NAND3`)."""

    name, Options = "netlists", NetlistOptions
    needs = "netlists in .bench or .blif"
    noun, names_vertices = "circuit", True
    shows = "predict how often each gate of your own circuits is 1"

    @classmethod
    def read_parts(cls, options: NetlistOptions) -> dict[str, cavs.Graphs]:
        def read(path: str, name: str) -> cavs.Graphs:
            count = options.variants if name == "train" and options.dev else 0
            return labelled(with_variants(_read(path, name), count))

        return recipes.read_parts(cls, options, read)

    @classmethod
    def read_file(cls, path: str, name: str = "file") -> cavs.Graphs:
        return labelled(_read(path, name))

    def texts(self, path: str, graphs: cavs.Graphs) -> list[str]:
        """The name of each signal."""
        return cavs.io.read_signals(path)


def _read(path: str, name: str) -> cavs.Graphs:
    recipes.check_file(name, path)
    try:
        return cavs.io.read_netlist(path)
    except ValueError as error:
        raise Mistake(f"{recipes.flag(name)}: {error}") from error


def labelled(netlists: cavs.Graphs) -> cavs.Graphs:
    """The netlists with a word for each gate, and the share of random inputs for which it is 1 as its label."""
    assert netlists.kind is not None
    fan_in = np.diff(netlists.child_offsets)
    pairs, ids = np.unique(np.stack([netlists.kind, fan_in], 1), axis=0, return_inverse=True)
    kinds = [(netlists.kind_names[kind], count) for kind, count in pairs.tolist()]
    words = [name + (str(count) if count > 1 and name in _SEVERAL else "") for name, count in kinds]
    vocab = tuple(dict.fromkeys(words))
    index = np.array([vocab.index(word) for word in words], np.int32)[ids.ravel()]
    shares = cavs.io.simulate_netlist(netlists)
    return netlists.replace(input_id=index, vocab=vocab, label=shares, kind=None, kind_names=None)


def with_variants(netlists: cavs.Graphs, count: int) -> cavs.Graphs:
    """The netlists, and `count` variants of each in which about half of the gates are of a random other kind.

    A gate of one input becomes a NOT or a BUF, and a gate of several inputs one of AND, NAND, OR, NOR, XOR and XNOR.
    """
    rng, fan_in = np.random.default_rng([0, 3]), np.diff(netlists.child_offsets)
    names = tuple(dict.fromkeys((*netlists.kind_names, *_SINGLE, *_SEVERAL)))
    variants = [netlists.replace(kind_names=names)]
    for _ in range(count):
        kind, redrawn = netlists.kind.copy(), rng.random(netlists.num_vertices) < SHARE
        for kinds, rows in ((_SINGLE, redrawn & (fan_in == 1)), (_SEVERAL, redrawn & (fan_in > 1))):
            kind[rows] = rng.choice([names.index(name) for name in kinds], int(rows.sum()))
        variants.append(variants[0].replace(kind=kind))
    return cavs.Graphs.concat(variants)


if __name__ == "__main__":
    recipes.main(Netlists)
