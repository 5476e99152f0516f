"""Checkpoints: exact round trips, damaged files, and files written by an attacker."""

import hashlib
import io
import json
import os
import shutil
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from cavs import cli
from cavs._train import checkpoint
from cavs._train.config import TrainError
from cavs._train.predict import load_model
from tests.small_run import arrays_of, fails, rewrite, train_run


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


# ---- round trips ----


def test_arrays_are_restored_exactly(tmp_path):
    tree = {"a": jax.numpy.arange(3.0), "b": [jax.numpy.int32(4)]}
    checkpoint.save(tmp_path, "last", tree, {"run": "r"}, 1)
    got, about = checkpoint.load(tmp_path, "last", jax.eval_shape(lambda: tree), "r")
    assert about["run"] == "r"
    for one, other in zip(jax.tree.leaves(tree), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_save_between_two_reads_is_read_instead(tmp_path, monkeypatch):
    tree = {"a": jax.numpy.arange(3.0)}
    checkpoint.save(tmp_path, "best", tree, {"run": "r"}, 1)
    read, saves = checkpoint.read_whole, [2]

    def read_late(path):
        if str(path).endswith(".npz") and saves:
            checkpoint.save(tmp_path, "best", {"a": tree["a"] + 1}, {"run": "r"}, saves.pop())
        return read(path)

    monkeypatch.setattr(checkpoint, "read_whole", read_late)
    got, about = checkpoint.load(tmp_path, "best", jax.eval_shape(lambda: tree), "r")
    assert about["arrays"] == "best-00000002.npz"
    np.testing.assert_array_equal(got["a"], [1, 2, 3])


# ---- damage ----


@pytest.mark.parametrize("name", ["model", "best", "last"])
def test_every_flipped_bit_is_detected(run, name):
    path = run / f"{name}.json"
    whole = path.read_bytes()
    facts = checkpoint.read_json(run, name)
    rng = np.random.default_rng(0)
    for place in rng.integers(0, 8 * len(whole), 400):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(data)
        try:
            got = checkpoint.read_json(run, name)
        except TrainError as error:
            assert str(path) in str(error)
        else:  # in white space
            assert got == facts
    path.write_bytes(whole)
    (arrays,) = [run / checkpoint.read_json(run, name)["arrays"]] if name != "model" else [None]
    if arrays is not None:
        data = bytearray(arrays.read_bytes())
        for place in rng.integers(0, 8 * len(data), 20):
            data[place // 8] ^= 1 << place % 8
            arrays.write_bytes(data)
            with pytest.raises(TrainError, match=f"{arrays} is damaged: its checksum is not the one in {name}.json"):
                checkpoint.load(run, name, {})
            data[place // 8] ^= 1 << place % 8


@pytest.mark.parametrize("suffix", ["json", "npz"])
def test_a_damaged_save_is_replaced_by_the_one_before_it(run, suffix, capsys):
    want, about = arrays_of("run"), json.loads((run / "last.json").read_text())
    path = run / ("last.json" if suffix == "json" else about["arrays"])
    path.write_bytes(path.read_bytes()[:-40])
    assert cli.main(["train", "--resume", "run"]) == 0
    out = capsys.readouterr().out
    assert f"{path}" in out and "Resuming from the save before it, last-before.json" in out
    assert "at epoch 2, step 0" in out
    for name, array in arrays_of("run").items():
        np.testing.assert_array_equal(array, want[name])
    assert len(list(run.glob("last-*.npz"))) == 2
    (run / "last-before.json").unlink()
    path = run / json.loads((run / "last.json").read_text())["arrays"]
    path.unlink()
    code, error = fails(capsys, "train", "--resume", "run")
    assert code == 2 and f"{path} cannot be read (No such file or directory)" in error


@pytest.mark.parametrize(
    "change",
    [
        {"step": -5},
        {"epoch": 0},
        {"epoch": "2"},
        {"step": 99},
        {"history": []},
        {"history": None},
        {"seconds": "long"},
        {"sums": [1]},
        {"more": 1},
    ],
)
def test_inconsistent_progress_is_refused(run, change, capsys):
    (run / "last-before.json").unlink()
    progress = json.loads((run / "last.json").read_text())["progress"]
    rewrite(run / "last.json", progress=progress | change)
    code, error = fails(capsys, "train", "--resume", "run", "--epochs", "3")
    assert code == 2 and "run/last.json: progress: got a value that does not fit" in error


CONFIGS = {
    "hidden": [
        ("many", "--hidden: got 'many'; expected a value of type int"),
        (0, "--hidden: got 0; expected an integer >= 1"),
    ],
    "epochs": [(True, "--epochs: got True; expected a value of type int")],
    "layers": [(10**8, "--layers: got 100000000; expected an integer <= 1000")],
    "lr": [(None, "--lr: got None; expected a value of type float")],
}


@pytest.mark.parametrize("field", CONFIGS)
def test_types_and_ranges_of_a_configuration_are_checked(run, field, capsys):
    config = json.loads((run / "model.json").read_text())["config"]
    for value, message in CONFIGS[field]:
        rewrite(run / "model.json", config=config | {field: value})
        for words in (["predict", "run", "t.jsonl"], ["train", "--resume", "run", "--patience", "9"]):
            code, error = fails(capsys, *words)
            assert code == 2 and message in error


def test_other_versions_of_jax_and_optax_are_reported(run, capsys):
    rewrite(run / "last.json", versions={"jax": "0.1", "optax": "0.2"})
    assert cli.main(["train", "--resume", "run"]) == 0
    assert "saved with jax 0.1, optax 0.2, resumed with jax 0." in capsys.readouterr().out
    assert cli.main(["train", "--resume", "run", "--epochs", "3"]) == 0
    assert cli.main(["train", "--resume", "run"]) == 0
    assert "saved with" not in capsys.readouterr().out.rsplit("resuming", 1)[1]


# ---- files of an attacker ----


MODELS = {
    "program_fields": [
        ({"layers": 10**8}, "layers: got 100000000; expected 1 to 1000"),
        ({"hidden": 0}, "hidden: got 0; expected 1 to"),
        ({"hidden": "x"}, "does not describe a valid model"),
    ],
    "program": [
        ("run", "program: got 'run'; expected a vertex program of cavs"),
        ("MultiLayerLSTM", "does not describe a valid model"),
    ],
    "num_words": [(10**12, "num_words: got 1000000000000"), (2**30, "words and 3 labels, which differ from its sizes")],
}


@pytest.mark.parametrize("field", MODELS)
def test_a_small_file_cannot_request_a_large_model(run, field, capsys):
    model = json.loads((run / "model.json").read_text())["model"]
    for value, message in MODELS[field]:
        new = model[field] | value if isinstance(value, dict) else value
        rewrite(run / "model.json", model=model | {field: new})
        code, error = fails(capsys, "predict", "run", "t.jsonl")
        assert code == 2 and message in error and "run/model.json" in error


@pytest.mark.parametrize("name", ["config", "words", "labels", "model", "files", "run", "task"])
def test_facts_of_a_wrong_type_are_refused(run, name, capsys):
    rewrite(run / "model.json", **{name: [3]})
    for words in (["predict", "run", "t.jsonl"], ["train", "--resume", "run"]):
        code, error = fails(capsys, *words)
        assert code == 2 and f"run/model.json: {name}: " in error


def with_arrays(run: Path, data: bytes) -> None:
    (run / "new.npz").write_bytes(data)
    rewrite(run / "best.json", arrays="new.npz", arrays_sha256=hashlib.sha256(data).hexdigest())


def test_arrays_that_would_fill_the_memory_are_refused(run):
    file = io.BytesIO()
    np.savez_compressed(file, zeros=np.zeros(1 << 20))
    with_arrays(run, file.getvalue())
    with pytest.raises(
        TrainError, match=r"run/new.npz: its arrays are compressed; expected arrays as `cavs train` writes them"
    ):
        load_model(run)
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(huge, {"descr": "<f8", "fortran_order": False, "shape": (1 << 58,)})
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("zeros.npy", huge.getvalue())
    for data in (file.getvalue(), b"", b"PK", file.getvalue()[:-30]):
        with_arrays(run, data)
        with pytest.raises(TrainError, match="run/new.npz: .*; expected arrays as `cavs train` writes them"):
            load_model(run)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("name", ["model.json", "best.json", "arrays"])
def test_a_pipe_is_not_a_checkpoint(run, name, capsys):
    path = run / (json.loads((run / "best.json").read_text())["arrays"] if name == "arrays" else name)
    path.unlink()
    os.mkfifo(path)
    code, error = fails(capsys, "predict", "run", "t.jsonl")
    assert code == 2 and f"{path} cannot be read (is not a regular file)" in error


def test_weights_with_nan_are_refused(run, capsys):
    about, _, weights = load_model(run)
    weights.params["w"] = weights.params["w"].at[0, 0].set(np.nan)
    checkpoint.save(run, "best", weights, {"run": about["run"]}, 7)
    code, error = fails(capsys, "predict", "run", "t.jsonl")
    assert code == 2 and "run/best-00000007.npz: got NaN or infinity at .params['w']; expected finite weights" in error


def test_control_characters_are_escaped(run, capsys):
    capsys.readouterr()
    assert cli.main(["predict", "run", "t.jsonl", "--vertices"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[4] for line in lines] == ["a\\tb", "\\x1b[2J\\ud800", "a\\tb \\x1b[2J\\ud800", "c"] * 4
    assert {line[2] for line in lines} <= {"x\\ny", "\\u202ez", "w"}
    assert cli.main(["inspect", "t.jsonl"]) == 0
    assert "x\\ny (8), \\u202ez (4)" in capsys.readouterr().out
