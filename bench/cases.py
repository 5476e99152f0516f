"""The named cases of the benchmarks: batches and initial parameters, from a case's name and a seed (NumPy only).

Every system gets the same batches and starts from the same parameters. This file and its imports also run under Python 3.8,
which DyNet's wheel needs.
"""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np

from bench import cells, graphs
from bench.cells import CELLS
from bench.graphs import CLASSES, VOCAB

SEED = 0
SHAPES = {"sst": graphs.sst_like}
SHAPES.update((f.__name__, f) for f in (graphs.complete, graphs.chains, graphs.fixed, graphs.dependency, graphs.lattice))
SHAPES.update((f.__name__, f) for f in (graphs.deep, graphs.wide, graphs.netlist, graphs.sentences, graphs.pairs))
SHAPES.update((f.__name__, f) for f in (graphs.characters, graphs.tagged, graphs.spelled))
# Steps of one quick round, each over a distinct batch, by batch size. They are the same for every system.
QUICK_STEPS = {1: 64, 16: 16, 64: 6, 256: 3}
GPU_QUICK_STEPS = {1: 32, 16: 16, 64: 8, 256: 6}  # few, because each may need compilation; a sample is several passes
STEPS_FACTOR = 4  # steps of a full round per step of a quick round


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload: `cell` over graphs of `shape`, at one hidden size, embedding width and batch size."""

    cell: str
    shape: str  # of SHAPES
    hidden: int
    batch: int
    embed: int
    classes: int = CLASSES

    @property
    def name(self) -> str:
        """The name, for example `tree_lstm/sst/h256/b64`, with `/e<width>` if the embedding differs from `hidden`."""
        name = f"{self.cell}/{self.shape}/h{self.hidden}/b{self.batch}"
        return name if self.embed == self.hidden else f"{name}/e{self.embed}"

    def steps(self, quick: bool, device: str = "cpu") -> int:
        """Returns the number of training steps of one round. Each step has a batch of its own."""
        table = QUICK_STEPS if device == "cpu" else GPU_QUICK_STEPS
        nearest = min(table, key=lambda b: abs(np.log(b / self.batch)))
        steps = max(2, round(table[nearest] * nearest / self.batch))
        return steps if quick else steps * STEPS_FACTOR


def parse(name: str) -> Case:
    """Returns the case with this name.

    Raises:
        ValueError: If the name is invalid.
    """
    m = re.fullmatch(r"(\w+)/([\w-]+)/h(\d+)/b(\d+)(?:/e(\d+))?", name)
    if not m or m[1] not in CELLS or re.sub(r"-[\d-]+$", "", m[2]) not in SHAPES:
        raise ValueError(
            f"case: got {name!r}; expected cell/shape/h<hidden>/b<batch>[/e<embed>], cells {CELLS}, shapes {tuple(SHAPES)}"
        )
    return Case(m[1], m[2], int(m[3]), int(m[4]), int(m[5] or m[3]))


def parameters(case: Case) -> dict:
    """Returns the initial float32 parameters of all systems: those of the cell, `embed`, `out_w` and `out_b`."""
    e, h = case.embed, case.hidden
    shapes = dict(cells.shapes(case.cell, e, h), embed=(VOCAB, e), out_w=(h, case.classes), out_b=(case.classes,))
    rng, limit = np.random.default_rng(SEED), h**-0.5
    return {
        k: (2 * rng.random(s, dtype=np.float32) - 1) * np.float32(0.5 if k == "embed" else limit) for k, s in shapes.items()
    }


def dataset(case: Case, steps: int, path: str | None = None) -> list:
    """Returns `steps` batches of graphs. If `path` is given, graphs of shape `sst` come from that file (see `pack`)."""
    shape, *numbers = case.shape.split("-")
    rng = np.random.default_rng([SEED, sum(map(ord, case.shape))])
    count = steps * case.batch
    if path and shape == "sst":
        trees = unpack(path)
        order = rng.permutation(len(trees))
        samples = [trees[order[i % len(trees)]] for i in range(count)]
    else:
        samples = SHAPES[shape](rng, count, *map(int, numbers))
    return [samples[i * case.batch : (i + 1) * case.batch] for i in range(steps)]


def pack(trees: list, path: str) -> None:
    """Writes trees to a JSON file for the workers."""
    with open(path, "w") as file:
        json.dump([{k: np.asarray(v).tolist() for k, v in tree.items()} for tree in trees], file)


def unpack(path: str) -> list:
    """Reads the trees of a file by `pack`. Words are taken modulo the vocabulary size."""
    with open(path) as file:
        trees = [{k: np.array(v) for k, v in tree.items()} for tree in json.load(file)]
    return [dict(t, word=np.where(t["word"] < 0, -1, t["word"] % VOCAB), label=int(t["label"])) for t in trees]


def gflop(case: Case, batches: list) -> float:
    """Returns the GFLOP of the matrix products of an average step: the forward pass, and twice as much backward."""
    total = sum(cells.multiply_adds(case.cell, case.embed, case.hidden, case.classes, g) for batch in batches for g in batch)
    return 3 * 2 * total / len(batches) / 1e9
