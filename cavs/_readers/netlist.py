"""Combinational netlists, which are large and deep DAGs: ISCAS `.bench` and Berkeley BLIF."""

import dataclasses
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from cavs._graphs.checks import CycleError
from cavs._graphs.graphs import Graphs, check_graphs
from cavs._readers.source import ASCII_SPACE, Path, bare_suffix, format_error, read_lines, words_in

# The kinds of every `.bench` file, in this order, so that the kinds of all files agree.
_BENCH_KINDS = ("INPUT", "AND", "NAND", "OR", "NOR", "XOR", "XNOR", "NOT", "BUF")
_BENCH_ALIASES = {"BUFF": "BUF", "INV": "NOT"}
_BENCH_STATEFUL = ("DFF", "DFFSR", "DLATCH", "LATCH", "FF")
_BENCH_CONSTANTS = {"VDD": "1", "GND": "0"}
_BENCH_LINE = re.compile(
    r"(?:([^\s(),=]+)\s*=\s*)?([A-Za-z][A-Za-z0-9_]*)(?:\s+(0x[0-9a-f]+))?\s*(?:\(([^()=]*)\))?", re.ASCII | re.IGNORECASE
)
_LARGEST_LUT = 16  # signals
_BENCH_SIGNAL = re.compile(r"[^\s(),=]+", re.ASCII)

_BLIF_KEYS = (".model", ".inputs", ".outputs", ".names", ".end")
_BLIF_STATEFUL = (".latch", ".mlatch", ".subckt", ".gate", ".clock")
# Names, attributes, areas and delays: they do not change the logic, and are skipped.
_BLIF_SKIPPED = re.compile(
    r"\.(attr|param|cname|area|delay|wire|wire_load_slope|and_gate_delay|cycle|clock_event"
    r"|(default_)?(input_arrival|input_drive|max_input_load|output_required|output_load))"
)

_ONLY_COMBINATIONAL = "a gate: only flat, combinational netlists can be read (no latches, flip-flops or subcircuits)"


@dataclasses.dataclass
class _Netlist:
    """The contents of one file. The vertices are its inputs and gates, in the order of their definitions."""

    path: Path
    names: dict[str, int] = dataclasses.field(default_factory=dict)  # signal -> vertex
    kinds: list[str] = dataclasses.field(default_factory=list)
    fan_in: list[list[str]] = dataclasses.field(default_factory=list)
    lines: list[int] = dataclasses.field(default_factory=list)
    outputs: list[tuple[int, str]] = dataclasses.field(default_factory=list)  # line, signal

    def define(self, line: int, signal: str, kind: str, fan_in: list[str]) -> None:
        if signal in self.names:
            first = self.lines[self.names[signal]]
            raise format_error(self.path, line, signal, f"each signal to be defined once; line {first} also defines it")
        self.names[signal] = len(self.kinds)
        self.kinds.append(kind)
        self.fan_in.append(fan_in)
        self.lines.append(line)

    def vertex(self, line: int, signal: str) -> int:
        if signal not in self.names:
            raise format_error(self.path, line, signal, "a signal that is an input or the output of a gate")
        return self.names[signal]


