"""Training speed of the two taggers beside PyTorch's: `nn.LSTM` over packed sequences, and a loop over time steps by hand.

    pip install torch
    python -m bench.taggers FILE [--program bilstm] [--batch 1 16 64] [--hidden 100]

Whole training steps of the task `tag`, from sentences to updated parameters: the host's part of a step is in the clock, and
nothing overlaps it. All systems take the same batches in turn, round after round; a system's figure is its median round,
in words a second. Compilation is over before the clock starts, and told apart.
"""

import argparse
import statistics
import time

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (installed by hand, as for the peers)

from bench.peers.torch_tagger import Tagger, batch_of, part_of
from cavs import keep_host_memory
from cavs._train.batches import strata
from cavs._train.step import init_state, make_step
from cavs._train.task import configure, find


class Cavs:
    """Steps of `cavs train --task tag`."""

    def __init__(self, config, data, grid):
        task = find("tag")
        model = task.model(config, data)
        self._prepare, self._step = task.preparer(model, data.train, grid), make_step(model, config)
        self._state = init_state(model, config, None)

    def step(self, numbers):
        self._state, metrics = self._step(self._state, self._prepare(numbers))
        return metrics

    def wait(self):
        jax.block_until_ready(self._state)


class Torch:
    """Steps of `bench.peers.torch_tagger`."""

    def __init__(self, config, data, lstm):
        characters = data.facts["characters"]
        self._part = part_of(config.train, config, data.words, data.labels, characters)
        self._model = Tagger(config, len(data.words), data.labels, len(characters), lstm)

    def step(self, numbers):
        return self._model.step(batch_of(self._part, numbers[numbers >= 0]))

    def wait(self):
        pass


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.taggers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", metavar="FILE", help="as for cavs train --task tag; it is its own --dev")
    parser.add_argument("--program", nargs="+", default=["bilstm", "char-bilstm"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--hidden", type=int, default=100)
    parser.add_argument("--embedding-size", type=int, default=128)
    parser.add_argument("--char-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--words", type=int, default=8000, help="words a round, about")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_host_memory()
    print(
        "| program | batch | cavs, words/s | torch packed | torch loop | cavs / best torch | compiled in |\n" + "|---" * 7 + "|"
    )
    for program in args.program:
        sizes = {"hidden": args.hidden, "embedding_size": args.embedding_size, "char_size": args.char_size}
        given = {"task": "tag", "train": args.file, "dev": args.file, "program": program} | sizes
        config, data = find("tag").read(configure(given))
        lengths = find("tag").sizes(data.train)
        for batch in args.batch:
            rng = np.random.default_rng(batch)
            some = rng.permutation(len(lengths))[: max(batch, args.words // int(lengths.mean()) // batch * batch)]
            if batch == 1:
                some = some[: max(8, len(some) // 8)]
            grid = some[strata(lengths[some], batch, rng)]
            words = int(lengths[grid].sum())
            systems = [Cavs(config, data, grid), Torch(config, data, "packed"), Torch(config, data, "loop")]
            start = time.perf_counter()
            for numbers in grid:
                systems[0].step(numbers)
            systems[0].wait()
            compiled = time.perf_counter() - start
            rounds = [[] for _ in systems]
            for _ in range(args.rounds):
                for system, seconds in zip(systems, rounds, strict=True):
                    start = time.perf_counter()
                    for numbers in grid:
                        system.step(numbers)
                    system.wait()
                    seconds.append(time.perf_counter() - start)
            ours, *theirs = (words / statistics.median(seconds) for seconds in rounds)
            shown = " | ".join(f"{speed:,.0f}" for speed in (ours, *theirs))
            print(f"| {program} | {batch} | {shown} | {ours / max(theirs):.2f} | {compiled:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
