"""The line of the user's program that an equation, or an error, comes from."""

import linecache
from pathlib import Path
from traceback import walk_tb

import jax

from cavs._jaxpr.jaxprs import Eqn

_CAVS, _JAX = Path(__file__).parents[1], Path(jax.__file__).parent


def source_line(eqn: Eqn) -> str | None:
    """Returns the innermost line, outside JAX and this library's core, that created an equation: file, line, function, text."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if _is_users(frame.file_name):
            return _shown(frame.file_name, frame.line_num, frame.function_name)
    return None


def line_of(eqn: Eqn) -> str:
    """Returns `source_line` as the end of a sentence: " (file, line 3, in fn: text)"; empty if it is unknown."""
    line = source_line(eqn)
    return f" ({line})" if line else ""


def line_of_error(error: BaseException) -> str:
    """Returns the innermost line of the user's program that an exception passed through, like `line_of`."""
    innermost = None
    for frame, line in walk_tb(error.__traceback__):
        if _is_users(frame.f_code.co_filename):
            innermost = _shown(frame.f_code.co_filename, line, frame.f_code.co_name)
    return f" ({innermost})" if innermost else ""


def raised_by_jax(error: BaseException) -> bool:
    """Returns whether JAX, or Python itself, raised an exception on a line of the user's program, which has no `raise`."""
    *_, (frame, line) = walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    if not _is_users(file):
        return _JAX in Path(file).parents  # JAX hides its frames, except under JAX_TRACEBACK_FILTERING=off
    return not linecache.getline(file, line).strip().startswith(("raise", "assert"))


def _is_users(file: str) -> bool:
    path = Path(file)
    core = _CAVS in path.parents and "vertex_programs" not in path.parts
    return not core and _JAX not in path.parents and not file.startswith("<frozen")


def _shown(file: str, line: int, function: str) -> str:
    text = linecache.getline(file, line).strip()
    return f"{file}, line {line}, in {function}{': ' + text if text else ''}"
