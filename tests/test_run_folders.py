"""The folder of a run, as the commands see it: locks, files that cannot be written, damaged files, and files of an attacker."""

import contextlib
import errno
import io
import json
import os
import shutil
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import cli
from cavs._fit import keeper
from cavs._fit.kept import locked
from tests.small_run import SMALL, fails, history_of, rewrite, train_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a run of two epochs, beside its data."""
    return train_run(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(trained, tmp_path, monkeypatch) -> Path:
    """A copy of the run, in the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "run")
    shutil.copy(trained.parent / "t.jsonl", tmp_path)
    return Path("run")


# ---- one run per folder ----


def test_one_process_trains_in_a_folder(run, tmp_path, capsys):
    before = {path.name: path.read_bytes() for path in run.glob("*.*")}
    with locked(run):
        code, error = fails(capsys, "train", "--resume", "run", "--epochs", "3")
        assert code == 2 and f"run: process {os.getpid()} on " in error and "Wait until it ends" in error
    (tmp_path / "empty").mkdir()
    with locked(tmp_path / "empty"):
        code, error = fails(capsys, "train", "t.jsonl", *SMALL, "--out", "empty")
        assert code == 2 and "is training in it. Wait until it ends, or choose another folder" in error
    assert before == {path.name: path.read_bytes() for path in run.glob("*.*")}
    assert [path.name for path in (tmp_path / "empty").iterdir()] == [".lock"]


def test_folders_of_runs_have_names_of_their_own_beside_others(run, tmp_path, capsys):
    """A file `.data.jsonl` was trained in `runs/` itself. Below a link to nothing, a free name was searched for ever."""
    (tmp_path / "t.jsonl").rename(".data.jsonl")
    for folder in ("data", "data-2"):
        assert cli.main(["train", ".data.jsonl", *SMALL, "--epochs", "1"]) == 0
        assert f"runs/{folder}/curve.png" in capsys.readouterr().out and Path("runs", folder, "last.npz").exists()
    assert cli.main(["train", ".data.jsonl", *SMALL, "--epochs", "1", "--out", "a [red] b"]) == 0
    assert "training curve: 'a [red] b', 'a [red] b'/curve.png" in capsys.readouterr().out
    Path("link").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        cavs.data.new_folder("link/a")


# ---- files that cannot be written ----


def test_the_error_of_a_full_disk_names_the_file_and_how_to_resume(run, monkeypatch, capsys, name="curve.png"):
    def full(path, data):
        if str(path).endswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, data)

    write = keeper.write_whole
    with monkeypatch.context() as patch:
        for module in ("keeper", "report"):
            patch.setattr(f"cavs._fit.{module}.write_whole", full)
        code, error = fails(capsys, "train", "t.jsonl", *SMALL, "--epochs", "1", "--out", "new")
    assert code == 1 and f"new/{name} cannot be written or read (No space left on device)" in error
    assert "The last save is intact. Resume with: " in error and "cavs train --resume new" in error
    assert cli.main(["train", "--resume", "new"]) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_the_error_of_an_output_that_cannot_be_written_names_it(run, capsys):
    code, error = fails(capsys, "predict", "run", "t.jsonl", "--out", "/dev/full")
    assert code == 1 and "--out: /dev/full cannot be written (No space left on device)" in error


def test_a_write_that_is_killed_leaves_the_old_file(run, monkeypatch):
    """Half of the predictions took the place of the old ones."""
    Path("test.json").write_text("old")
    Path("out.tsv").write_text("old")

    def killed(*paths):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        assert cli.main(["predict", "run", "t.jsonl", "--out", "out.tsv"]) == 130
        with pytest.raises(KeyboardInterrupt):
            cavs.data.write_text("new", "test.json")
        with pytest.raises(KeyboardInterrupt):
            cavs.memory.plan(lambda p, x: jnp.sum(p * x), jnp.ones(3), np.ones((4, 3)), parts=1).save("out.tsv")
    assert Path("out.tsv").read_text() == Path("test.json").read_text() == "old"
    assert cli.main(["predict", "run", "t.jsonl", "--out", "out.tsv"]) == 0
    assert Path("out.tsv").read_text().startswith("graph") and not list(Path().glob(".*.tmp"))


# ---- files of an attacker ----

OPTIONS = {
    "hidden": [
        ("many", "hidden: got 'many'; expected a value of type int"),
        (0, "--hidden: got 0; expected a number from 1 to"),
    ],
    "epochs": [(True, "epochs: got True; expected a value of type int")],
    "layers": [(10**8, "--layers: got 100000000; expected a number from 1 to 1000")],
    "lr": [("x", "lr: got 'x'; expected a value of type float")],
}


@pytest.mark.parametrize("field", OPTIONS)
def test_types_and_ranges_of_options_are_checked(run, field, capsys):
    options = json.loads((run / "model.json").read_text())["options"]
    for value, message in OPTIONS[field]:
        rewrite(run / "model.json", options=options | {field: value})
        for words in (["predict", "run", "t.jsonl"], ["train", "--resume", "run", "--patience", "9"]):
            code, error = fails(capsys, *words)
            assert code == 2 and message in error, error


