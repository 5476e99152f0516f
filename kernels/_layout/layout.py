"""The place of each product of a level on the chip: specs for the device, packed weights, and partial sums."""

import dataclasses
import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeAlias, TypeVar

from cavs.kernels._layout.config import STAGES, LaunchConfig
from cavs.kernels._layout.pack import PackedWeight
from cavs.kernels._layout.specs import ProductSpec, SourceSpec, WeightSpec
from cavs.kernels._program.fit import Unfit
from cavs.kernels._program.jaxprs import Var
from cavs.kernels._program.names import Tensor
from cavs.kernels._program.operations import LevelProgram, Phase, Product, RowRead

_SLACK = 2048  # bytes of shared memory, for barriers and alignment
_WeightKey: TypeAlias = tuple[Var, int, int]  # a weight, its contracted axis, and how many rows lie side by side
_T = TypeVar("_T", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Sums:
    """Where a product's partial sums are: in so many slots, from these columns on, one for each leading index."""

    slots: int
    columns: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PhaseLayout:
    """The specs of a phase's products, one for each K, the rows that their sources read, and where their results are."""

    specs: tuple[ProductSpec, ...]
    sources: tuple[RowRead, ...]
    sums: dict[Var, Sums]


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where the products of a level's program are.

    Attributes:
        phases: The layouts of the phases.
        packed: The weights, in the order of packing.
        words: The 32-bit words of a thread block's packed weights.
        columns: The width of the partial sums.
    """

    phases: tuple[PhaseLayout, ...]
    packed: tuple[PackedWeight, ...]
    words: int
    columns: int

    def specs(self) -> list[ProductSpec]:
        """The specs of all phases."""
        return [spec for phase in self.phases for spec in phase.specs]

    @property
    def slots(self) -> int:
        """The most partial sums of a product that a warpgroup leaves."""
        return max((spec.all_slots for spec in self.specs()), default=1)

    def part(self, config: LaunchConfig) -> tuple[int, int, int]:
        """The shape of the partial sums in shared memory; the weight chunks of wide products share the same memory."""
        count, width = config.warpgroups * self.slots, self.columns + 4
        if config.wide:
            stage = 32 * max(sum(w.width for w in self.packed if w.offset == first.offset) for first in self.packed)
            count = max(count, -(-STAGES * stage // (config.rows * width)))
        return count, config.rows, width

    def shared_memory(self, config: LaunchConfig) -> int:
        """The bytes of shared memory of a thread block."""
        part = math.prod(self.part(config)) * 4 if self.columns else 0
        return part + (self.words * 4 if config.resident else 0) + _SLACK


@functools.lru_cache(maxsize=2048)
def layout_of(program: LevelProgram, config: LaunchConfig) -> Layout:
    """Assigns every product its place; cached.

    Raises:
        Unfit: If a product's sum cannot be divided as the config says.
    """
    packed, words = _packed(program, config)
    offsets = {(p.variable, p.axis, joined): p.offset for (joined, p) in packed}
    phases, columns = [], 0
    awaited = program.exchanged() if config.dataflow else set()
    for phase in program.phases:
        builder = _PhaseBuilder(program, config, offsets, words, awaited)
        phases.append(builder.build(phase))
        columns = max(columns, builder.columns)
    layout = Layout(tuple(phases), tuple(p for _, p in packed), words, columns)
    return _streamed(layout) if config.wide else layout


def _packed(program: LevelProgram, config: LaunchConfig) -> tuple[list[tuple[int, PackedWeight]], int]:
    """Each weight as packed, with how many rows its product reads side by side; and the words of all."""
    packed: dict[_WeightKey, tuple[int, PackedWeight]] = {}
    words = 0
    for p in program.products():
        if (key := (p.weight, p.axis, p.joined)) not in packed:
            k = program.size(p.size)
            splits = _splits(k // config.chunk, p.joined, config)
            width = p.blocks * config.hb * config.split
            part = PackedWeight(p.weight, p.axis, k // config.split, width, words, splits, config.tight)
            packed[key] = p.joined, part
            words += part.words(config.precision)
    return list(packed.values()), words


class _PhaseBuilder:
    """Assigns the products of one phase their columns of the partial sums."""

    def __init__(
        self, program: LevelProgram, config: LaunchConfig, offsets: dict[_WeightKey, int], words: int, awaited: set[Tensor]
    ):
        self.program, self.config, self.offsets, self.words, self.awaited = program, config, offsets, words, awaited
        self.columns = 0
        self.sums: dict[Var, Sums] = {}

    def build(self, phase: Phase) -> PhaseLayout:
        """The layout of a phase."""
        by_k = _grouped((self.program.size(p.size), p.joined) for p in phase.products)
        specs: list[ProductSpec] = []
        sources: list[RowRead] = []
        for (k, joined), which in by_k.items():
            products = [phase.products[n] for n in which]
            distinct = list(dict.fromkeys(source for p in products for operand in p.operands for source in operand))
            specs.append(self.spec(k, joined, products, distinct))
            sources += [row for source in distinct for row in source]
        if self.config.split > 1 and len({spec.slots for spec in specs}) > 1:
            raise Unfit("products of different sizes, whose sums cannot be sent together")
        return PhaseLayout(tuple(specs), tuple(sources), self.sums)

    def spec(self, k: int, joined: int, products: Sequence[Product], sources: list[tuple[RowRead, ...]]) -> ProductSpec:
        """The spec of the products that sum over `k` elements."""
        config, chunk = self.config, self.config.chunk
        if k % chunk:
            raise Unfit(f"products in {config.precision} need sizes that are multiples of {chunk}, and one sums over {k}")
        operands = list(dict.fromkeys(_numbers(operand, sources) for p in products for operand in p.operands))
        splits = _splits(k // chunk, joined, config)
        slots = 2 if config.paired and splits == 4 else splits
        return ProductSpec(
            rows=config.rows,
            splits=splits,
            slots=slots,
            chunk=chunk,
            chunks=k // chunk // config.split,
            sources=tuple(
                SourceSpec(row.part * self.program.unit, row.tensor in self.awaited) for source in sources for row in source
            ),
            joined=joined,
            operands=tuple(operands),
            weights=tuple(self.weights(products, joined, sources, operands, slots)),
            words=self.words,
            resident=config.resident,
            tight=config.tight,
            precision=config.precision,
            in_flight=config.in_flight,
            spins=config.spins,
            hb=config.hb,
            split=config.split,
        )

    def weights(
        self,
        products: Sequence[Product],
        joined: int,
        sources: list[tuple[RowRead, ...]],
        operands: list[tuple[int, ...]],
        slots: int,
    ) -> Iterable[WeightSpec]:
        """The weights of some products; notes where their sums are."""
        config = self.config
        for (weight, axis), which in _grouped((p.weight, p.axis) for p in products).items():
            sharing = [products[n] for n in which]
            width = sharing[0].blocks * config.hb * config.split
            used = {p.value: [operands.index(_numbers(o, sources)) for o in p.operands] for p in sharing}
            use = list(dict.fromkeys(o for found in used.values() for o in found))
            firsts = tuple(self.columns + width * i for i in range(len(use)))
            self.columns += width * len(use)
            for value, found in used.items():
                self.sums[value] = Sums(slots + config.split - 1, tuple(firsts[use.index(o)] for o in found))
            yield WeightSpec(-(-width // 16), width % 16 == 8, tuple(use), firsts, self.offsets[weight, axis, joined])


def _numbers(operand: tuple[tuple[RowRead, ...], ...], sources: list[tuple[RowRead, ...]]) -> tuple[int, ...]:
    """The sources of an operand as positions in a list."""
    return tuple(sources.index(source) for source in operand)


def _grouped(keys: Iterable[_T]) -> dict[_T, list[int]]:
    """The positions of each key, in the order in which the keys appear."""
    positions: dict[_T, list[int]] = {}
    for n, key in enumerate(keys):
        positions.setdefault(key, []).append(n)
    return positions


def _splits(chunks: int, joined: int, config: LaunchConfig) -> int:
    """The number of warps of a warpgroup, in each thread block, that divide K; each warp reads one of `joined` sources."""
    for n in (1,) if config.wide else (4, 3, 2, 1):
        if chunks % (n * config.split) == 0 and (config.wide or n * config.split % joined == 0):
            return n
    raise Unfit(f"sums over {chunks} parts, of {joined} rows side by side, cannot be divided among {config.split} blocks")


def _streamed(layout: Layout) -> Layout:
    """The layout of wide products: each has its weights in the order in which it multiplies them (`_layout.pack.pack_ring`)."""
    held = {part.offset: part for part in layout.packed}
    packed: list[PackedWeight] = []
    phases, at = [], 0
    for phase in layout.phases:
        if sum(spec.chunks for spec in phase.specs) % (2 * STAGES) or any(
            spec.chunks % (STAGES * spec.joined) for spec in phase.specs
        ):
            raise Unfit("sums of other lengths than a wide product takes")
        specs = []
        for spec in phase.specs:
            weights, columns = [], 0
            for weight in spec.weights:
                part = held[weight.offset]
                packed.append(dataclasses.replace(part, offset=at))
                weights.append(dataclasses.replace(weight, offset=columns))
                columns += part.width
            specs.append(dataclasses.replace(spec, weights=tuple(weights), ring=at))
            at += columns * spec.chunk * spec.chunks
        phases.append(dataclasses.replace(phase, specs=tuple(specs)))
    return dataclasses.replace(layout, phases=tuple(phases), packed=tuple(packed), words=at)
