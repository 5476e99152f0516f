"""The named workloads of the bench: their batches and initial parameters, from a case's name and a seed (NumPy only).

Every system gets the same batches and starts from the same parameters. This file and what it imports also run under the older
Python of DyNet's wheel (3.8): keep them free of what that lacks.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from bench import cells, graphs, sentences
from bench.cells import CELLS
from bench.graphs import CLASSES, VOCAB

SEED = 0
SHAPES = {
    "sst": graphs.sst_like,
    "complete": graphs.complete,
    "pyramid": graphs.pyramid,
    "chains": graphs.chains,
    "fixed": graphs.fixed,
    "dependency": graphs.dependency,
    "lattice": graphs.lattice,
    "deep": graphs.deep,
    "wide": graphs.wide,
    "netlist": graphs.netlist,
    "sentences": sentences.sentences,
    "pairs": sentences.pairs,
    "characters": sentences.characters,
    "tagged": sentences.tagged,
    "spelled": sentences.spelled,
}
# Steps of one round over distinct batches, quick and full: the same for every system.
QUICK_STEPS = {1: 64, 16: 16, 64: 6, 256: 3}
GPU_QUICK_STEPS = {1: 32, 16: 16, 64: 8, 256: 6}  # few, as each may be a new shape to compile; a sample is several passes
STEPS_FACTOR = 4  # a full run's rounds are longer by this


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
        """Such as `tree_lstm/sst/h256/b64`; a width of embedding other than `hidden` is added."""
        name = f"{self.cell}/{self.shape}/h{self.hidden}/b{self.batch}"
        return name if self.embed == self.hidden else f"{name}/e{self.embed}"

    def steps(self, quick: bool, device: str = "cpu") -> int:
        """Training steps of one round, each over a batch of its own."""
        of = QUICK_STEPS if device == "cpu" else GPU_QUICK_STEPS
        near = min(of, key=lambda b: abs(np.log(b / self.batch)))
        steps = max(2, round(of[near] * near / self.batch))
        return steps if quick else steps * STEPS_FACTOR

    @property
    def epoch(self) -> int:
        """Samples of one epoch, for times a epoch: SST's training sentences; as many where the data are synthetic."""
        return 8544


def parse(name: str) -> Case:
    """The case of a name."""
    m = re.fullmatch(r"(\w+)/([\w-]+)/h(\d+)/b(\d+)(?:/e(\d+))?", name)
    if not m or m[1] not in CELLS or re.sub(r"-[\d-]+$", "", m[2]) not in SHAPES:
        raise ValueError(
            f"case {name!r}: wanted cell/shape/h<hidden>/b<batch>[/e<embed>], cells {CELLS}, shapes {tuple(SHAPES)}"
        )
    return Case(m[1], m[2], int(m[3]), int(m[4]), int(m[5] or m[3]))


def parameters(case: Case) -> dict:
    """Initial float32 parameters that all systems share: the cell's, `embed`, `out_w` and `out_b`."""
    e, h = case.embed, case.hidden
    shapes = dict(cells.shapes(case.cell, e, h), embed=(VOCAB, e), out_w=(h, case.classes), out_b=(case.classes,))
    rng, limit = np.random.default_rng(SEED), h**-0.5
    return {
        k: (2 * rng.random(s, dtype=np.float32) - 1) * np.float32(0.5 if k == "embed" else limit) for k, s in shapes.items()
    }


def dataset(case: Case, steps: int, path: str | None = None) -> list:
    """`steps` batches of graphs; those of shape `sst` come from the file at `path` (see `pack`) where one is given."""
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
    """Trees to an .npz that any worker reads."""
    left, right, word = (np.concatenate([g[k] for g in trees]) for k in ("left", "right", "word"))
    counts, label = np.array([len(g["word"]) for g in trees]), np.array([g["label"] for g in trees])
    np.savez(path, counts=counts, label=label, left=left, right=right, word=word)


def unpack(path: str) -> list:
    """The trees of an .npz by `pack`; words beyond the vocabulary of the bench are folded into it."""
    with np.load(path) as f:
        z = {k: f[k] for k in f.files}
    ends = np.cumsum(z["counts"])
    word = np.where(z["word"] < 0, -1, z["word"] % VOCAB)
    return [
        {"left": z["left"][e - n : e], "right": z["right"][e - n : e], "word": word[e - n : e], "label": int(c)}
        for e, n, c in np.stack([ends, z["counts"], z["label"]], 1).tolist()
    ]


def gflop(case: Case, batches: list) -> float:
    """GFLOP of the matrix products of an average training step: forward, and twice that backward."""
    total = sum(cells.multiply_adds(case.cell, case.embed, case.hidden, case.classes, g) for batch in batches for g in batch)
    return 3 * 2 * total / len(batches) / 1e9
