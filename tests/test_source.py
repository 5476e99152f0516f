"""Limits of the source that keep it readable. Files are parsed, nothing is imported."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES_OF_A_FUNCTION = 60  # without its docstring
MOST_ANY = 0.1  # the part of annotations that may be `Any`, which says nothing
FOLDERS = ("cavs", "kernels")


def files(folder: str) -> Iterator[Path]:
    """The files of a folder, by their real paths: the links inside cavs/ are not followed."""
    yield from (path for path in sorted((ROOT / folder).rglob("*.py")) if path == path.resolve())


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file."""
    return [*ast.walk(ast.parse(path.read_text()))]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions and methods of a file, those inside functions, too."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of lines of a function, without decorators and docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= (function.body[0].end_lineno or 0) - function.body[0].lineno + 1
    return lines


def annotations(path: Path) -> Iterator[ast.expr]:
    """The annotations of parameters, results, and variables."""
    for node in nodes(path):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_are_short(folder: str) -> None:
    lengths = {f"{path.relative_to(ROOT)}: {f.name}": lines_of(f) for path in files(folder) for f in functions(path)}
    assert lengths and not {name: n for name, n in lengths.items() if n > MOST_LINES_OF_A_FUNCTION}


def test_few_annotations_are_any() -> None:
    found = [a for folder in FOLDERS for path in files(folder) for a in annotations(path)]
    bare = [a for a in found if isinstance(a, ast.Name) and a.id == "Any"]
    assert len(bare) <= MOST_ANY * len(found)


def test_names_are_compared_whole() -> None:
    """A prefix decides nothing about a program: "reduce_precision" is no reduction. Lines and files of source are text."""
    rooms = ("cavs/_function", "cavs/_stages", "cavs/_engines", "cavs/_run", "cavs/_memory", "kernels")
    paths = [path for room in rooms for path in files(room) if path.name != "lines.py"]
    calls = [(path, node) for path in paths for node in nodes(path) if isinstance(node, ast.Call)]
    names = [(str(path), call.func.attr) for path, call in calls if isinstance(call.func, ast.Attribute)]
    assert names and not [name for name in names if name[1] in ("startswith", "endswith", "removeprefix", "removesuffix")]


def test_one_file_asks_jax_for_the_device() -> None:
    """`Target` is decided once and passed on. A recipe has only public names, and prints what JAX sees."""
    facts, found = {"default_backend", "compute_capability", "core_count"}, set()
    for path in (p for folder in FOLDERS for p in files(folder) if "recipes" not in p.parts):
        for node in nodes(path):
            said = getattr(node, "attr", None) or getattr(node, "value", None)
            if isinstance(said, str) and said in facts:
                found.add(str(path.relative_to(ROOT)))
    assert found == {"kernels/target.py"}
