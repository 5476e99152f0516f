"""The README and the gallery: their programs run, errors are what cavs says, their names, commands and links exist."""

import re
import subprocess
import tomllib
import types
from collections.abc import Iterator

import jax
import pytest

import cavs
from cavs import vertex_programs
from tests.markdown import ROOT, blocks, printed, start

PAGES = {"README": ROOT / "README.md", "gallery": ROOT / "vertex_programs" / "README.md"}
TEXT = {name: path.read_text() for name, path in PAGES.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[dict[str, subprocess.Popen]]:
    """The programs of each page, running; at once, as they mostly compile."""
    started = {}
    for page, path in PAGES.items():
        started[page] = start(tmp_path_factory.mktemp(page), [path])
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def test_all_programs_run_and_all_errors_are_as_shown(runs):
    out = printed(runs["README"])
    losses = [float(x) for x in re.findall(r"epoch \d: loss ([\d.]+)", out)]
    assert len(losses) == 5 and losses[-1] < 0.8 * losses[0], out
    assert re.search(r"examples: [1-9]\d* failed: 0 seconds: [\d.]+$", out), out


def test_graphs_without_a_label_have_no_loss_in_the_readme():
    forward, training = blocks("python", TEXT["README"])
    names: dict = {}
    exec(forward.split("\n\n")[0] + "\n" + training.split("for epoch")[0], names)
    bare = cavs.read_trees(["( (0 a) (1 b))", "(1 c)"])
    loss = jax.jit(lambda params, sched: names["loss"](params, sched))
    both, labelled = (float(loss(names["params"], cavs.schedule(g, fields=("input_id", "label")))) for g in (bare, bare[1:]))
    assert both == pytest.approx(labelled, rel=1e-5)


def test_the_gallery_runs_and_learns(runs):
    out = printed(runs["gallery"])
    losses = [tuple(map(float, pair)) for pair in re.findall(r"loss ([\d.]+) -> ([\d.]+)", out)]
    assert len(losses) + out.count("left out:") == sum("\nfit(" in block for block in blocks("python", TEXT["gallery"]))
    assert all(after < 0.1 * before for before, after in losses), losses


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


@pytest.mark.parametrize("page", PAGES)
def test_links_and_extras_are_of_this_project(page):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*re.findall(r"--extra (\w+)", TEXT[page])} <= {*project["optional-dependencies"]}
    links = re.findall(r"\]\((?!http)([^)]+)\)", TEXT[page])
    assert not [path for path in links if not (PAGES[page].parent / path).exists()]


def test_commands_are_of_this_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    commands = re.findall(
        r"^(?:pip install uv && )?uv run (?:--extra (\w+) )?(\w+)", "\n".join(blocks("sh", TEXT["README"])), re.MULTILINE
    )
    assert {command for _, command in commands} == {*project["scripts"], "pytest"}
