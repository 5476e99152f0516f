"""Compiles the gradient of three LSTMs over the same inputs for an H200, on a machine without one; run by `test_pairs`.

A CUDA graph runs a kernel when those before it have run that read or write the same memory. Prints one line of JSON: the number
of launches, and the pairs of them that can run at the same time.
"""

import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.hopper_compiler import compiled  # isort: skip

import jax
import jax.numpy as jnp

import cavs
from cavs import vertex_programs as vp
from cavs._step.concurrent_jit import BESIDE, in_turn
from cavs.kernels import H200, Target

DUMP = Path(sys.argv[1])
LAUNCH = "cavs_(?:forward|backward)"
OF_NOTHING = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")  # no kernels


class Slice(NamedTuple):
    """A part of an allocation."""

    allocation: int
    begin: int
    end: int

    def meets(self, other: "Slice") -> bool:
        return self.allocation == other.allocation and self.begin < other.end and other.begin < self.end


class Kernel(NamedTuple):
    """An instruction that runs on the GPU."""

    is_launch: bool
    reads: list[Slice]
    writes: list[Slice]

    def waits_for(self, before: "Kernel") -> bool:
        pairs = [(self.reads, before.writes), (self.writes, before.reads), (self.writes, before.writes)]
        return any(a.meets(b) for mine, others in pairs for a in mine for b in others)


def dumped(name: str) -> str:
    (path,) = DUMP.glob(f"*gpu_after_optimizations{name}.txt")
    return path.read_text()


def slices() -> dict[str, dict[str, Slice]]:
    """Maps each instruction to the memory of its results by number, "" for a single one."""
    found: dict[str, dict[str, Slice]] = {}
    allocation = 0
    for line in dumped("-buffer-assignment").splitlines():
        if m := re.match(r"allocation (\d+):", line):
            allocation = int(m[1])
        elif m := re.match(r" value: <\d+ ([^\s{]+)(?:\{(\d*)\})? @\d+> \(size=(\d+),offset=(\d+)\)", line):
            name, number, size, offset = m.groups(default="")
            found.setdefault(name, {})[number] = Slice(allocation, int(offset), int(offset) + int(size))
    return found


def kernels() -> Iterator[Kernel]:
    """Yields the kernels of the program in their order."""
    known, aliases = slices(), dict[str, list[tuple[str, str]]]()

    def memory(name: str, number: str) -> list[Slice]:
        if name not in aliases:
            return [known[name][number]] if number in known[name] else [*known[name].values()]
        return [x for of in ([aliases[name][int(number)]] if number else aliases[name]) for x in memory(*of)]

    *computations, entry = re.split(r"\n(?=%|ENTRY)", dumped(""))
    # A launch that reads a part of an array is in a computation of its own.
    launching = [f"calls={re.escape(text.split()[0])}\\b" for text in computations if "mosaic_gpu" in text]
    launch = re.compile("|".join([LAUNCH, *launching]))
    for line in entry.splitlines()[1:]:
        if not (m := re.match(r"\s*(?:ROOT )?%(\S+) = .*? ([\w-]+)\(((?:%|/|\)).*)", line)):
            continue
        name, operation, rest = m.groups()
        operands = re.findall(r"%([\w.\-]+)(?:#(\d+))?", rest[: rest.index(")")])
        if operation in OF_NOTHING:
            aliases |= {name: operands} if operands else {}
        elif "AllocateBuffer" not in rest:
            # An operand that a kernel writes to has the memory of a result.
            writes = [x for number, x in known[name].items() if number or len(known[name]) == 1]
            yield Kernel(launch.search(rest) is not None, [x for of in operands for x in memory(*of)], writes)


def main() -> None:
    Target.here = staticmethod(lambda: H200)
    program, chains = vp.LSTM(64, 64), cavs.from_lengths([20, 7, 31] * 5)
    sched, F = cavs.schedule(chains, scripts=True), program.vertex_function()

    def gradient(params: Any, data: Any, x: Any) -> Any:
        run = lambda params: cavs.run(F, params, cavs.Schedule(data, sched.shape), x)  # noqa: E731
        return jax.grad(lambda params: sum((run(one) ** 2).mean() for one in params))(params)

    shapes = (
        [jax.eval_shape(program.init, jax.random.key(0))] * 3,
        jax.ShapeDtypeStruct(sched.data.shape, jnp.int32),
        jax.ShapeDtypeStruct((sched.shape.vertices, 64), jnp.float32),
    )
    compiled(in_turn(gradient), *shapes, options=BESIDE | {"xla_dump_to": str(DUMP), "xla_dump_hlo_as_text": True})
    run = [*kernels()]
    before: list[set[int]] = []
    for n, kernel in enumerate(run):
        direct = [m for m in range(n) if kernel.waits_for(run[m])]
        before.append({*direct}.union(*(before[m] for m in direct)))
    launches = [n for n, kernel in enumerate(run) if kernel.is_launch]
    free = [(i, j) for (i, a), (j, b) in itertools.combinations(enumerate(launches), 2) if a not in before[b]]
    print(json.dumps({"launches": len(launches), "kernels": len(run), "at the same time": free}))


if __name__ == "__main__":
    main()
