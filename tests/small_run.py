"""A small run of `cavs train` for the tests of its folder and its checkpoints."""

import json
from pathlib import Path

import numpy as np

from cavs import cli
from cavs._fit.kept import write_facts

# Words and labels that must not reach a terminal unescaped.
TREE = {"children": [[], [], [0, 1]], "inputs": ["a\tb", "\x1b[2J\ud800", None], "labels": ["x\ny", "\u202ez", "x\ny"]}
LEAF = {"children": [[]], "inputs": ["c"], "labels": ["w"]}
SMALL = ["--program", "tree-fc", "--hidden", "4", "--batch", "2"]


def train_run(folder: Path) -> Path:
    """Trains for two epochs on `t.jsonl` in a folder. Returns the folder of the run."""
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, [TREE, LEAF] * 4)))
    assert cli.main(["train", str(folder / "t.jsonl"), *SMALL, "--epochs", "2", "--out", str(folder / "run")]) == 0
    return folder / "run"


def fails(capsys, *words: str) -> tuple[int, str]:
    """Runs a command that fails. Returns its exit code and its message, which must be one line without a traceback."""
    capsys.readouterr()
    code = cli.main(words)
    error = capsys.readouterr().err
    assert error.count("\n") <= 1 and "Traceback" not in error
    return code, error


def rewrite(path: Path, **change) -> None:
    """Changes facts in `model.json`, with a valid checksum: a file that an attacker could write."""
    facts = {name: value for name, value in json.loads(path.read_text()).items() if name not in ("sha256", "format")}
    write_facts(path, facts | change)


def arrays_of(folder: str | Path) -> dict[str, np.ndarray]:
    """The arrays of the state in the last save."""
    with np.load(Path(folder, "last.npz")) as file:
        return {name: file[name] for name in file.files if name.startswith("[0]")}


def history_of(folder: str | Path) -> list[dict]:
    """The evaluations of a run."""
    return json.loads(Path(folder, "history.json").read_text())


def best_of(folder: str | Path) -> dict[str, float]:
    """The held-out metrics of the best epoch."""
    return max(history_of(folder), key=lambda record: record["score"])["held_out"]
