"""The recipes: public names only, a copy in an empty folder is a program of its own, and its model is changed in one place."""

import ast
import os
import pydoc
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cavs.recipes._command import ALIASES, TASKS, find_recipe
from tests.test_fit import sentences, trees
from tests.test_tagger_training import corpus
from tests.test_train_memory import numbers, pairs

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "cavs" / "recipes"
DATA = {
    "trees": (trees, "t.txt", ["--program", "tree-fc"]),
    "tagging": (corpus, "t.txt", ["--embedding-size", "4"]),
    "language_model": (sentences, "t.txt", ["--program", "elman-rnn"]),
    "translation": (pairs, "t.tsv", []),
    "regression": (numbers, "t.jsonl", ["--program", "elman-rnn"]),
}


def names_of(path: Path) -> list[str]:
    """The full names that a file imports, and the names of cavs that it reads."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and node.module, path
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"(?:cavs|vp|recipes)(?:\.\w+)+", name := ast.unparse(node)):
            found.append(re.sub("^(vp|recipes)", lambda m: {"vp": "cavs.vertex_programs"}.get(m[0], "cavs.recipes"), name))
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_recipes_need_public_names_alone(path):
    """A recipe needs public names; the files of the command also need one another."""
    private = [name for name in names_of(path) if re.search(r"\._(?!_)", name)]
    if path.name.startswith("_"):
        private = [name for name in private if not name.startswith("cavs.recipes._")]
    assert not private
    for name in names_of(path):
        if name.startswith("cavs.") and "._" not in name:
            assert pydoc.locate(name) is not None, name


def test_every_task_has_a_file():
    assert {path.stem for path in FOLDER.glob("*.py") if path.name[0] != "_"} == {*TASKS}
    assert all(find_recipe(name).name in TASKS for name in (*TASKS, *ALIASES))
    assert all(find_recipe(name).name == name for name in TASKS)


# Runs command lines of files as a user would, one after another in one process, which prints their exit codes.
RUN = """
import os, runpy, sys
for line in sys.argv[1:]:
    folder, *words = line.split()
    os.chdir(folder)
    sys.argv = ["mine.py", *words]
    try:
        runpy.run_path("mine.py", run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    print(f"[exit {code}]", flush=True)
"""


def ran(*lines: str) -> tuple[list[str], str]:
    """What each command line of `mine.py` in a folder prints, up to its exit code, and what all write to stderr."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", RUN, *lines]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.stdout.split("[exit "), done.stderr


@pytest.mark.slow
def test_a_copy_in_an_empty_folder_trains_evaluates_and_predicts(tmp_path):
    lines = []
    for name, (write, file, more) in DATA.items():
        folder = tmp_path / name
        folder.mkdir()
        write(folder / file, 14)
        shutil.copy(FOLDER / f"{name}.py", folder / "mine.py")
        options = ["--hidden", "4", "--batch", "4", "--epochs", "1", "--min-count", "1", *more]
        lines.append(" ".join([str(folder), "--data", file, *options, "--out", "run"]))
        lines += [f"{folder} predict run {file}", f"{folder} --resume run --hidden 5"]
    out, error = ran(*lines)
    for trained, predicted, refused in zip(out[::3], out[1::3], out[3::3], strict=False):
        assert "python mine.py train --resume run" in trained, error
        assert predicted.startswith("0]") and len(predicted.splitlines()) > 14, error
        assert refused.startswith("2]"), error
    assert error.count("--resume: got --hidden, which cannot change") == len(DATA) == len(out) // 3


def test_a_model_is_changed_in_one_place(tmp_path):
    """A layer that is added to `hidden` is trained, saved, and used by all commands."""
    trees(tmp_path / "t.txt", 14)
    text = (FOLDER / "trees.py").read_text()
    text = text.replace('"b": jnp.zeros(', '"more": jnp.eye(self.options.hidden, dtype=jnp.float32), "b": jnp.zeros(', 1)
    old = 'return drop(vp.run_program(self.program, params["program"], sched, x), key=keys[1])'
    assert old in text
    (tmp_path / "mine.py").write_text(text.replace(old, old.replace("sched, x)", 'sched, x) @ params["more"]')))
    out, error = ran(
        *(
            f"{tmp_path} {line}"
            for line in (
                "--data t.txt --dev t.txt --hidden 4 --program tree-fc --epochs 2 --out run",
                "evaluate run t.txt --json",
            )
        )
    )
    with np.load(tmp_path / "run" / "best.npz") as arrays:
        assert arrays["[0]['more']"].shape == (4, 4) and abs(arrays["[0]['more']"][0, 1]) > 0
    assert out[1].startswith("0]") and out[2].startswith("0]") and '"accuracy"' in out[1], error
