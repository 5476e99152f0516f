"""The command line: train, predict, resuming after Ctrl-C, and the messages for wrong arguments."""

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
from cavs.recipes._command import FILES_OF_A_RUN
from tests.small_run import arrays_of, best_of, history_of

DATA = Path(cli.__file__).parent / "data"
TREE = "(3 (1 (2 not) (1 bad)) (2 .))"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run of `cavs train` on some of the reviews."""
    folder = tmp_path_factory.mktemp("reviews")
    lines = (DATA / "reviews.train.txt").read_text().splitlines()[:200]
    (folder / "slice.txt").write_text("\n".join(lines))
    flags = ["--dev", str(DATA / "reviews.dev.txt"), "--hidden", "24", "--epochs", "8", "--out", str(folder / "run")]
    assert cli.main(["train", str(folder / "slice.txt"), "--test", str(DATA / "reviews.dev.txt"), *flags]) == 0
    return folder / "run"


def test_a_run_beats_the_majority_and_writes_arrays_json_and_a_picture(run):
    best = best_of(run)
    assert best["roots"] == 104 and best["vertices"] == 2400
    assert best["root_right"] / 104 > 0.35  # majority: 0.25
    assert best["right"] / 2400 > 0.70  # majority: 0.61
    names = ["best.npz", "curve.png", "history.json", "last-before.npz", "last.npz", "model.json", "test.json"]
    assert sorted(path.name for path in run.iterdir()) == [".lock", *names]
    assert {*names, "log.jsonl", ".lock"} == {*FILES_OF_A_RUN}
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    for path in run.glob("*.npz"):
        with np.load(path, allow_pickle=False) as arrays:
            assert all(np.isfinite(arrays[name]).all() for name in arrays.files)
    assert json.loads((run / "test.json").read_text())["test"] == best_of(run)


def test_predictions_have_the_accuracy_that_training_reported(run, tmp_path):
    out = tmp_path / "labels.tsv"
    assert cli.main(["predict", str(run), str(DATA / "reviews.dev.txt"), "--out", str(out)]) == 0
    lines = [line.split("\t") for line in out.read_text().splitlines()[1:]]
    assert [int(line[0]) for line in lines] == list(range(104))
    graphs = cavs.read_trees(DATA / "reviews.dev.txt")
    roots = graphs.vertex_offsets[1:] - 1
    right = sum(int(line[1]) == label for line, label in zip(lines, graphs.label[roots], strict=True))
    assert right == best_of(run)["root_right"]
    assert all(0.2 <= float(line[2]) <= 1 for line in lines)
    assert lines[0][3].split() == [graphs.vocab[i] for i in graphs[0].input_id if i >= 0]


@pytest.mark.slow
def test_ctrl_c_saves_and_resuming_gives_the_result_of_an_uninterrupted_run(tmp_path):
    (tmp_path / "t.txt").write_text("\n".join([TREE, "(1 bad)", "(4 (3 very) (4 (4 good) (2 .)))"] * 8))
    command = [sys.executable, "-m", "cavs.cli", "train"]
    flags = ["t.txt", "--program", "tree-fc", "--hidden", "6", "--batch", "2", "--seed", "4"]
    environment = os.environ | {"PYTHONPATH": str(DATA.parent.parent), "JAX_PLATFORMS": "cpu"}

    def start(*more: str) -> subprocess.Popen:
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, *more], cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True)

    process = start(*flags, "--epochs", "100000", "--out", "stopped")
    until = time.monotonic() + 60
    while not (tmp_path / "stopped" / "best.npz").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, error
    assert "cavs train --resume stopped" in out
    epochs = str(int(history_of(tmp_path / "stopped")[-1]["epoch"]) + 2)

    for more in (["--resume", "stopped", "--epochs", epochs], [*flags, "--epochs", epochs, "--out", "straight"]):
        process = start(*more)
        out, error = process.communicate(timeout=100)
        assert process.returncode == 0, error
    got, want = (arrays_of(tmp_path / name) for name in ("stopped", "straight"))
    assert got.keys() == want.keys()
    for key in got:
        np.testing.assert_array_equal(got[key], want[key], err_msg=key)


# Command lines and their messages. FILE has three trees, WIDE a vertex of three children, BARE no labels.
MISTAKES = {
    "train nowhere.txt": "FILE: got .*nowhere.txt, which does not exist; expected the path of a file",
    "train notes.doc": "which ends in '.doc'; expected one of .txt",
    "train WORDS": "line 1: .*For plain text write: --task lm",
    "train BARE": "FILE: got .*bare.jsonl without labels; expected a label at each root",
    "train ONE": "with 1 graph; expected at least 2, because 1 is held out. Or write --dev FILE",
    "train WIDE --program binary": r"got 3 children at vertex 3 of graph 0; expected at most 2 for program binary-tree-lstm. "
    r"These fit: nary-tree-lstm, child-sum-tree-lstm, dagnn\.",
    "train INNER --program tree-fc": "got an input at vertex 1 .*; expected inputs only at leaves for program tree-fc",
    "train WIDE --dev FILE --program binary": "train: FILE: got 3 children at vertex 3 of graph 0; expected at most 2 for",
    "train FILE --dev WIDE": "train: --dev, or what FILE holds out: got 3 children at vertex 3 of graph 0; expected at most 2",
    "train FILE --program foo": "train: --program: got 'foo'; expected one of binary-tree-lstm, nary-tree-lstm",
    "train FILE --program tree-fc --embedding-size 5": "train: --embedding-size: got 5; expected 100, the hidden size",
    "train FEW": "--dev, or what FILE holds out: got no labels in the held-out part of the data; expected some in each. Write",
    "train FEW --dev FEW --test BARE": "--test: got .*bare.jsonl without labels; expected a label at each root",
    "train FILE --dev OTHER": r"--dev, or what FILE holds out: got no labels that occur in the training data, but '7', '8'; "
    "expected some of '1', '2', '3'. Write the labels of all files alike, or --dev FILE",
    "train FILE --dev FILE --test OTHER": "--test: got no labels that occur in the training data, but '7', '8'; expected some",
    "train ROOTS --dev LEAVES": r"FILE holds out: got no labels of roots \(--score\) in the held-out part of the data",
    "train FILE --dropout 1": "--dropout: got 1.0; expected a number from 0 to 0.999",
    "train --task lm": "FILE: got nothing; expected a text file, .*. Write: cavs train --task language_model FILE",
    "train FILE --out RUN": "--out: got .*, which already contains a run; expected another folder. To continue, write --resume",
    "train FILE --out plots": "--out: got plots, which has a curve.png of its own; expected another folder, as training",
    "train FILE --out notes.doc": "--out: got notes.doc, a file; expected a folder, which is created if it does not exist",
    "predict RUN FILE --out FILE": "--out: got file.txt, which is FILE; expected another file, as its samples would be",
    "predict RUN FILE --out RUN/best.npz": "--out: got .*best.npz, a file of a run; expected another file, as the run would",
    "predict RUN FILE --out link.tsv": "--out: got link.tsv, a file of a run; expected another file, as the run would",
    "predict RUN FILE --out RUN/.lock": "--out: got .*.lock, a file of a run; expected another file, as the run would",
    "inspect FILE --out RUN/curve.png": "--out: got .*curve.png, a file of a run; expected another file",
    "evaluate RUN FILE --out RUN/curve.png": "--out: got .*curve.png, a file of a run; expected another file",
    "train FILE --out ''": "--out: got an empty path; expected the path of a folder",
    "train --resume ''": "--resume: got an empty path; expected the path of a folder",
    "train --resume": "there is no run under runs/",
    "train --resume nowhere": "--resume: got nowhere; expected the folder of a run",
    "train --resume RUN --hidden 7": "--resume: got --hidden, which cannot change: all but --epochs, --max-steps, --patience",
    "train --resume RUN --out elsewhere": "--out: got elsewhere with --resume .*; expected none, as a run continues",
    "train --resume RUN --task lm": "--task: got language_model with --resume .*; expected trees, the task of this run",
    "predict RUN WIDE": "got 3 children .*; expected at most 2 for program binary-tree-lstm",
    "inspect FILE --out nowhere/picture.png": "--out: got nowhere/picture.png; expected a file in an existing folder",
    "inspect FILE --out picture.gif": "--out: got picture.gif; expected a name that ends in .png, .pdf, .svg",
    "evaluate RUN FILE --out nowhere/picture.png": "--out: got nowhere/picture.png; expected a file in an existing folder",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_the_message_of_a_wrong_argument_is_one_line(line, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = {
        "FILE": ("file.txt", "\n".join([TREE] * 3)),
        "ONE": ("one.txt", TREE),
        "OTHER": ("other.txt", "(7 (7 (8 not) (7 bad)) (8 .))"),
        "ROOTS": ("roots.jsonl", '{"children": [[], [0]], "inputs": ["a", null], "labels": [0, 1]}\n' * 3),
        "LEAVES": ("leaves.jsonl", '{"children": [[], [0]], "inputs": ["a", null], "labels": [0, null]}'),
        "WIDE": ("wide.txt", "(1 (1 a) (1 b) (1 c))\n(1 d)"),
        "WORDS": ("words.txt", "plain words\nand more"),
        "FEW": ("few.jsonl", '{"children": [[]], "labels": [%s]}\n' * 9 % ("0", *["null"] * 8)),
        "BARE": ("bare.jsonl", '{"children": [[], [0]], "inputs": ["a", null]}'),
        "INNER": ("inner.jsonl", '{"children": [[], [0]], "inputs": ["a", "b"], "labels": [0, 1]}\n' * 2),
    }
    for name, content in files.values():
        (tmp_path / name).write_text(content)
    (tmp_path / "notes.doc").write_text("")
    (tmp_path / "link.tsv").symlink_to(run / "best.npz")
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "curve.png").write_text("")
    words = [files.get(word, (word,))[0].replace("RUN", str(run)).replace("''", "") for word in line.split()]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert re.search(MISTAKES[line], error), error
    assert error.count("\n") == 1
