"""The README and the gallery: their programs run, errors are what cavs says, their names, commands and links exist."""

import os
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import cavs
from cavs import vertex_programs

ROOT = Path(__file__).parents[1]
PAGES = {"README": ROOT / "README.md", "gallery": ROOT / "vertex_programs" / "README.md"}
TEXT = {name: path.read_text() for name, path in PAGES.items()}

# In an interpreter of its own, as a reader would: without the settings of the tests.
RUN = r"""
import doctest, pathlib, re, sys, warnings
warnings.simplefilter("error")
text = pathlib.Path(sys.argv[1]).read_text()
names = {}
for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
    line = text[: text.index(block)].count("\n")
    exec(compile("\n" * line + block, "README.md", "exec"), names)
examples = "\n\n".join(re.findall(r"```pycon\n(.*?)```", text, re.DOTALL))
tests = doctest.DocTestParser().get_doctest(examples, names, "README.md", None, 0)
failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(tests)
print("examples:", tried, "failed:", failed)
"""


def blocks(language: str, page: str = "README") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT[page], re.DOTALL)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[dict[str, subprocess.Popen]]:
    """The programs of each page, running; at once, as they mostly compile."""
    started = {}
    for page, path in PAGES.items():
        folder = tmp_path_factory.mktemp(page)
        (folder / "cavs").symlink_to(ROOT / "cavs")
        # JAX adds lines about its own frames to a message, unless it shows them.
        env = os.environ | {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu", "JAX_TRACEBACK_FILTERING": "off"}
        command, pipe = [sys.executable, "-c", RUN, str(path)], subprocess.PIPE
        started[page] = subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def printed(process: subprocess.Popen) -> str:
    out, error = process.communicate(timeout=300)
    assert not process.returncode, error
    return out.strip()


def test_all_programs_run_and_all_errors_are_as_shown(runs):
    out = printed(runs["README"])
    losses = [float(x) for x in re.findall(r"epoch \d: loss ([\d.]+)", out)]
    assert len(losses) == 5 and losses[-1] < 0.8 * losses[0], out
    assert "run and interpret agree" in out and "\nNone\n" in out
    assert re.search(r"examples: [1-9]\d* failed: 0$", out), out


def test_the_gallery_runs_and_learns(runs):
    losses = [tuple(map(float, pair)) for pair in re.findall(r"loss ([\d.]+) -> ([\d.]+)", printed(runs["gallery"]))]
    assert len(losses) == sum("\nfit(" in block for block in blocks("python", "gallery"))
    assert all(after < 0.1 * before for before, after in losses), losses


def test_programs_are_short():
    assert len(blocks("python")[0].splitlines()) <= 45
    _, *programs = blocks("python", "gallery")
    assert [p for p in programs if len([line for line in p.splitlines() if line.strip()]) > 15] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_name_that_is_told_exists(page):
    lines = [line for line in TEXT[page].splitlines() if "arxiv" not in line]
    told = set(re.findall(r"\bcavs((?:\.[A-Za-z_]+)+)(?![/\w])", "\n".join(lines)))
    told -= {name for name in told if name.startswith(".data.") and name.endswith((".txt", ".py"))}
    for name in told:
        value = cavs
        for part in name[1:].split(".")[:2]:
            value = getattr(value, part, None) if value is cavs or isinstance(value, types.ModuleType) else value
            assert value is not None, name
    assert told
    programs = set(re.findall(r"\bvp\.([A-Za-z_]+)", TEXT[page]))
    assert not [name for name in programs if not hasattr(vertex_programs, name)]


def test_every_public_name_and_every_vertex_program_is_told():
    programs = [n for n in vars(vertex_programs) if n[0].isupper()]
    results = {"Comparison", "Difference", "Exported", "FormatError", "Graphs", "NanReport", "Packed", "Schedule", "Vertex"}
    places = (cavs, cavs.data, cavs.debug, cavs.interop, cavs.io)
    functions = [n for place in places for n, value in vars(place).items() if n[0] != "_" and callable(value)]
    assert not [n for n in (*programs, *functions) if n not in results and not re.search(rf"\b{n}\b", TEXT["README"])]


@pytest.mark.parametrize("page", PAGES)
def test_links_and_extras_are_of_this_project(page):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*re.findall(r"--extra (\w+)", TEXT[page])} <= {*project["optional-dependencies"]}
    links = re.findall(r"\]\((?!http)([^)]+)\)", TEXT[page])
    assert not [path for path in links if not (PAGES[page].parent / path).exists()]


def test_commands_are_of_this_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    commands = re.findall(r"^(?:pip install uv && )?uv run (?:--extra (\w+) )?(\w+)", "\n".join(blocks("sh")), re.MULTILINE)
    assert {command for _, command in commands} == {*project["scripts"], "pytest"}