def read_netlist(path: Path | Sequence[Path]) -> Graphs:
    """Reads combinational netlists: one graph per file.

    The vertices are the inputs and the gates, in the order in which the file defines them. The children of a gate are its
    fan-in, in the order written, whether the file defines them before or after the gate. `label` is 1 at the outputs of
    the netlist and 0 elsewhere.

    - `.bench`: lines `INPUT(a)`, `OUTPUT(y)`, `y = NAND(a, b)`, and comments after `#`. `kind_names` always begin with INPUT,
      AND, NAND, OR, NOR, XOR, XNOR, NOT, BUF. The file may write them in upper or lower case, and BUFF for BUF or INV for NOT.
      As ABC writes them, `y = vdd` and `y = gnd` are constants, and `y = LUT 0x8 (a, b)` is a gate whose truth table has bit
      a + 2 b. Their kinds are covers, as in `.blif`.
    - `.blif`: one `.model` with `.inputs`, `.outputs` and gates `.names a b y`, each followed by the rows of its cover, such
      as `11 1`. A `\\` at the end of a line continues it, and `#` begins a comment. The kind of a gate is its cover,
      "names:" and the sorted rows joined by "|", such as "names:11 1"; "names:0" and "names:1" are the constants.
      `kind_names` are INPUT and the covers of all files, in the order of first appearance. Read files in one call if their
      graphs must have the same kinds.

    Args:
        path: a path or a sequence of paths, which end in `.bench` or `.blif`, optionally followed by `.gz`.

    Returns:
        The graphs.

    Raises:
        FormatError: a line is invalid, a signal is undefined or defined twice, a gate has a wrong fan-in, there is a latch, a
            flip-flop, a subcircuit or a cycle. The message names the line.
        ValueError: a path has another suffix.
    """
    source: Any = path
    several = isinstance(path, Iterable) and not isinstance(path, str) and not hasattr(path, "read")
    paths: list[Path] = list(source) if several else [source]
    netlists = list(map(_read, paths))
    any_bench = any(bare_suffix(file) == ".bench" for file in paths)
    kind_index = {kind: i for i, kind in enumerate(_BENCH_KINDS if any_bench else _BENCH_KINDS[:1])}
    kinds = [kind_index.setdefault(kind, len(kind_index)) for netlist in netlists for kind in netlist.kinds]
    num_children = [len(fan_in) for netlist in netlists for fan_in in netlist.fan_in]
    children: list[int] = []
    labels: list[np.ndarray] = []
    for netlist in netlists:
        for line, fan_in in zip(netlist.lines, netlist.fan_in, strict=True):
            children.extend([netlist.vertex(line, signal) for signal in fan_in])
        labels.append(np.zeros(len(netlist.kinds), np.int32))
        labels[-1][[netlist.vertex(line, signal) for line, signal in netlist.outputs]] = 1

    sizes, label = list(map(len, labels)), np.concatenate([np.zeros(0, np.int32), *labels])
    try:
        return Graphs.build(sizes, num_children, children, kind=kinds, kind_names=kind_index, label=label)
    except CycleError as error:
        netlist = netlists[error.graph]
        line, signal = netlist.lines[error.vertex], list(netlist.names)[error.vertex]
        raise format_error(netlist.path, line, signal, "a signal that does not depend on itself (a cycle)") from None


def read_signals(path: Path) -> list[str]:
    """Reads the names of the signals of a netlist, in the order of the vertices of [`cavs.io.read_netlist`][].

    Args:
        path: a file that ends in `.bench` or `.blif`, optionally followed by `.gz`.

    Raises:
        FormatError: a line is invalid.
        ValueError: the path has another suffix.
    """
    return [*_read(path, "read_signals").names]


def _read(path: Path, function: str = "read_netlist") -> _Netlist:
    suffix = bare_suffix(path)
    if suffix not in (".bench", ".blif"):
        got = f"{os.fspath(path)!r}, which ends in {suffix!r}"
        raise ValueError(f"{function}: path: got {got}; expected .bench or .blif, or one of these with .gz.")
    netlist = _read_bench(path) if suffix == ".bench" else _read_blif(path)
    if not netlist.kinds:
        raise format_error(path, None, "no input and no gate", "at least one")
    return netlist


def _read_bench(path: Path) -> _Netlist:
    netlist = _Netlist(path)
    for number, line in enumerate(read_lines(path), start=1):
        text = line.partition("#")[0].strip(ASCII_SPACE)
        if not text:
            continue
        match = _BENCH_LINE.fullmatch(text)
        if match is None or match[4] is None and (match[2].upper() not in _BENCH_CONSTANTS or not match[1] or match[3]):
            raise format_error(
                path, number, text, "INPUT(a), OUTPUT(y), y = GATE(a, b), y = LUT 0x8 (a, b), y = vdd or y = gnd"
            )
        target, word, table, inner = match.groups()
        kind = _BENCH_ALIASES.get(word.upper(), word.upper())
        signals = [signal.strip(ASCII_SPACE) for signal in (inner or "").split(",")]
        if inner is None:
            _define_gate(netlist, number, [target], [_BENCH_CONSTANTS[kind]])
        elif not all(map(_BENCH_SIGNAL.fullmatch, signals)):
            raise format_error(path, number, text, "signal names in brackets, separated by commas")
        elif table is not None:
            _define_gate(netlist, number, [*signals, target], _cover_of_table(path, number, match, len(signals)))
        elif kind in _BENCH_STATEFUL:
            raise format_error(path, number, text, _ONLY_COMBINATIONAL)
        elif target is None and (kind not in ("INPUT", "OUTPUT") or len(signals) != 1):
            raise format_error(path, number, text, "INPUT(a), OUTPUT(y) or y = GATE(a, b)")
        elif target is None and kind == "INPUT":
            netlist.define(number, signals[0], kind, [])
        elif target is None:
            netlist.outputs.append((number, signals[0]))
        elif kind not in _BENCH_KINDS[1:]:
            raise format_error(path, number, text, f"one of the gates {', '.join(_BENCH_KINDS[1:])}")
        elif kind in ("NOT", "BUF") and len(signals) != 1:
            raise format_error(path, number, text, f"one signal in the brackets of {kind}")
        else:
            netlist.define(number, target, kind, signals)
    return netlist


