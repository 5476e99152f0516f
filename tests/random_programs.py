"""A random vertex function as data: statements over typed variables, printed as the source of F."""

import copy
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

Shape = tuple[int, ...]
# Dtypes other than F's floats, int32 and bool: bounds, and the rounding of a cast.
STORED = {
    "float32": (-1.0, 1.0, 1e-7),
    "float16": (-1.0, 1.0, 1e-3),
    "bfloat16": (-1.0, 1.0, 1e-2),
    "uint8": (0, 7, 0.0),
    "int8": (0, 7, 0.0),
    "uint32": (0, 7, 0.0),
}


@dataclasses.dataclass(frozen=True)
class Var:
    """A variable of F. `kind` is "f", "i", "b" (float, int32, bool), "k" (a random key), "t" (a tuple or dict), or
    one of `STORED`.

    Real vertices' values lie between `lo` and `hi`, so that `1 / x` may be written where `lo` is above zero. (After a
    product the bounds are those of typical values.)
    """

    name: str
    shape: Shape
    kind: str
    lo: float = -1.0
    hi: float = 1.0
    gathered: bool = False  # depends on a child

    @property
    def size(self) -> int:
        out = 1
        for n in self.shape:
            out *= n
        return out


@dataclasses.dataclass
class Stmt:
    """`var = template`, in which {0}, {1} are variables and {f0}, {f1} functions with bodies of their own."""

    var: Var
    template: str
    args: list[str]
    blocks: list["Block"] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Block:
    """The body of F or of a function within: statements, and what it returns."""

    params: list[str]
    stmts: list[Stmt]
    results: list[str]
    template: str = "{0}"  # of what it returns


@dataclasses.dataclass
class Program:
    """Everything about F; `bodies` has the pushes as results, after the scattered leaves."""

    bodies: dict[str | None, Block]
    states: dict[str, tuple[Shape, str]]  # shape, and a kind or the name of a dtype
    arity: int
    params: dict[str, tuple[Shape, float, float]]  # shape, and between which numbers
    inputs: dict[str, tuple[Shape, str, float, float]]
    pushes: list[str]  # templates: one unnamed value each, as "{0}" or '{{"a": {0}, "b": ({1},)}}'
    bare_state: bool = False
    bare_input: bool = False
    edges: dict[str, tuple[Shape, str, float, float]] = dataclasses.field(default_factory=dict)
    coarse: float = 0.0  # the rounding of casts to less than F's own floats

    def copy(self) -> "Program":
        return copy.deepcopy(self)


def cast_from(kind: str) -> tuple[str, str]:
    """Returns the suffix of an expression that casts a stored dtype to one that F computes with, and the kind it then has."""
    if kind not in STORED:
        return "", kind
    return (".astype(D)", "f") if "float" in kind else (".astype(jnp.int32)", "i")


def references(block: Block) -> Iterator[str]:
    """The names that a block and the functions in it read."""
    yield from block.results
    for stmt in block.stmts:
        yield from stmt.args
        for inner in stmt.blocks:
            yield from references(inner)


def without_unread(program: Program) -> Program:
    """Returns the program without unread statements, parameters and inputs."""
    program = program.copy()

    def clean(block: Block, read: set[str]) -> bool:
        keep = []
        for stmt in reversed(block.stmts):
            if stmt.var.name in read:
                keep.append(stmt)
                read |= set(stmt.args) | {name for inner in stmt.blocks for name in references(inner)}
        changed = len(keep) < len(block.stmts)
        block.stmts = keep[::-1]
        for stmt in block.stmts:
            for inner in stmt.blocks:
                changed |= clean(inner, set(inner.results))
        return changed

    for body in program.bodies.values():
        while clean(body, set(body.results)):
            pass
    text = source(program)
    program.params = {name: spec for name, spec in program.params.items() if f'p["{name}"]' in text}
    if "edges=True" not in text:
        program.edges = {}
    if not program.bare_input:
        program.inputs = {name: spec for name, spec in program.inputs.items() if f'v.pull("{name}")' in text}
    return program


def source(program: Program, *kinds: str | None) -> str:
    """Returns the source of F; with kinds that of one function each, F_kind. `kinds`: those to print, if not all."""
    return "\n\n\n".join(_function(program, kind, program.bodies[kind]) for kind in kinds or program.bodies)


def function_name(kind: str | None) -> str:
    return "F" if kind is None else f"F_{kind}"


def _function(program: Program, kind: str | None, body: Block) -> str:
    lines = [f"def {function_name(kind)}(p, v):", *_lines(body, "    ")]
    leaves = body.results[: len(program.states)]
    pairs = ", ".join(f'"{name}": {x}' for name, x in zip(program.states, leaves, strict=True))
    lines.append(f"    v.scatter({leaves[0] if program.bare_state else '{' + pairs + '}'})")
    rest = body.results[len(program.states) :]
    for i, template in enumerate(program.pushes):
        count = len(set(re.findall(r"\{\d+\}", template)))
        value, rest = template.format(*rest[:count]), rest[count:]
        lines.append(f"    v.push({value})" if len(program.pushes) == 1 else f'    v.push({value}, "{"abcdef"[i]}")')
    return "\n".join(lines)


def _lines(block: Block, indent: str) -> Iterator[str]:
    for stmt in block.stmts:
        names: dict[str, str] = {}
        for i, inner in enumerate(stmt.blocks):
            names[f"f{i}"] = f"{stmt.var.name}_f{i}"
            yield f"{indent}def {names[f'f{i}']}({', '.join(inner.params)}):"
            yield from _lines(inner, indent + "    ")
            yield f"{indent}    return {inner.template.format(*inner.results)}"
        yield f"{indent}{stmt.var.name} = {stmt.template.format(*stmt.args, **names)}"


def renamed(block: Block, old: str, new: str) -> None:
    """Every read of `old` becomes one of `new`, in place."""
    block.results = [new if name == old else name for name in block.results]
    for stmt in block.stmts:
        stmt.args = [new if name == old else name for name in stmt.args]
        for inner in stmt.blocks:
            renamed(inner, old, new)


def blocks_of(program: Program) -> Iterator[Block]:
    """Yields all bodies, outer ones first."""
    todo: list[Any] = list(program.bodies.values())
    while todo:
        block = todo.pop(0)
        yield block
        todo += [inner for stmt in block.stmts for inner in stmt.blocks]
