"""The command line from outside: train, predict, going on after Ctrl-C, and what mistakes are told."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import cavs
from cavs import cli
from cavs._train.config import TASKS
from cavs._train.task import configure

DATA = Path(cli.__file__).parent / "data"
pytestmark = pytest.mark.usefixtures("compiled")
TREE = "(3 (1 (2 not) (1 bad)) (2 .))"


@pytest.fixture(scope="module")
def run(tmp_path_factory, compiled) -> Path:
    """A folder in which `cavs train` was trained on a slice of the reviews."""
    folder = tmp_path_factory.mktemp("reviews")
    lines = (DATA / "reviews.train.txt").read_text().splitlines()[:200]
    (folder / "slice.txt").write_text("\n".join(lines))
    flags = ["--dev", str(DATA / "reviews.dev.txt"), "--hidden", "24", "--epochs", "8", "--out", str(folder / "run")]
    assert cli.main(["train", str(folder / "slice.txt"), "--test", str(DATA / "reviews.dev.txt"), *flags]) == 0
    return folder / "run"


def test_training_beats_the_majority(run):
    best = json.loads((run / "best.json").read_text())["dev"]
    assert best["roots"] == 104 and best["vertices"] == 2400
    assert best["roots_right"] / 104 > 0.35  # majority: 0.25
    assert best["vertices_right"] / 2400 > 0.70  # majority: 0.61


def test_a_run_leaves_arrays_json_and_a_picture(run):
    suffixes = sorted(path.suffix for path in run.iterdir())
    assert suffixes == [""] + [".json"] * 5 + [".npz"] * 3 + [".png"]  # of `last` two generations; `.lock` has no suffix
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    for path in run.glob("*.npz"):
        with np.load(path, allow_pickle=False) as arrays:
            assert all(np.isfinite(arrays[name]).all() for name in arrays.files)
    assert json.loads((run / "test.json").read_text())["test"] == json.loads((run / "best.json").read_text())["dev"]


def test_predictions_are_as_right_as_training_said(run, tmp_path):
    out = tmp_path / "labels.tsv"
    assert cli.main(["predict", str(run), str(DATA / "reviews.dev.txt"), "--out", str(out)]) == 0
    lines = [line.split("\t") for line in out.read_text().splitlines()]
    assert [int(line[0]) for line in lines] == list(range(104))
    graphs = cavs.read_trees(DATA / "reviews.dev.txt")
    roots = graphs.vertex_offsets[1:] - 1
    right = sum(int(line[1]) == label for line, label in zip(lines, graphs.label[roots], strict=True))
    assert right == json.loads((run / "best.json").read_text())["dev"]["roots_right"]
    assert all(0.2 <= float(line[2]) <= 1 for line in lines)
    assert lines[0][3].split() == [graphs.vocab[i] for i in graphs[0].input_id if i >= 0]


def test_predict_takes_unknown_words_and_labels_every_vertex(run, tmp_path, capsys):
    new = tmp_path / "new.txt"
    new.write_text("(0 (0 zyzzyva) (0 wonderful))\n(0 dull)\n")
    assert cli.main(["predict", str(run), str(new), "--vertices"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    where = [(line[0], line[1], line[4]) for line in lines]
    assert where == [("0", "0", "zyzzyva"), ("0", "1", "wonderful"), ("0", "2", ""), ("1", "0", "dull")]


def test_going_on_trains_longer(run, capsys):
    before = json.loads((run / "last.json").read_text())["progress"]["history"]
    assert cli.main(["train", "--resume", str(run), "--epochs", "9"]) == 0
    after = json.loads((run / "last.json").read_text())["progress"]["history"]
    assert len(after) == 9 and after[:8] == before
    assert "going on" in capsys.readouterr().out


def test_ctrl_c_saves_and_going_on_ends_where_a_straight_run_does(tmp_path, compiled):
    (tmp_path / "t.txt").write_text("\n".join([TREE, "(1 bad)", "(4 (3 very) (4 (4 good) (2 .)))"] * 8))
    command = [sys.executable, "-m", "cavs.cli", "train"]
    flags = ["t.txt", "--hidden", "6", "--batch", "2", "--seed", "4"]
    environment = os.environ | {
        "PYTHONPATH": str(DATA.parent.parent),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }

    def start(*more: str) -> subprocess.Popen:
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, *more], cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True)

    process = start(*flags, "--epochs", "100000", "--out", "stopped")
    until = time.monotonic() + 60
    while not (tmp_path / "stopped" / "best.json").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, error
    assert "cavs train --resume stopped" in out
    progress = json.loads((tmp_path / "stopped" / "last.json").read_text())["progress"]
    epochs = str(progress["epoch"] + 2)

    for more in (["--resume", "stopped", "--epochs", epochs], [*flags, "--epochs", epochs, "--out", "straight"]):
        process = start(*more)
        out, error = process.communicate(timeout=100)
        assert process.returncode == 0, error
    arrays = []
    for name in ("stopped", "straight"):
        about = json.loads((tmp_path / name / "last.json").read_text())
        with np.load(tmp_path / name / about["arrays"]) as file:
            arrays.append({key: file[key] for key in file.files})
    assert arrays[0].keys() == arrays[1].keys()
    for key in arrays[0]:
        np.testing.assert_array_equal(arrays[0][key], arrays[1][key], err_msg=key)


# What is written, and what is answered. FILE has three trees, WIDE a vertex of three children, BARE no labels.
MISTAKES = {
    "train nowhere.txt": "there is no file .*nowhere.txt",
    "train FILE --dev nowhere.txt": "there is no file .*nowhere.txt",
    "train FILE --embeddings nowhere.txt": "--embeddings: there is no file .*nowhere.txt",
    "train notes.doc": "ends in '.doc', wanted one of .txt",
    "train WORDS": "line 1: .*For plain text: cavs train --task lm FILE",
    "train BARE": "has no labels; wanted a label at each root",
    "train ONE": "wanted at least 2, as one is held out; or pass --dev FILE",
    "train WIDE --program binary": r"vertex 3 of graph 0 has 3 children, but --program binary-tree-lstm takes at most 2. "
    r"These fit: --program nary-tree-lstm, --program child-sum-tree-lstm, --program dagnn\.",
    "train FILE --program lstm": "has 2 children, but --program lstm takes at most 1",
    "train INNER --program tree-fc": "has children and an input, but --program tree-fc reads at leaves alone",
    "train FILE --program transformer": "--program is 'transformer', wanted one of binary-tree-lstm, ",
    "train FILE --layers 2": "--layers is 2, but --program binary-tree-lstm has one layer; wanted --program lstm",
    "train FILE --program tree-fc --embedding-size 7": "--embedding-size is 7 and --hidden 100; wanted them alike",
    "train FILE --dropout 1": "--dropout is 1.0, wanted a probability from 0 up to",
    "train FILE --batch 0": "--batch is 0, wanted an integer of at least 1",
    "train FILE --lr -1": "--lr is -1.0, wanted a number above 0",
    "train --dev FILE": "--dev was given without a file to train on: cavs train FILE --dev",
    "train --task lm": "--task lm needs a text file",
    "train WORDS --task lm --loss root": "--loss is for classification",
    "train FILE --out RUN": "holds a run already; wanted another folder, or, to go on, --resume",
    "train --resume": "there is no run under runs/",
    "train --resume nowhere": "nowhere holds no model.json; wanted the folder of a run",
    "train --resume RUN --lr 0.1": "only --epochs and --patience may be given, not --lr",
    "train FILE --resume RUN": "may be given, not FILE",
    "predict nowhere FILE": "nowhere holds no model.json",
    "predict RUN nowhere.txt": "there is no file nowhere.txt",
    "predict RUN WIDE": "has 3 children, but --program binary-tree-lstm takes at most 2",
    "inspect nowhere.txt": "there is no file nowhere.txt",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_told_in_one_line(line, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = {
        "FILE": ("file.txt", "\n".join([TREE] * 3)),
        "ONE": ("one.txt", TREE),
        "WIDE": ("wide.txt", "(1 (1 a) (1 b) (1 c))\n(1 d)"),
        "WORDS": ("words.txt", "plain words\nand more"),
        "BARE": ("bare.jsonl", '{"children": [[], [0]], "inputs": ["a", null]}'),
        "INNER": ("inner.jsonl", '{"children": [[], [0]], "inputs": ["a", "b"], "labels": [0, 1]}\n' * 2),
    }
    for name, content in files.values():
        (tmp_path / name).write_text(content)
    (tmp_path / "notes.doc").write_text("")
    words = [str(run) if word == "RUN" else files.get(word, (word,))[0] for word in line.split()]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert re.search(MISTAKES[line], error), error
    assert error.count("\n") == 1


def test_a_changed_file_is_refused_when_going_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "t.txt"
    path.write_text("\n".join([TREE] * 4))
    assert cli.main(["train", "t.txt", "--hidden", "4", "--epochs", "1", "--out", "run"]) == 0
    path.write_text("\n".join([TREE] * 5))
    assert cli.main(["train", "--resume", "run", "--epochs", "2"]) == 2
    assert "has changed since run was trained on it" in capsys.readouterr().err


def test_help_tells_how_to_begin(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["train", "--help"])
    out = capsys.readouterr().out
    assert "cavs train --resume runs/reviews" in out and "lazy" in out


def test_help_tells_the_defaults_of_each_task():
    parser = next(a for a in cli._parser()._actions if a.dest == "command").choices["train"]  # type: ignore[union-attr, index]
    told = {a.dest: re.search(r"default ([\w.-]+)((?:; [a-z, ]+ [\w.-]+)*)", a.help or "") for a in parser._actions}
    checked = 0
    for name in TASKS:
        config = configure({"task": name, "train": "FILE"})
        for field, found in told.items():
            if found is not None:
                own = [rest.rsplit(" ", 1) for rest in found[2].split("; ")[1:]]
                text = next((value for tasks, value in own if name in tasks.split(", ")), found[1])
                value = getattr(config, field)
                assert type(value)(text) == value, (name, field)
                checked += 1
    assert checked == 13 * len(TASKS)


def test_inspect_shows_a_file(tmp_path, capsys):
    path = tmp_path / "file.txt"
    path.write_text("\n".join([TREE] * 3))
    assert cli.main(["inspect", str(path), "--batch", "2"]) == 0
    assert "vertices" in capsys.readouterr().out
