"""Fuzzes every reader: `python -m tests.fuzz_readers --seconds 300`.

Mutates small valid files and reads them. A reader may return graphs, or raise a `FormatError` that names the file. Anything
else fails and prints how to reproduce it. All fields of the graphs are checked, and trees are compared with a plain parser.
"""

import argparse
import gzip
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from cavs._graphs.graphs import Graphs
from cavs.io import FormatError, read, read_conllu
from tests.graph_checks import check_graphs, check_round_trips, check_trees
from tests.mutations import SEEDS, mutated, mutated_bytes, npz_seed


def fuzz(seed: int, *, inputs: float = math.inf, seconds: float = math.inf) -> Counter[str]:
    """Mutates and reads files; returns the number of inputs of each format, and the number of valid ones."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    number, end = 0, time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        archives = [npz_seed(Path(folder), suffix, data) for suffix in (".jsonl", ".blif") for data in SEEDS[suffix]]
        corpus = SEEDS | {".npz": archives}
        suffixes = list(corpus)
        while number < inputs and time.monotonic() < end:
            number += 1
            suffix = rng.choice(suffixes)
            data = mutated(rng, suffix, corpus[suffix])
            counts[suffix] += 1
            path = Path(folder) / f"fuzz{suffix}"
            if rng.random() < 0.05:
                path = Path(folder) / f"fuzz{suffix}.gz"
                data = gzip.compress(data, 1)
                if rng.random() < 0.5:
                    data = mutated_bytes(rng, data, [b"\x00"])
            path.write_bytes(data)
            reader: Callable[[Path], Graphs] = read
            if suffix == ".conllu" and rng.random() < 0.5:
                reader = _read_deprel
            began = time.monotonic()
            try:
                try:
                    graphs = reader(path)
                except FormatError as error:
                    assert str(path) in str(error) and len(str(error)) < 2000, f"message: {str(error)[:2000]}"
                    graphs = None
                if graphs is not None:
                    check_graphs(graphs)
                    counts[f"{suffix} valid"] += 1
                    if rng.random() < 0.1:
                        check_round_trips(graphs, Path(folder))
                if suffix == ".txt" and path.suffix != ".gz":
                    check_trees(data, graphs)
                assert time.monotonic() - began < 10, "took over 10 seconds"
            except Exception as error:
                shown = repr(data) if len(data) < 4000 else f"{data[:4000]!r}... ({len(data)} bytes)"
                raise AssertionError(f"seed {seed}, input {number}, {path.name}: {shown}") from error
    return counts


def _read_deprel(path: Path) -> Graphs:
    return read_conllu(path, label="deprel")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = fuzz(arguments.seed, seconds=arguments.seconds)
    total = sum(count for name, count in result.items() if not name.endswith("valid"))
    print(f"{total} inputs, seed {arguments.seed}: only graphs and FormatError")
    for name in sorted(result):
        print(f"  {name}: {result[name]}")
