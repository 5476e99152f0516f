"""The rooms of the package, and which way their imports point. Files are parsed, nothing is imported."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A room imports only rooms to its left. "public" is `import cavs`, its namespaces, and the vertex programs.
ROOMS = (
    "_graphs",
    "_readers",
    "_schedule",
    "_jaxpr",
    "_convolution",
    "_function",
    "_stages",
    "_engines",
    "_run",
    "_feed",
    "_memory",
    "_remat",
    "_step",
    "_debug",
    "_interop",
    "_fit",
)
NAMESPACES = ("data", "debug", "interop", "io", "memory")
ORDER = ("kernels", *ROOMS, "public", "recipes", "cli", "__main__")
KERNEL_ORDER = (
    "_cpu",
    "target",
    "precision",
    "_program",
    "_layout",
    "_mosaic",
    "_body",
    "turns",
    "_tasks",
    "rows",
    "persistent",
    "__init__",
)
# The only imports that point to the right: (who, whom) -> why.
TO_THE_RIGHT: dict[tuple[str, str], str] = {}
# The only imports that close a circle of modules; all are inside functions.
CIRCLES = {
    ("cavs._graphs.graphs", "cavs._graphs.draw"): "a notebook shows graphs as a picture; imported when it does",
    ("cavs._schedule.schedule", "cavs._schedule.plot"): "`Schedule.plot` draws with matplotlib; imported when called",
}


def sources(folder: str) -> dict[str, Path]:
    """Full module name -> file, by its real path: the links inside cavs/ are not followed."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path == path.resolve():
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts if folder == "cavs" else ("cavs", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


CAVS, KERNELS = sources("cavs"), sources("kernels")
MODULES = CAVS | KERNELS


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path, functions: bool = True) -> list[tuple[str, str]]:
    """(module, name) of each import of a file, name "" for `import module`; with `functions` of those inside functions, too."""
    todo: list[ast.AST] = [parsed(path)]
    found: list[tuple[str, str]] = []
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and node.module, f"{path}: imports are absolute here"
            found += [(node.module, alias.name) for alias in node.names]
        elif functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return found


def imported(path: Path, functions: bool = True) -> set[str]:
    """Modules of cavs and of kernels that a file imports. `from cavs import run` is of cavs itself."""
    found = set()
    for module, name in imports(path, functions):
        if module.split(".")[0] == "cavs":
            found.add(f"{module}.{name}" if f"{module}.{name}" in MODULES or name == "vertex_programs" else module)
    return found


def room(module: str) -> str:
    part = module.removeprefix("cavs").strip(".").split(".")[0]
    return "public" if part in ("", "vertex_programs", *NAMESPACES) else part


def test_every_module_lies_in_a_room():
    outside = {name for name in CAVS if "._" not in name.replace(".__main__", "") and room(name) != "recipes"}
    assert outside == {"cavs", "cavs.cli", "cavs.__main__", *(f"cavs.{name}" for name in NAMESPACES)}
    assert {room(name) for name in CAVS} == {*ORDER} - {"kernels"}


@pytest.mark.parametrize("folder", ["cavs", "kernels"])
def test_a_room_says_what_it_is_for(folder):
    for path in (
        p / "__init__.py" for p in (ROOT / folder).iterdir() if p.name.startswith("_") and (p / "__init__.py").exists()
    ):
        assert ast.get_docstring(parsed(path)), path


def test_a_room_imports_only_rooms_to_its_left():
    wrong = set()
    for name, path in CAVS.items():
        if room(name) != "public":
            wrong |= {(name, to) for to in imported(path) if ORDER.index(room(to)) > ORDER.index(room(name))}
    assert wrong == {*TO_THE_RIGHT}


def test_no_circle_of_modules():
    graph = {name: imported(path) & MODULES.keys() - {name} for name, path in MODULES.items()}
    for name, to in CIRCLES:
        assert to not in imported(MODULES[name], functions=False), f"{name} imports {to} at its top"
        graph[name].remove(to)  # a KeyError: no longer imported
    # A `__init__` gathers its folder's names for those outside.
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    graph = {name: {to for to in found if not (to in packages and name.startswith(to + "."))} for name, found in graph.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_cavs_imports_of_the_kernels_what_they_name():
    """`from cavs.kernels import name`, of names that `kernels/__init__.py` has; nothing deeper."""
    named = {name for _, name in imports(ROOT / "kernels" / "__init__.py")}
    used = set()
    for path in CAVS.values():
        for module, name in imports(path):
            assert not module.startswith("cavs.kernels."), f"{path}: {module}"
            assert (module, name) not in (("cavs.kernels", ""), ("cavs", "kernels")), f"{path}: name what it uses"
            used |= {name} if module == "cavs.kernels" else set()
    assert used == named


def test_kernels_import_nothing_else_of_cavs_and_only_to_their_left():
    for name, path in KERNELS.items():
        place = KERNEL_ORDER.index(name.removeprefix("cavs.kernels").strip(".").split(".")[0] or "__init__")
        for to in imported(path):
            assert to.startswith("cavs.kernels."), f"{path}: {to}"
            assert KERNEL_ORDER.index(to.split(".")[2]) <= place, f"{path}: {to}"


def test_every_class_has_a_name_of_its_own():
    found = [
        (node.name, name) for name, path in MODULES.items() for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)
    ]
    names = [name for name, _ in found]
    assert len(names) > 100
    assert not [(name, module) for name, module in found if names.count(name) > 1]


def test_import_cavs_loads_nothing_of_mosaic():
    # Not every JAX that cavs runs on has all of it.
    seen, todo = set(), ["cavs"]
    while todo:
        module = todo.pop()
        if module in seen or module not in MODULES:
            continue
        seen.add(module)
        assert not [m for m, n in imports(MODULES[module], functions=False) if "mosaic" in f"{m}.{n}"], module
        todo += imported(MODULES[module], functions=False)
    assert "cavs.kernels.persistent" in seen
