"""The elementwise operations of the library of engine `native`, read from the table that the library is compiled from."""

import re
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("operations.def")
_LINE = re.compile(r"OPERATION\((?P<name>\w+), (?P<operands>\d), (?P<types>[FIB]+), .+\)")


class NativeOperation(NamedTuple):
    """An operation.

    Attributes:
        code: Its number in the library.
        operands: How many operands it has.
        types: The types that operands may have: "f" for float32, "i" for int32, "b" for bool.
    """

    code: int
    operands: int
    types: frozenset[str]


def _read(text: str) -> dict[str, NativeOperation]:
    lines = [line for line in text.splitlines() if line and line[:2] != "//"]
    operations: dict[str, NativeOperation] = {}
    for code, line in enumerate(lines):
        match = _LINE.fullmatch(line)
        assert match, f"{TABLE.name}: expected OPERATION(NAME, operands, types, value), got {line!r}"
        operations[match["name"].lower()] = NativeOperation(code, int(match["operands"]), frozenset(match["types"].lower()))
    assert len(operations) == len(lines), f"{TABLE.name}: an operation has two lines"
    return operations


NATIVE_OPERATIONS = _read(TABLE.read_text())
