"""The printed form of a level's program; kernels/README.md follows one."""

import itertools

import numpy as np

from cavs.kernels._program.jaxprs import DOMAIN_NAMES, ROW, Atom, Literal, Params, Var, aval
from cavs.kernels._program.operations import (
    ConstantRead,
    Equation,
    LevelProgram,
    Load,
    Operation,
    ParentSum,
    Phase,
    Product,
    ReduceChildren,
    ReduceVector,
    RowAddress,
    RowRead,
    Source,
    Spread,
    Store,
)

_SHOWN = ("axes", "start_indices", "limit_indices", "sizes", "axis", "dimension", "y", "new_dtype")


def program_text(program: LevelProgram) -> str:
    """Returns a level's program as text. Values get letters, in the order in which they appear; see also `weight_names`."""
    width = f"{program.valid} elements" + f", {program.unit} in memory" * (program.unit != program.valid)
    lines = [f"level: units of {width}; products {'may' if program.flows else 'cannot'} poll for rows"]
    for tensor, scratch in program.scratch.items():
        lines.append(f"{tensor}: {scratch.dtype}[{DOMAIN_NAMES[scratch.domain]}, {scratch.width}]")
    printer = _Printer(weight_names(program))
    for n, phase in enumerate(program.phases):
        lines += printer.phase(n, phase)
    return "\n".join(lines) + "\n"


def weight_names(program: LevelProgram) -> dict[Var, str]:
    """Returns the names of the weights in printed forms: "weight0" is that of the first product."""
    return {weight: f"weight{n}" for n, weight in enumerate(dict.fromkeys(p.weight for p in program.products()))}


class _Printer:
    """Names the values of a program: `names` holds names that are given."""

    def __init__(self, names: dict[Var, str]):
        self.names = dict(names)
        letters = "abcdfghijklmnopqstuvwxyz"  # e and r are the edge and the row
        self.letters = ("".join(x) for n in itertools.count(1) for x in itertools.product(letters, repeat=n))

    def phase(self, n: int, phase: Phase) -> list[str]:
        """The lines of a phase."""
        barrier = ", after a barrier" if phase.barrier else ""
        return [
            f"phase {n}, over {DOMAIN_NAMES[phase.domain]}{barrier}:",
            *(f"  {self.line(op, phase)}" for op in phase.operations),
        ]

    def line(self, op: Operation, phase: Phase) -> str:
        """One operation."""
        r = "r" if phase.domain == ROW else "e"
        match op:
            case Load(value, source):
                return f"load    {self.typed(value)} = {self.source(source, r)}"
            case Product():
                return f"product {self.typed(op.value)} = {self.product(op, r)}"
            case Equation(eqn):
                outs = ", ".join(self.typed(v) for v in eqn.outvars)
                args = ", ".join([*map(self.name, eqn.invars), *_params(eqn.params)])
                return f"equation {outs} = {eqn.primitive.name}({args})"
            case Spread(value, _, source):
                return f"equation {self.typed(value)} = {source.tensor}[edge_owner[e]]"
            case ReduceChildren(value, _, source, operation):
                rows = self.source(source, "e")
                return f"equation {self.typed(value)} = {operation} of {rows} for edges e of r"
            case ReduceVector(value, _, source, operation):
                return f"equation {self.typed(value)} = {operation} of all elements of {self.source(source, r)}"
            case Store(value, place):
                return f"store   {self.place(place, r)} = {self.name(value)}"

    def product(self, product: Product, r: str) -> str:
        """A product's operands and its weight."""
        operands = [" + ".join(" | ".join(self.source(row, r) for row in source) for source in o) for o in product.operands]
        x = operands[0] if len(operands) == 1 else f"stack({', '.join(operands)})"
        return f"({x}) @ {self.name(product.weight)}{'.T' * product.axis}"

    def source(self, source: Source, r: str) -> str:
        """Where a value is read."""
        match source:
            case ConstantRead(tensor):
                return str(tensor)
            case RowRead(tensor, index, base, part):
                row = _row(r if index is None else f"{index}[{r}]", base)
                return f"{tensor}[{row}{f', block {part}:' if part else ''}]"
            case ParentSum(direct, parts, first):
                at = r if first is None else f"parents of {r}"
                own = [f"{direct[0]}[{direct[1]}[{r}]]"] if direct else []
                return " + ".join([*own, *(f"{tensor}[{index}[{at}]]" for tensor, index in parts)]) or "0"

    def place(self, place: RowAddress, r: str) -> str:
        """Where a value is stored."""
        return f"{place.tensor}[{_row(r, place.base)}{f', element {place.offset}:' if place.offset else ''}]"

    def name(self, x: Atom) -> str:
        """A value's name, or a literal."""
        if isinstance(x, Literal):
            return str(x.val)
        if x not in self.names:
            self.names[x] = next(self.letters)
        return self.names[x]

    def typed(self, v: Var) -> str:
        """A value's name and type."""
        return f"{self.name(v)}:{aval(v).str_short(short_dtypes=True)}"


def _row(row: str, base: int | None) -> str:
    return row if base is None else f"scalars[{base}] + {row}"


def _params(params: Params) -> list[str]:
    """The parameters of an equation that say what it computes."""
    return [f"{name}={_plain(params[name])}" for name in _SHOWN if params.get(name) is not None]


def _plain(x: object) -> object:
    """Integers of NumPy as those of Python, which print shorter."""
    if isinstance(x, tuple):
        return tuple(map(_plain, x))
    return int(x) if isinstance(x, np.integer) else x
