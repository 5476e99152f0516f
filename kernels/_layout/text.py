"""The printed form of a level's layout on the chip; kernels/README.md follows one."""

from collections.abc import Iterator

from cavs.kernels._layout.config import LaunchConfig
from cavs.kernels._layout.layout import layout_of
from cavs.kernels._layout.specs import ProductSpec
from cavs.kernels._program.operations import LevelProgram, RowRead
from cavs.kernels._program.text import weight_names


def layout_text(program: LevelProgram, config: LaunchConfig) -> str:
    """Returns the layout of a level's products in a launch of `config`, as text.

    Raises:
        Unfit: If the products cannot be divided as `config` says.
    """
    layout = layout_of(program, config)
    lines = [_grid(program, config), f"shared memory of a thread block: {layout.shared_memory(config)} bytes"]
    names = weight_names(program)
    held = "registers" if config.registers else "shared memory" if config.resident else "L2"
    for part in layout.packed:
        matrix = f"{names[part.variable]}{'.T' * part.axis}: {part.k} x {part.width} of a thread block"
        lines.append(f"{matrix}, from word {part.offset} of {layout.words} in {held}")
    if layout.columns:
        count, rows, width = layout.part(config)
        lines.append(f"sums: float32[{count}, {rows}, {width}] in shared memory")
    for n, phase in enumerate(layout.phases):
        rows_of_sources = iter(phase.sources)
        for spec in phase.specs:
            first, *rest = _product(spec, [next(rows_of_sources) for _ in spec.sources], config)
            lines += [f"phase {n}, {first}", *(f"  {line}" for line in rest)]
    return "\n".join(lines) + "\n"


def _grid(program: LevelProgram, config: LaunchConfig) -> str:
    """How the thread blocks of a launch divide units and rows."""
    strategy = "wide" if config.wide else "narrow"
    count = program.unit // config.hb
    blocks = f"{count} thread block{'s' * (count > 1)}"
    tiles = f"{config.warpgroups} warpgroups with tiles of {config.rows} rows"
    return f"{strategy}: {config.groups} groups of {blocks}, each with {config.hb} units; {tiles}; {config.precision}"


def _product(spec: ProductSpec, rows: list[RowRead], config: LaunchConfig) -> Iterator[str]:
    """The lines of the products that sum over the same elements; `rows` are those of the sources."""
    warps = f", divided among {spec.splits} warps" if spec.splits > 1 else ""
    yield f"sums of {spec.chunk * spec.chunks * spec.split} elements: {spec.chunks} chunks of {spec.chunk}{warps}"
    for n in range(len(rows) // spec.joined):
        part = slice(n * spec.joined, (n + 1) * spec.joined)
        parts = [
            f"{row.tensor} from column {source.column}{', polled' * source.awaited}"
            for row, source in zip(rows[part], spec.sources[part], strict=True)
        ]
        yield f"source {n}: {' | '.join(parts)}"
    for n, operand in enumerate(spec.operands):
        yield f"operand {n}: {' + '.join(f'source {i}' for i in operand)}"
    for weight in spec.weights:
        begin = f"{'column' if config.wide else 'word'} {weight.offset}"
        for operand, column in zip(weight.operands, weight.columns, strict=True):
            slots = f"{spec.slots} partial sums" if spec.slots > 1 else "sum"
            yield f"operand {operand} @ the {weight.width} columns of weights from {begin} on: {slots} from column {column} on"
