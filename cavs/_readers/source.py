"""Opening what a reader reads (plain or `.gz`, strict UTF-8), and saying where it is wrong."""

import gzip
import io
import os
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cavs._graphs.graphs import Graphs
from cavs._readers.files import write_whole

Path = str | os.PathLike[str]

# A file in .gz may decompress to so many times its size, and small ones to so many bytes: real texts shrink to a third or a
# tenth, and a few megabytes of zeros, a thousand times as long, must not take all memory.
RATIO = 100
ROOM = 1 << 28

# What separates tokens. `str.split()` and `\s` would also split at U+00A0 and its kin, which words may hold.
ASCII_SPACE = " \t\n\r\v\f"


# Tabs and ends of lines would make other cells of a table's, control characters move a terminal's cursor, others turn its
# text round, and halves of surrogate pairs are no UTF-8.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A label or word of anybody's file for a terminal or a table: control characters as Python writes them, `\\x1b`."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class FormatError(ValueError):
    """A file is not what its reader reads: the message has the file, the line, what was read and what was expected."""


def format_error(path: Path, line: int | None, got: Any, wanted: str) -> FormatError:
    """The error to raise; `got` (text, bytes or an exception) is shortened. `line` is `None` where a file has no lines."""
    if isinstance(got, Exception):
        got = str(got).rstrip(".")  # zipfile's may quote half the file
        got = got if len(got) <= 200 else got[:197] + "..."
        return FormatError(f"{os.fspath(path)}: read a file with an error ({got}), expected {wanted}.")
    if isinstance(got, bytes):
        # Cut before decoding: an error must not cost a copy of a large file.
        got = got[:300].decode("utf-8", "backslashreplace")
    if isinstance(got, str):
        got = repr(got if len(got) <= 60 else got[:57] + "...")
    where = os.fspath(path) if line is None else f"{os.fspath(path)}, line {line}"
    return FormatError(f"{where}: read {got}, expected {wanted}.")


def bare_suffix(path: Path) -> str:
    """The suffix in lower case, `.gz` looked through: `.txt` of `train.TXT.gz`."""
    name = os.path.basename(os.fspath(path)).lower()
    return os.path.splitext(name[:-3] if name.endswith(".gz") else name)[1]


def read_bytes(path: Path) -> bytes:
    """All bytes of a file, decompressed where its name ends in `.gz`, within limits."""
    with open(path, "rb") as file:
        data = file.read()
    if not os.fspath(path).lower().endswith(".gz"):
        return data
    most = max(ROOM, RATIO * len(data))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            out = file.read(most + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise format_error(path, None, error, "a whole gzip file, as the name ends in .gz") from error
    if len(out) > most:
        wanted = f"at most {most} bytes when decompressed, {RATIO} times its size; if you trust it, decompress it yourself"
        raise format_error(path, None, f"{len(data)} bytes of gzip that decompress to more", wanted)
    return out


def read_utf8(path: Path) -> bytes:
    """All bytes of a file, known to be UTF-8, without a byte order mark."""
    data = read_bytes(path).removeprefix(b"\xef\xbb\xbf")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        got = data[error.start : error.start + 8]
        raise format_error(path, line_at(data, error.start), got, f"UTF-8 text ({error.reason})") from error
    return data


def read_lines(path: Path) -> list[str]:
    """The lines of a text file, without `\\n` or `\\r\\n`. Only these end a line (`str.splitlines` knows eight more)."""
    return [line.removesuffix("\r") for line in read_utf8(path).decode("utf-8").split("\n")]


def line_at(data: bytes, position: int) -> int:
    """The number, from 1, of the line that holds a byte."""
    return data.count(b"\n", 0, position) + 1


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all (`write_whole`), compressed where its name ends in `.gz`."""
    if os.fspath(path).lower().endswith(".gz"):
        data = gzip.compress(data, mtime=0)
    write_whole(path, data)


def build_acyclic(
    num_vertices: Sequence[int] | np.ndarray,
    num_children: Sequence[int] | np.ndarray,
    children: Sequence[int] | np.ndarray,
    cycle_error: Callable[[int, int], FormatError],
    **fields: Any,
) -> Graphs:
    """`Graphs.build` of arrays that a reader has checked but for cycles.

    For a cycle it raises `cycle_error(graph, vertex)`, of the first graph with one and a vertex that lies on it.
    """
    try:
        return Graphs.build(num_vertices, num_children, children, **fields)
    except ValueError:
        place = _first_cycle(np.asarray(num_vertices), np.asarray(num_children), np.asarray(children))
        if place is None:
            raise
    raise cycle_error(*place)


def _first_cycle(num_vertices: np.ndarray, num_children: np.ndarray, children: np.ndarray) -> tuple[int, int] | None:
    # Plain loops: this runs once, for a file that is refused.
    ends = np.cumsum(num_children)
    row = 0
    for graph, n in enumerate(num_vertices.tolist()):
        rows = range(row, row + n)
        kids = [children[ends[r] - num_children[r] : ends[r]].tolist() for r in rows]
        row += n
        waiting = [len(k) for k in kids]
        parents: list[list[int]] = [[] for _ in rows]
        for vertex, own in enumerate(kids):
            for child in own:
                parents[child].append(vertex)
        ready = [vertex for vertex in range(n) if not waiting[vertex]]
        while ready:
            for parent in parents[ready.pop()]:
                waiting[parent] -= 1
                if not waiting[parent]:
                    ready.append(parent)
        # What still waits has a child that still waits: going down must come back to where it has been.
        vertex = next((v for v in range(n) if waiting[v]), None)
        if vertex is not None:
            seen: set[int] = set()
            while vertex not in seen:
                seen.add(vertex)
                vertex = next(child for child in kids[vertex] if waiting[child])
            return graph, vertex
    return None
