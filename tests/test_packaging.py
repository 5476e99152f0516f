"""The package: what `import cavs` needs, what it declares, which way imports point, and one name in site-packages."""

import ast
import functools
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("bench", "cavs", "kernels", "tests", "vertex_programs")
# Installed with cavs or beside it, but not needed by `import cavs`.
NOT_NEEDED = ["equinox", "flax", "hypothesis", "matplotlib", "networkx", "optax", "pytest", "rich", "safetensors", "torch"]


def python(code: str, cwd: Path) -> str:
    """What a new interpreter prints that sees this checkout and was started elsewhere."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_import_cavs(tmp_path):
    """It needs jax and numpy alone, loads nothing of the command line, and starts no backend.

    Else `jax.distributed.initialize` and the choice of a platform after `import cavs` would fail, as the setting below does.
    """
    code = f"""
import sys
import jax, jax.numpy, numpy

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {NOT_NEEDED}:
            raise ModuleNotFoundError("not needed by import cavs: " + name)

sys.meta_path.insert(0, Refuse())
import cavs
jax.config.update("jax_num_cpu_devices", 2)
assert len(jax.devices()) == 2
cavs.schedule(cavs.Graphs.build([1], [0], []))
assert not set({NOT_NEEDED}) & set(sys.modules)
sys.meta_path.pop(0)
assert all(getattr(cavs, name) for name in cavs.__all__)
try:
    cavs.nothing
except AttributeError as error:
    assert "module 'cavs' has no attribute 'nothing'" in str(error)
assert not any(name.endswith("__init__") for name in sys.modules), "a package was run twice"
print(cavs.__file__, cavs.__version__, *cavs.__all__)
"""
    file, version, *names = python(code, tmp_path).split()
    path = ROOT / "cavs" / "__init__.py"
    assert Path(file) == path
    assert {*names} == {name.rpartition(".")[2] for name in imports(path)} - {"TYPE_CHECKING", "importlib"}  # for type checkers
    assert re.findall(r'^__version__ = "(\d+\.\d+\.\d+\S*)"$', path.read_text(), re.MULTILINE) == [version]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "cavs/__init__.py" and "version" in PROJECT["project"]["dynamic"]


def test_help_and_version_do_not_wait_for_jax(tmp_path):
    code = """
import sys
from cavs import cli
for words in (["--version"], ["--help"], []):
    try:
        cli.main(words)
    except SystemExit as end:
        assert end.code == 0
assert not {"jax", "numpy"} & set(sys.modules)
"""
    begin = time.monotonic()
    assert "cavs 0." in python(code, tmp_path)
    assert time.monotonic() - begin < 3  # 0.1 s on an idle machine


@pytest.mark.parametrize("folder", ["kernels", "vertex_programs"])
def test_the_two_folders_are_links_inside_the_package(folder):
    link = ROOT / "cavs" / folder
    assert link.is_symlink() and os.readlink(link) == f"../{folder}"
    assert not (ROOT / folder).is_symlink() and (ROOT / folder).is_dir()


def sources(folder: str) -> Iterator[Path]:
    """Python files by their real path: the links inside cavs/ are not followed twice."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path == path.resolve():
            yield path


@functools.cache
def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            # `from cavs import kernels` names cavs.kernels.
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(
    "folder, never",
    [
        *((folder, ["kernels", "vertex_programs"]) for folder in FOLDERS),  # an installed cavs has no such top-level names
        ("kernels", ["bench", "tests"]),
        ("vertex_programs", ["cavs.kernels", "bench", "tests"]),
        ("cavs", ["bench", "tests"]),
    ],
)
def test_imports_point_one_way(folder, never):
    """Between the folders of the repository; `tests/test_rooms.py` checks those inside of cavs/ and kernels/."""
    within = lambda name: any(name == module or name.startswith(module + ".") for module in never)  # noqa: E731
    assert not [(str(path.relative_to(ROOT)), name) for path in sources(folder) for name in imports(path) if within(name)]


def test_the_core_does_not_know_the_vertex_programs():
    # The command line does: `recipes` and `cli` stand on top of both. `__init__` and `io` name them for the user.
    above_or_names = ("__init__.py", "__main__.py", "cli.py", "io.py")
    core = [p for p in sources("cavs") if "recipes" not in p.parts and p.name not in above_or_names]
    above = ("cavs.vertex_programs", "cavs.recipes", "cavs.cli")
    assert not [(str(p), n) for p in core for n in imports(p) if any(f"{n}.".startswith(f"{a}.") for a in above)]


def test_vertex_programs_need_public_names_alone_and_are_short():
    """At most 60 lines a program, without docstrings and blank lines."""
    for path in sources("vertex_programs"):
        text = path.read_text()
        private = [n for n in imports(path) if n.startswith("cavs._")] + re.findall(r"\bcavs\._\w+", text)
        assert not private, f"{path}: {private}"
        for program in (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)):
            docs = [
                n.body[0] for n in ast.walk(program) if isinstance(n, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(n)
            ]
            lines = {i for i, line in enumerate(text.splitlines(), 1) if line.strip()} & {*_lines(program)}
            assert len(lines.difference(*map(_lines, docs))) <= 60, program.name


def _lines(node: ast.stmt) -> range:
    assert node.end_lineno is not None
    return range(node.lineno, node.end_lineno + 1)


def declared(requirements: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9_.-]+", r).group().replace("-", "_") for r in requirements}  # type: ignore[union-attr]


def test_every_import_is_declared():
    project = PROJECT["project"]
    known = (
        declared(project["dependencies"])
        | declared(sum(map(project["optional-dependencies"].get, ("interop", "log", "nmt")), []))
        | {"cavs"}
    )
    known |= {"typing_extensions"}  # imported by type checkers only, which bring it along
    for folder in ("cavs", "kernels", "vertex_programs"):
        for path in sources(folder):
            third_party = {n.split(".")[0] for n in imports(path)} - set(sys.stdlib_module_names)
            assert third_party <= known, f"{path}: {third_party - known}"


def test_the_readme_needs_no_extra():
    text = (ROOT / "README.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    modules = {m for line in re.findall(r"^import (.+)$", code, re.MULTILINE) for m in re.findall(r"(?:^|, )(\w+)", line)}
    assert {"cavs", "jax", "optax"} <= modules <= {"cavs"} | declared(PROJECT["project"]["dependencies"])


def test_the_hooks_are_what_ci_runs():
    entries = re.findall(r"entry: (.+)", (ROOT / ".pre-commit-config.yaml").read_text())
    script = (ROOT / ".ci" / "run").read_text()
    assert entries and all(f"\n{entry}\n" in script for entry in entries)
