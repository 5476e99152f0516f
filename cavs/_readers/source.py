"""What all readers share: reading files (plain or `.gz`, strict UTF-8), and errors that name the line."""

import contextlib
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, cast

from cavs._graphs.files import check_path, open_regular, write_whole

Path = str | os.PathLike[str]

# A `.gz` file may decompress to RATIO times its size, or to ALLOWANCE bytes if that is more. Texts compress to a third or
# a tenth; a few megabytes of compressed zeros, which are a thousand times as long, must not exhaust the memory.
RATIO = 100
ALLOWANCE = 1 << 28

# Separates tokens. `str.split()` and `\s` would also split at U+00A0 and similar characters, which words may contain.
ASCII_SPACE = " \t\n\r\v\f"


# Tabs and line ends would break a table, control characters move a terminal's cursor, others reverse the direction of its
# text, and lone surrogates cannot be encoded as UTF-8.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Escapes control characters in a label or word from a file, as `\\x1b`, to print it on a terminal or in a table."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class FormatError(ValueError):
    """A file is not in the format of its reader. The message names the file, the line, what was read, and what was expected."""


def format_error(path: Path, line: int | None, got: str | bytes | Exception, expected: str) -> FormatError:
    """Returns the error to raise. Shortens `got`. `line` is `None` if the format has no lines."""
    if isinstance(got, Exception):
        text = str(got).rstrip(".")  # zipfile may quote half the file
        text = text if len(text) <= 200 else text[:197] + "..."
        return FormatError(f"{os.fspath(path)}: got a file with an error ({text}); expected {expected}.")
    if isinstance(got, bytes):
        # Cut before decoding, which would copy a large file.
        got = got[:300].decode("utf-8", "backslashreplace")
    text = repr(got if len(got) <= 60 else got[:57] + "...")
    place = os.fspath(path) if line is None else f"{os.fspath(path)}, line {line}"
    return FormatError(f"{place}: got {text}; expected {expected}.")


def bare_suffix(path: Path) -> str:
    """The suffix in lower case, without `.gz`: `.txt` for `train.TXT.gz`."""
    check_path("read", path)
    name = os.path.basename(os.fspath(path)).lower()
    return os.path.splitext(name[:-3] if name.endswith(".gz") else name)[1]


def open_file(path: Path) -> IO[bytes]:
    """Opens a file for reading. Raises `OSError` if it cannot be read, or is a pipe or a device, which might never end."""
    check_path("read", path)
    return open_regular(path, f"; expected one. Write: cat {os.fspath(path)} > FILE, and read that file")


def is_compressed(path: Path) -> bool:
    """Whether the name of a file ends in `.gz`."""
    return os.fspath(path).lower().endswith(".gz")


@contextlib.contextmanager
def decompressed(path: Path, file: IO[bytes]) -> Iterator[IO[bytes]]:
    """A context manager that yields the decompressed file. Raises `FormatError` if it is not valid gzip."""
    try:
        with gzip.GzipFile(fileobj=file) as out:
            yield cast(IO[bytes], out)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise format_error(path, None, error, "a whole gzip file, as the name ends in .gz") from error


def read_bytes(path: Path) -> bytes:
    """Reads all bytes of a file, and decompresses them if its name ends in `.gz`.

    Raises:
        FormatError: the file is not valid gzip, or decompresses to more than `RATIO` times its size.
        OSError: as `open_file`.
    """
    with open_file(path) as file:
        data = file.read()
    if not is_compressed(path):
        return data
    most = max(ALLOWANCE, RATIO * len(data))
    with decompressed(path, io.BytesIO(data)) as file:
        out = file.read(most + 1)
    if len(out) > most:
        expected = f"at most {most} bytes when decompressed, {RATIO} times its size; if you trust it, decompress it yourself"
        raise format_error(path, None, f"{len(data)} bytes of gzip that decompress to more", expected)
    return out


def read_utf8(path: Path) -> bytes:
    """Reads a file, checks that it is UTF-8, and returns its bytes without a byte order mark."""
    data = read_bytes(path).removeprefix(b"\xef\xbb\xbf")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or data[:4].count(0) == 2:
        name = os.fspath(path)
        raise FormatError(f"{name}: got UTF-16 text; expected UTF-8. Write: iconv -f UTF-16 -t UTF-8 {name} > utf8.txt")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        got = data[error.start : error.start + 8]
        raise format_error(path, line_at(data, error.start), got, f"UTF-8 text ({error.reason})") from error
    return data


def utf8_of_lines(lines: Iterable[str]) -> tuple[str, bytes]:
    """Joins an open text file or other lines, with or without `\\n`. Returns their name in error messages, and UTF-8.

    Raises:
        TypeError: `lines` is not an iterable of strings.
        FormatError: a line cannot be encoded as UTF-8.
    """
    file_name = getattr(lines, "name", None)
    name, parts = file_name if isinstance(file_name, str) else "lines", []
    expected = "expected a path, a file opened as text, or lines of type str"
    if not isinstance(lines, Iterable):
        raise TypeError(f"read_trees: source: got {type(lines).__name__}; {expected}.")
    for line in lines:
        if not isinstance(line, str):
            raise TypeError(f"read_trees: source: got a line of type {type(line).__name__}; {expected}. Write open(path).")
        parts.append(line.removesuffix("\n"))
    try:
        return name, "\n".join(parts).removeprefix("\ufeff").encode("utf-8")
    except UnicodeEncodeError as error:
        number = error.object.count("\n", 0, error.start) + 1
        got = error.object[error.start : error.start + 8]
        raise format_error(name, number, got, f"text that UTF-8 can encode ({error.reason})") from error


def read_lines(path: Path) -> list[str]:
    """Reads the lines of a text file.

    Lines end with `\\n` or `\\r\\n` only (`str.splitlines` splits at eight more), or with `\\r` in a file without `\\n`.
    """
    text = read_utf8(path).decode("utf-8")
    return [line.removesuffix("\r") for line in text.split("\n" if "\n" in text else "\r")]


def words_in(line: str) -> list[str]:
    """The words of a line. They are separated by `ASCII_SPACE` only, of which `bytes.split` knows."""
    return [word.decode("utf-8", "surrogatepass") for word in line.encode("utf-8", "surrogatepass").split()]


def line_at(data: bytes, position: int) -> int:
    """The number, from 1, of the line that contains the byte at `position`."""
    return data.count(b"\n", 0, position) + 1


def write_bytes(path: Path, data: bytes) -> None:
    """Writes a file by `write_whole`, compressed if its name ends in `.gz`."""
    if is_compressed(path):
        data = gzip.compress(data, mtime=0)
    write_whole(path, data)
