"""How a launch lies on the chip: groups of CTAs, tiles, and where each product's weights and sums are."""

import dataclasses
import math
from typing import Any

from cavs.kernels._layout.pack import Packed
from cavs.kernels._program.specs import HALVES, Level, ProductSpec, Rows, SourceSpec, Unfit, WeightSpec

PARTS = 16  # the schedule deals graphs into so many parts; a group takes PARTS / groups of them
SHARED_MEMORY = 227 * 1024
EXCHANGE_WORDS = 8  # of shared memory for each warpgroup where `Config.split`, for `_mosaic.exchange`
STAGES = 4  # chunks of weights that a wide product has in shared memory (`_mosaic.wide`)
RING_WORDS = 4 * STAGES  # of shared memory, for their barriers
_SLACK = 2048  # of shared memory, for barriers and alignment


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel is laid out on the chip.

    **Fields:** `hb`: units that a CTA owns; `groups`: of CTAs, each with all weights; `clustered`: whether a group is a
    thread-block cluster; `rows`: of a tile, which one warpgroup runs; `warpgroups` of a CTA; `precision` of products:
    "fp32" (3xtf32), "tf32", "bf16" or "f16"; `resident`: weights in shared memory (else they stream from L2); `tight`: three
    tf32 weights in two words (`pack`), so that a CTA holds half as many again; `in_flight`: reads of rows, 16 bytes each,
    that a thread has on the way; `paired`: four warps add their sums of a product two by two, so that these take half the
    room; `spins`: after so many reads of a counter in vain a CTA reports and goes on; `dataflow`: groups never meet, and a
    product waits for the numbers that it reads instead (`Level.flows`): they are `UNWRITTEN` before; `split`: CTAs of a
    cluster that divide K of every product, each for the units of all of them, and send each other sums (`_mosaic.exchange`);
    `wide`: for the widest levels alone, whose rows `groups` share tile by tile, and whose weights stream (`_mosaic.wide`).
    """

    hb: int
    groups: int
    clustered: bool
    rows: int
    warpgroups: int
    precision: str
    resident: bool
    tight: bool = False
    in_flight: int = 12
    paired: bool = False
    spins: int = 1 << 22
    interpret: bool = False
    dataflow: bool = False
    split: int = 1
    wide: bool = False

    def cluster(self, unit: int) -> int:
        """CTAs of a thread-block cluster, where vectors have `unit` numbers."""
        return unit // self.hb if self.clustered else self.split


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where the products of a `Level` lie: a spec per phase and K, the packed weights, and the partial sums' width."""

    specs: list[list[tuple[ProductSpec, list[Rows]]]]  # of each phase
    results: list[dict[Any, tuple[int, tuple[int, ...]]]]  # of each phase: product output -> (slots, first columns)
    packed: list[Packed]  # weights, in the order of packing
    words: int
    columns: int

    @property
    def slots(self) -> int:
        """Sums of a product that a warpgroup leaves, at most."""
        return max((s.all_slots for specs in self.specs for s, _ in specs), default=1)

    def part(self, config: Config) -> tuple[int, int, int]:
        """The shape of the products' sums in shared memory; over those of wide products lie the weights of some chunks."""
        count, width = config.warpgroups * self.slots, self.columns + 4
        if config.wide:
            stage = 32 * max(sum(w.width for w in self.packed if w.offset == first.offset) for first in self.packed)
            count = max(count, -(-STAGES * stage // (config.rows * width)))
        return count, config.rows, width

    def shared_memory(self, config: Config) -> int:
        """Bytes of shared memory of a CTA."""
        part = math.prod(self.part(config)) * 4 if self.columns else 0
        return part + (self.words * 4 if config.resident else 0) + _SLACK


def layout_of(level: Level, config: Config) -> Layout:
    """Assigns every product its place."""
    chunk = 32 if config.precision in HALVES or config.wide else 16
    packed: list[Packed] = []
    offsets: dict[tuple[Any, int, int], int] = {}
    words = 0
    for phase in level.phases:
        for p in phase.products:
            key = (p.weight, p.axis, p.joined)
            if key not in offsets:
                k = level.size(p.weight.aval.shape[p.axis])
                offsets[key] = words
                splits = _splits(k // chunk, p.joined, config)
                width = p.blocks * config.hb * config.split
                packed.append(Packed(p.weight, p.axis, k // config.split, width, words, splits, config.tight))
                words += packed[-1].words(config.precision)
    specs, results, columns = [], [], 0
    awaited = level.exchanged() if config.dataflow else set()
    for phase in level.phases:
        mine, where, at = [], {}, 0
        by_k: dict[tuple[int, int], list[Any]] = {}
        for p in phase.products:
            by_k.setdefault((level.size(p.weight.aval.shape[p.axis]), p.joined), []).append(p)
        for (k, joined), products in by_k.items():
            sources = list(dict.fromkeys(r for p in products for o in p.operands for r in o))
            operands = list(dict.fromkeys(tuple(sources.index(r) for r in o) for p in products for o in p.operands))
            if k % chunk:
                raise Unfit(f"products in {config.precision} need sizes that are multiples of {chunk}, and one sums over {k}")
            chunks = k // chunk
            splits = _splits(chunks, joined, config)
            slots = 2 if config.paired and splits == 4 else splits
            by_weight: dict[Any, list[Any]] = {}
            for p in products:
                by_weight.setdefault((p.weight, p.axis, joined), []).append(p)
            weights = []
            for key, sharing in by_weight.items():
                width = sharing[0].blocks * config.hb * config.split
                tiles, half = -(-width // 16), width % 16 == 8
                use = list(
                    dict.fromkeys(operands.index(tuple(sources.index(r) for r in o)) for p in sharing for o in p.operands)
                )
                firsts = tuple(at + width * i for i in range(len(use)))
                at += width * len(use)
                weights.append(WeightSpec(tiles, half, tuple(use), firsts, offsets[key]))
                for p in sharing:
                    found = [use.index(operands.index(tuple(sources.index(r) for r in o))) for o in p.operands]
                    where[p.eqn.outvars[0]] = (slots + config.split - 1, tuple(firsts[i] for i in found))
            spec = ProductSpec(
                rows=config.rows,
                splits=splits,
                slots=slots,
                chunk=chunk,
                chunks=chunks // config.split,
                sources=tuple(SourceSpec(r.part * level.unit, r.tensor in awaited) for source in sources for r in source),
                joined=joined,
                operands=tuple(operands),
                weights=tuple(weights),
                words=words,
                resident=config.resident,
                tight=config.tight,
                precision=config.precision,
                in_flight=config.in_flight,
                spins=config.spins,
                hb=config.hb,
                split=config.split,
            )
            mine.append((spec, [r for source in sources for r in source]))
        if config.split > 1 and len({spec.slots for spec, _ in mine}) > 1:
            raise Unfit("products of different sizes, whose sums cannot be sent together")
        specs.append(mine)
        results.append(where)
        columns = max(columns, at)
    found = Layout(specs, results, packed, words, columns)
    return _streamed(found) if config.wide else found


def _splits(chunks: int, joined: int, config: Config) -> int:
    """Among how many warps of a warpgroup, in each CTA, K is divided; of `joined` sources each warp reads one."""
    for n in (1,) if config.wide else (4, 3, 2, 1):
        if chunks % (n * config.split) == 0 and (config.wide or n * config.split % joined == 0):
            return n
    raise Unfit(f"sums over {chunks} parts, of {joined} rows side by side, cannot be divided among {config.split} CTAs")


def _streamed(layout: Layout) -> Layout:
    """The same for wide products: each has its weights in the order in which it multiplies them (`_layout.pack.pack_ring`)."""
    held = {part.offset: part for part in layout.packed}
    packed: list[Packed] = []
    specs, words = [], 0
    for phase in layout.specs:
        mine = []
        if sum(spec.chunks for spec, _ in phase) % (2 * STAGES) or any(
            spec.chunks % (STAGES * spec.joined) for spec, _ in phase
        ):
            raise Unfit("sums of other lengths than a wide product takes")
        for spec, rows in phase:
            weights, columns = [], 0
            for weight in spec.weights:
                part = held[weight.offset]
                packed.append(dataclasses.replace(part, offset=words))
                weights.append(dataclasses.replace(weight, offset=columns))
                columns += part.width
            mine.append((dataclasses.replace(spec, weights=tuple(weights), ring=words), rows))
            words += columns * spec.chunk * spec.chunks
        specs.append(mine)
    return dataclasses.replace(layout, specs=specs, packed=packed, words=words)
