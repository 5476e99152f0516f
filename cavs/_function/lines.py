"""The line of the user's program that an equation, or an error, comes from."""

import linecache
from pathlib import Path
from typing import Any

import jax

_CAVS, _JAX = Path(__file__).parents[1], Path(jax.__file__).parent


def source_line(eqn: Any) -> str | None:
    """The innermost line outside JAX and outside this library's core that made an equation: file, line, function, text."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if _is_users(frame.file_name):
            return _shown(frame.file_name, frame.line_num, frame.function_name)
    return None


def line_of(eqn: Any) -> str:
    """`source_line` as the end of a sentence: " (file, line 3, in fn: text)"; empty if it is unknown."""
    found = source_line(eqn)
    return f" ({found})" if found else ""


def line_of_error(error: BaseException) -> str:
    """The same for the innermost line of the user's program that an exception passed through."""
    found, traceback = None, error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _is_users(code.co_filename):
            found = _shown(code.co_filename, traceback.tb_lineno, code.co_name)
        traceback = traceback.tb_next
    return f" ({found})" if found else ""


def _is_users(file: str) -> bool:
    path = Path(file)
    core = _CAVS in path.parents and "vertex_programs" not in path.parts
    return not core and _JAX not in path.parents and not file.startswith("<frozen")


def _shown(file: str, line: int, function: str) -> str:
    text = linecache.getline(file, line).strip()
    return f"{file}, line {line}, in {function}{': ' + text if text else ''}"