def _cover_of_table(path: Path, number: int, line: re.Match[str], fan_in: int) -> list[str]:
    """Returns the rows of the cover of a LUT, one for each bit of its truth table that is 1."""
    bits = f"{int(line[3], 16):b}"[::-1]
    if not line[1] or line[2].upper() != "LUT" or fan_in > _LARGEST_LUT or len(bits) > 1 << fan_in:
        expected = f"y = LUT 0x8 (a, b), with at most {_LARGEST_LUT} signals and a truth table of 2**n bits for n signals"
        raise format_error(path, number, line[0], expected)
    return [f"{i:0{fan_in}b}"[::-1] + " 1" for i, bit in enumerate(bits) if bit == "1"]


def _read_blif(path: Path) -> _Netlist:
    netlist = _Netlist(path)
    gate: tuple[int, list[str], list[str]] | None = None  # line, signals, rows of the cover
    seen: set[str] = set()
    for number, text in _blif_lines(path):
        words = words_in(text)
        key = words[0]
        if ".end" in seen:
            raise format_error(path, number, text, "nothing after .end, as a file has one model")
        if _BLIF_SKIPPED.fullmatch(key):
            continue
        if not key.startswith("."):
            if gate is None:
                raise format_error(path, number, text, ".names before the rows of its cover")
            gate[2].append(_cover_row(path, number, text, words, len(gate[1]) - 1))
            continue
        if gate is not None:
            _define_gate(netlist, *gate)
            gate = None
        if key in _BLIF_STATEFUL:
            raise format_error(path, number, text, _ONLY_COMBINATIONAL)
        if key not in _BLIF_KEYS:
            raise format_error(path, number, text, f"one of {', '.join(_BLIF_KEYS)}")
        if key == ".model" and key in seen:
            raise format_error(path, number, text, "one .model per file")
        if key == ".names" and len(words) < 2:
            raise format_error(path, number, text, "the gate's output after .names")
        seen.add(key)
        if key == ".inputs":
            for signal in words[1:]:
                netlist.define(number, signal, "INPUT", [])
        elif key == ".outputs":
            netlist.outputs.extend((number, signal) for signal in words[1:])
        elif key == ".names":
            gate = (number, words[1:], [])
    if gate is not None:
        _define_gate(netlist, *gate)
    return netlist


def _blif_lines(path: Path) -> list[tuple[int, str]]:
    """The number and text of each line. Joins continued lines, removes comments and skips blank lines."""
    out: list[tuple[int, str]] = []
    parts: list[str] = []
    first = 1
    for number, line in enumerate(read_lines(path), start=1):
        text = line.partition("#")[0].rstrip(ASCII_SPACE)
        if not parts:
            first = number
        if text.endswith("\\"):
            parts.append(text[:-1])
            continue
        text = " ".join([*parts, text]).strip(ASCII_SPACE)
        parts = []
        if text:
            out.append((first, text))
    if parts:
        raise format_error(path, first, parts[0], "a line after the \\ that continues this one")
    return out


def _cover_row(path: Path, number: int, text: str, words: list[str], fan_in: int) -> str:
    good = len(words) == (2 if fan_in else 1) and words[-1] in ("0", "1")
    if not good or fan_in and (len(words[0]) != fan_in or words[0].strip("01-")):
        expected = f"{fan_in} of 0, 1 and -, then 0 or 1" if fan_in else "only 0 or 1, as this gate has no fan-in"
        raise format_error(path, number, text, f"a row of the cover: {expected}")
    return " ".join(words)