def test_the_next_command_trains_longer_than_the_run(run, capsys):
    assert cli.main(["train", "--resume", "run", "--epochs", "3"]) == 0
    assert cli.main(["train", "--resume", "run", "--epochs", "1"]) == 0
    assert "nothing is left to train" in (out := capsys.readouterr().out)
    assert out.count("--resume run --epochs 6 ") == 2
    assert cli.main(["train", "--resume", "run", "--epochs", "9", "--max-steps", "13"]) == 0  # the fourth epoch has four steps
    assert "--resume run --max-steps 26 " in capsys.readouterr().out
    assert cli.main(["train", "--resume", "run", "--max-steps", "0", "--patience", "1"]) == 0
    assert "--resume run --patience 2 " in capsys.readouterr().out


def test_a_run_from_before_an_option_existed_takes_its_default(run, capsys):
    options = json.loads((run / "model.json").read_text())["options"]
    rewrite(run / "model.json", options={name: x for name, x in options.items() if name not in ("tune", "patience")})
    assert cli.main(["predict", "run", "t.jsonl"]) == 0
    assert cli.main(["train", "--resume", "run", "--epochs", "3"]) == 0
    assert [record["epoch"] for record in history_of("run")] == [1, 2, 3]
    for name in ("hidden", "seed"):  # without these nobody knows what was trained
        rewrite(run / "model.json", options={other: x for other, x in options.items() if other != name})
        code, error = fails(capsys, "train", "--resume", "run", "--epochs", "4")
        assert code == 2 and "run/model.json: got {" in error and f" {name}," in error, error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"program": "run"}, "does not describe a valid model"),
        ({"program": "lstm"}, "expected"),
        ({"size": 10**12}, "expected"),
        ({"words": ["<unk>"] * 3}, "got "),
        ({"labels": ["a"]}, "expected "),
        ({"words": 3}, "does not describe a valid model"),
    ],
    ids=str,
)
def test_a_small_file_cannot_request_a_large_model(run, change, message, capsys):
    rewrite(run / "model.json", facts=json.loads((run / "model.json").read_text())["facts"] | change)
    code, error = fails(capsys, "predict", "run", "t.jsonl")
    assert code == 2 and message in error and "run/" in error


@pytest.mark.parametrize("name", ["options", "facts", "task"])
def test_facts_of_a_wrong_type_are_refused(run, name, capsys):
    rewrite(run / "model.json", **{name: [3]})
    code, error = fails(capsys, "predict", "run", "t.jsonl")
    assert code == 2 and ("run/model.json" in error or "--task: got '[3]'" in error)


def test_parameters_that_are_not_finite_are_refused(run, monkeypatch, capsys):
    restore = cavs.data.restore_best
    monkeypatch.setattr(cavs.data, "restore_best", lambda *args: jax.tree.map(lambda x: x / 0, restore(*args)))
    code, error = fails(capsys, "predict", "run", "t.jsonl")
    assert code == 2 and "run: got NaN or infinity in the best parameters, at [" in error


def test_arrays_that_would_fill_the_memory_are_refused(run, capsys):
    file = io.BytesIO()
    np.savez_compressed(file, zeros=np.zeros(1 << 20))
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(huge, {"descr": "<f8", "fortran_order": False, "shape": (1 << 58,)})
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("zeros.npy", huge.getvalue())
    for data in (file.getvalue(), other.getvalue(), b"", b"PK", other.getvalue()[:-30]):
        (run / "best.npz").write_bytes(data)
        code, error = fails(capsys, "predict", "run", "t.jsonl")
        assert code == 2 and "run/best.npz is damaged" in error


def test_a_run_whose_output_is_closed_says_how_to_resume(run, monkeypatch, capsys):
    """As with `cavs train | head`: the run ended without a word."""
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(BrokenPipeError), open(write, "w") as out:  # old versions of rich leave a text for the end
        monkeypatch.setattr("sys.stdout", out)
        assert cli.main(["train", "--resume", "run", "--epochs", "3"]) == 1
    error = capsys.readouterr().err
    assert "cannot be written or read (Broken pipe). Training stopped. The last save is intact. Resume with: " in error
    monkeypatch.setattr("sys.stdout", None)
    assert cli.main(["predict", "run", "t.jsonl"]) == 0


def test_characters_that_the_output_lacks_are_escaped(run, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", out)
    Path("t.jsonl").write_text('{"children": [[]], "inputs": ["\\u4e2d"]}')
    assert cli.main(["predict", "run", "t.jsonl"]) == 0
    assert out.buffer.getvalue().endswith(b"\t\\u4e2d\n")


def test_control_characters_are_escaped(run, capsys):
    capsys.readouterr()
    assert cli.main(["predict", "run", "t.jsonl", "--vertices"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[4] for line in lines] == ["a\\tb", "\\x1b[2J\\ud800", "a\\tb \\x1b[2J\\ud800", "c"] * 4
    assert {line[2] for line in lines} <= {"x\\ny", "\\u202ez", "w"}
    assert cli.main(["inspect", "t.jsonl"]) == 0
    assert "x\\ny (8), \\u202ez (4)" in capsys.readouterr().out
    assert cavs.io.printable("a\tb") == "a\\tb"
