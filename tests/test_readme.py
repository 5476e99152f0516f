"""The README: its programs run, its errors are what cavs says, its names, commands and links exist."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import cavs
from cavs import vertex_programs

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()

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
failed, tried = doctest.DocTestRunner().run(tests)
print("examples:", tried, "failed:", failed)
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_all_programs_run_and_all_errors_are_as_shown(tmp_path):
    (tmp_path / "cavs").symlink_to(ROOT / "cavs")
    # JAX adds lines about its own frames to a message, unless it shows them.
    env = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu", "JAX_TRACEBACK_FILTERING": "off"}
    command = [sys.executable, "-c", RUN, str(ROOT / "README.md")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    losses = [float(x) for x in re.findall(r"epoch \d: loss ([\d.]+)", done.stdout)]
    assert len(losses) == 5 and losses[-1] < 0.8 * losses[0], done.stdout
    assert re.search(r"examples: [1-9]\d* failed: 0$", done.stdout.strip()), done.stdout


def test_the_first_program_is_short():
    assert len(blocks("python")[0].splitlines()) <= 45


def test_every_public_name_that_is_told_exists():
    told = set(re.findall(r"\bcavs\.([A-Za-z_]+)", "\n".join(line for line in TEXT.splitlines() if "arxiv" not in line)))
    assert told and not [name for name in told if not hasattr(cavs, name)]


def test_every_vertex_program_is_told():
    assert not [n for n in vars(vertex_programs) if n[0].isupper() and f"`{n}`" not in TEXT]


def test_commands_extras_and_links_are_of_this_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    commands = re.findall(r"^(?:pip install uv && )?uv run (?:--extra (\w+) )?(\w+)", "\n".join(blocks("sh")), re.MULTILINE)
    assert {command for _, command in commands} == {*project["scripts"], "pytest"}
    assert {*re.findall(r"--extra (\w+)", TEXT)} <= {*project["optional-dependencies"]}
    assert not [path for path in re.findall(r"\]\((?!http)([^)]+)\)", TEXT) if not (ROOT / path).exists()]