def _define_gate(netlist: _Netlist, line: int, signals: list[str], cover: list[str]) -> None:
    fan_in = signals[:-1]
    if len({row[-1] for row in cover}) > 1:
        raise format_error(netlist.path, line, " ".join(cover), f"all rows of {signals[-1]} to end in 1, or all to end in 0")
    # A gate without rows is never 1.
    rows = sorted(set(cover)) or [f"{'-' * len(fan_in)} 0".strip()]
    netlist.define(line, signals[-1], "names:" + "|".join(rows), fan_in)


# --- simulation: how often each gate is 1 for random inputs ---

WORDS = 64  # 64 x 64 = 4,096 random inputs, simulated bit by bit in parallel
_ONES = np.uint64(0xFFFFFFFFFFFFFFFF)
_REDUCE = {"AND": np.bitwise_and, "OR": np.bitwise_or, "XOR": np.bitwise_xor}
_INVERTED = {"NAND": "AND", "NOR": "OR", "XNOR": "XOR", "NOT": "OR"}
_GATES = {"INPUT", "BUF", *_REDUCE, *_INVERTED}
MSG_KINDS = "simulate_netlist: netlists: got graphs {}; expected inputs and gates. Write cavs.io.read_netlist(path)."


def simulate_netlist(netlists: Graphs, seed: int = 0) -> np.ndarray:
    """Simulates netlists for 4,096 random inputs, each bit of which is 1 in half of the cases.

    Args:
        netlists: what [`cavs.io.read_netlist`][] returned.
        seed: the seed of the inputs.

    Returns:
        (V,) float64, the share of inputs for which each vertex is 1.

    Raises:
        TypeError: `netlists` are no graphs.
        ValueError: the graphs have no kinds, or a kind that is no gate.
    """
    check_graphs(netlists, "simulate_netlist(netlists)")
    if netlists.kind is None or netlists.kind_names is None:
        raise ValueError(MSG_KINDS.format("without named kinds"))
    if unknown := [name for name in netlists.kind_names if name not in _GATES and not name.startswith("names:")]:
        raise ValueError(MSG_KINDS.format(f"of kind {unknown[0]!r}"))
    values = np.zeros((netlists.num_vertices, WORDS), np.uint64)
    fan_in, child = np.diff(netlists.child_offsets), netlists._edges[1]
    rng = np.random.default_rng(seed)
    # Gates of one level, kind and fan-in are simulated together.
    keys = np.stack([netlists.height, netlists.kind, fan_in])
    order = np.lexsort(keys[::-1])
    starts = np.flatnonzero(np.append(True, (np.diff(keys[:, order]) != 0).any(0)))
    for rows in np.split(order, starts[1:]):
        name, count = netlists.kind_names[netlists.kind[rows[0]]], int(fan_in[rows[0]])
        if name == "INPUT":
            values[rows] = rng.integers(0, _ONES, (len(rows), WORDS), np.uint64, True)
        else:
            edges = netlists.child_offsets[rows][:, None] + np.arange(count)
            values[rows] = _gate(name, values[child[edges]].reshape(len(rows), count, WORDS))
    return np.unpackbits(values.view(np.uint8), axis=1).mean(1)


def _gate(name: str, inputs: np.ndarray) -> np.ndarray:
    """(N, WORDS) the outputs of N gates of a kind. `inputs` is (N, fan-in, WORDS)."""
    if name.startswith("names:"):
        return _cover(name.removeprefix("names:"), inputs)
    if name in _INVERTED:
        return ~_gate(_INVERTED[name], inputs)
    return _REDUCE.get(name, np.bitwise_or).reduce(inputs, 1)  # a buffer is an OR of one input


def _cover(cover: str, inputs: np.ndarray) -> np.ndarray:
    """A gate of a BLIF file: the OR of its rows, each an AND of inputs (1), inverted inputs (0) and ignored ones (-)."""
    out = np.zeros((len(inputs), inputs.shape[2]), np.uint64)
    rows = [row.split() for row in cover.split("|")]
    for *literals, _ in rows:
        term = np.full_like(out, _ONES)
        for i, literal in enumerate(literals[0] if literals else ""):
            term &= _ONES if literal == "-" else inputs[:, i] if literal == "1" else ~inputs[:, i]
        out |= term
    return out if rows[0][-1] == "1" else ~out  # rows that end in 0 say when the output is 0
