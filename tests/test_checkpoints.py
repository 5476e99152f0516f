"""What befalls a run's folder: two runs at once, kills before the first save, damaged and hostile files, full disks."""

import errno
import hashlib
import io
import json
import os
import shutil
import stat
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from cavs import cli
from cavs._readers import files
from cavs._train import checkpoint, folder as folders
from cavs._train.config import Config, TrainError
from cavs._train.loop import Trainer
from cavs._train.predict import load_model

pytestmark = pytest.mark.usefixtures("compiled")
# Trees with words and labels that no terminal should be shown as they are.
TREE = {"children": [[], [], [0, 1]], "inputs": ["a\tb", "\x1b[2J\ud800", None], "labels": ["x\ny", "\u202ez", "x\ny"]}
LEAF = {"children": [[]], "inputs": ["c"], "labels": ["w"]}
SMALL = ["--hidden", "4", "--batch", "2"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, compiled) -> Path:
    """The folder of a run of two epochs, beside its data."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, [TREE, LEAF] * 4)))
    assert cli.main(["train", str(folder / "t.jsonl"), *SMALL, "--epochs", "2", "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path, monkeypatch) -> Path:
    """A copy of it, in the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "run")
    shutil.copy(trained.parent / "t.jsonl", tmp_path)
    return Path("run")


def told(capsys, *words: str) -> tuple[int, str]:
    """The exit code, and what is said of the mistake, in one line."""
    capsys.readouterr()
    code = cli.main(words)
    error = capsys.readouterr().err
    assert error.count("\n") <= 1 and "Traceback" not in error
    return code, error


def rewritten(path: Path, **change) -> None:
    """A JSON file with other facts and the checksum of these: what somebody means to be read."""
    about = {name: value for name, value in json.loads(path.read_text()).items() if name != "sha256"}
    checkpoint.write_json(path, about | change)


# ---- one run a folder ----


def test_one_process_trains_in_a_folder(run, tmp_path, capsys):
    before = {path.name: path.read_bytes() for path in run.glob("*.json")}
    with folders.locked(run):
        code, error = told(capsys, "train", "--resume", "run", "--epochs", "3")
        assert code == 2 and f"run: process {os.getpid()} on " in error and "wait for its end" in error
        (tmp_path / "empty").mkdir()
    with folders.locked(tmp_path / "empty"):
        code, error = told(capsys, "train", "t.jsonl", *SMALL, "--out", "empty")
        assert code == 2 and "trains in it now; wait for its end, or pass another folder: --out DIR" in error
    assert before == {path.name: path.read_bytes() for path in run.glob("*.json")}
    assert [path.name for path in (tmp_path / "empty").iterdir()] == [".lock"]
    with folders.locked(run):  # left unlocked
        pass


def test_runs_that_start_together_get_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config(train="t.jsonl")
    with folders.new(config, None) as one, folders.new(config, None) as other:
        assert {one.name, other.name} == {"t", "t-2"}
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as both looked before either made its folder
    with folders.new(config, None) as third:
        assert third.name == "t-3"


def test_a_run_that_began_meanwhile_is_not_written_over(run):
    with pytest.raises(TrainError, match="holds a run already"), folders.new(Config(), str(run)):
        pass


def test_every_file_names_its_run_and_files_of_another_are_refused(run, capsys):
    names = {json.loads(path.read_text())["run"] for path in run.glob("*.json")}
    assert len(names) == 1
    rewritten(run / "model.json", run="another")
    for words in (["predict", "run", "t.jsonl"], ["train", "--resume", "run"]):
        code, error = told(capsys, *words)
        assert code == 2 and "is of another run than run/model.json" in error


# ---- kills ----


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the program's runs after it but what a test must undo."""


@pytest.mark.parametrize("write", range(1, 4))
def test_a_run_killed_before_its_first_epoch_is_restarted_or_gone_on_with(run, monkeypatch, write):
    """Killed at its first writes, one after another: of the arrays, of `last.json`, of `model.json`; and after them."""
    left = [write]

    def dies(*_):
        left[0] -= 1
        if not left[0]:
            raise Killed

    replace = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *a: (dies(), replace(*a)))
        with pytest.raises(Killed):
            cli.main(["train", "t.jsonl", *SMALL, "--epochs", "2", "--out", "new"])
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", dies_at_once)
        with pytest.raises(Killed):
            cli.main(["train", "t.jsonl", *SMALL, "--epochs", "2", "--out", "new"])  # restarted, and killed once more
    assert cli.main(["train", "--resume", "new"]) == 0
    assert arrays_of("new").keys() == arrays_of("run").keys()
    for name, array in arrays_of("run").items():
        np.testing.assert_array_equal(arrays_of("new")[name], array)


def dies_at_once(*_):
    raise Killed


def arrays_of(folder: str) -> dict[str, np.ndarray]:
    about = json.loads(Path(folder, "last.json").read_text())
    with np.load(Path(folder, about["arrays"])) as file:
        return {name: file[name] for name in file.files}


def test_what_a_kill_inside_a_save_left_goes(run):
    (run / ".last-00000001.npz.0123.tmp").write_bytes(b"half")
    with folders.locked(run):
        assert not list(run.glob(".*.tmp"))


def test_a_written_file_is_synced_and_so_is_its_name(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    files.write_whole(tmp_path / "a", b"1")
    assert synced == [False, True] and (tmp_path / "a").read_bytes() == b"1"
    with pytest.raises(RuntimeError), files.replacing(tmp_path / "a") as temporary:
        Path(temporary).write_bytes(b"2")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_bytes() == b"1"


# ---- damage ----


@pytest.mark.parametrize("name", ["model", "best", "last"])
def test_every_flipped_bit_is_seen(run, name):
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
            with pytest.raises(TrainError, match=f"{arrays} is damaged: it is not the file that {name}.json"):
                checkpoint.load(run, name, {})
            data[place // 8] ^= 1 << place % 8


@pytest.mark.parametrize("suffix", ["json", "npz"])
def test_a_damaged_last_save_is_gone_on_with_from_the_one_before(run, suffix, capsys):
    want, about = arrays_of("run"), json.loads((run / "last.json").read_text())
    path = run / ("last.json" if suffix == "json" else about["arrays"])
    path.write_bytes(path.read_bytes()[:-40])
    assert cli.main(["train", "--resume", "run"]) == 0
    out = capsys.readouterr().out
    assert f"{path}" in out and "Going on with what was saved before it, last-before.json" in out
    assert "at epoch 2, step 0" in out
    for name, array in arrays_of("run").items():
        np.testing.assert_array_equal(array, want[name])
    assert len(list(run.glob("last-*.npz"))) == 2
    (run / "last-before.json").unlink()
    path = run / json.loads((run / "last.json").read_text())["arrays"]
    path.unlink()
    code, error = told(capsys, "train", "--resume", "run")
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
def test_progress_that_cannot_be_is_refused(run, change, capsys):
    (run / "last-before.json").unlink()
    progress = json.loads((run / "last.json").read_text())["progress"]
    rewritten(run / "last.json", progress=progress | change)
    code, error = told(capsys, "train", "--resume", "run", "--epochs", "3")
    assert code == 2 and "run/last.json: the progress is not that of a run after" in error


CONFIGS = {
    "hidden": [
        ("many", "--hidden is 'many', wanted a value of type int"),
        (0, "--hidden is 0, wanted an integer of at least 1"),
    ],
    "epochs": [(True, "--epochs is True, wanted a value of type int")],
    "layers": [(10**8, "--layers is 100000000, wanted an integer of at most 1000")],
    "lr": [(None, "--lr is None, wanted a value of type float")],
}


@pytest.mark.parametrize("field", CONFIGS)
def test_types_and_ranges_of_a_configuration_are_checked(run, field, capsys):
    config = json.loads((run / "model.json").read_text())["config"]
    for value, message in CONFIGS[field]:
        rewritten(run / "model.json", config=config | {field: value})
        for words in (["predict", "run", "t.jsonl"], ["train", "--resume", "run", "--patience", "9"]):
            code, error = told(capsys, *words)
            assert code == 2 and message in error


def test_other_versions_of_jax_and_optax_are_told(run, capsys):
    rewritten(run / "last.json", versions={"jax": "0.1", "optax": "0.2"})
    assert cli.main(["train", "--resume", "run"]) == 0
    assert "saved with jax 0.1, optax 0.2, gone on with by jax 0." in capsys.readouterr().out
    assert cli.main(["train", "--resume", "run", "--epochs", "3"]) == 0
    assert cli.main(["train", "--resume", "run"]) == 0
    assert "saved with" not in capsys.readouterr().out.rsplit("going on", 1)[1]


# ---- hostile files ----


MODELS = {
    "program_fields": [
        ({"layers": 10**8}, "layers is 100000000, wanted 1 to 1000"),
        ({"hidden": 0}, "hidden is 0, wanted 1 to"),
        ({"hidden": "x"}, "tells of no model that can be made"),
    ],
    "program": [("run", "program is 'run', wanted a vertex program of cavs"), ("MultiLayerLSTM", "no model that can be made")],
    "num_words": [(10**12, "num_words is 1000000000000"), (2**30, "words and 3 labels are not as many as it has")],
}


@pytest.mark.parametrize("field", MODELS)
def test_a_file_of_a_few_bytes_asks_for_no_large_model(run, field, capsys):
    model = json.loads((run / "model.json").read_text())["model"]
    for value, message in MODELS[field]:
        new = model[field] | value if isinstance(value, dict) else value
        rewritten(run / "model.json", model=model | {field: new})
        code, error = told(capsys, "predict", "run", "t.jsonl")
        assert code == 2 and message in error and "run/model.json" in error


@pytest.mark.parametrize("name", ["config", "words", "labels", "model", "files", "run", "task"])
def test_facts_of_another_type_are_refused(run, name, capsys):
    rewritten(run / "model.json", **{name: [3]})
    for words in (["predict", "run", "t.jsonl"], ["train", "--resume", "run"]):
        code, error = told(capsys, *words)
        assert code == 2 and f"run/model.json: {name} " in error


def with_arrays(run: Path, data: bytes) -> None:
    (run / "new.npz").write_bytes(data)
    rewritten(run / "best.json", arrays="new.npz", arrays_sha256=hashlib.sha256(data).hexdigest())


def test_arrays_that_would_fill_the_memory_are_refused(run):
    file = io.BytesIO()
    np.savez_compressed(file, zeros=np.zeros(1 << 20))
    with_arrays(run, file.getvalue())
    with pytest.raises(TrainError, match=r"run/new.npz: its arrays are compressed; wanted arrays as `cavs train` writes them"):
        load_model(run)
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(huge, {"descr": "<f8", "fortran_order": False, "shape": (1 << 58,)})
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("zeros.npy", huge.getvalue())
    for data in (file.getvalue(), b"", b"PK", file.getvalue()[:-30]):
        with_arrays(run, data)
        with pytest.raises(TrainError, match="run/new.npz: .*; wanted arrays as `cavs train` writes them"):
            load_model(run)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("name", ["model.json", "best.json", "arrays"])
def test_a_pipe_is_no_checkpoint(run, name, capsys):
    path = run / (json.loads((run / "best.json").read_text())["arrays"] if name == "arrays" else name)
    path.unlink()
    os.mkfifo(path)
    code, error = told(capsys, "predict", "run", "t.jsonl")
    assert code == 2 and f"{path} cannot be read (is no regular file)" in error


def test_weights_that_are_nan_predict_nothing(run, capsys):
    about, _, weights = load_model(run)
    weights.params["w"] = weights.params["w"].at[0, 0].set(np.nan)
    checkpoint.save(run, "best", weights, {"run": about["run"]}, 7)
    code, error = told(capsys, "predict", "run", "t.jsonl")
    assert code == 2 and "run/best-00000007.npz holds NaN or infinity at .params['w'], wanted finite weights" in error


def test_control_characters_reach_neither_terminal_nor_cells(run, capsys):
    capsys.readouterr()
    assert cli.main(["predict", "run", "t.jsonl", "--vertices"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[4] for line in lines] == ["a\\tb", "\\x1b[2J\\ud800", "", "c"] * 4
    assert {line[2] for line in lines} <= {"x\\ny", "\\u202ez", "w"}
    assert cli.main(["inspect", "t.jsonl"]) == 0
    assert "x\\ny (8), \\u202ez (4)" in capsys.readouterr().out


# ---- files that cannot be written ----


@pytest.mark.parametrize("when", range(3))
def test_a_full_disk_is_told_with_the_file_and_how_to_go_on(run, monkeypatch, capsys, when):
    """At the arrays of step 0, at the first save of an epoch, at the picture."""
    suffix, after = ((".npz", 0), (".npz", 2), ("curve.png", 0))[when]
    seen = []

    def full(path, data):
        if str(path).endswith(suffix):
            seen.append(path)
            if len(seen) > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{path}.tmp")
        files.write_whole(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_whole", full)
        code, error = told(capsys, "train", "t.jsonl", *SMALL, "--epochs", "1", "--out", "new")
    assert code == 1 and f"{seen[-1]} cannot be written (No space left on device)" in error
    if when:
        assert cli.main(["train", "--resume", "new"]) == 0
        assert "what was saved before stands; to go on with it" in error and "cavs train --resume new" in error
    else:
        assert "nothing is saved; to start again" in error and not Path("new/model.json").exists()


def test_a_folder_that_is_gone_or_a_file_is_told(run, monkeypatch, capsys):
    fit = Trainer.fit

    def goes(trainer, *rest):
        shutil.rmtree(trainer.folder)
        return fit(trainer, *rest)

    monkeypatch.setattr(Trainer, "fit", goes)
    code, error = told(capsys, "train", "t.jsonl", *SMALL, "--epochs", "1", "--out", "new")
    assert (
        code == 1 and "cannot be written (No such file or directory)" in error and "nothing is saved; to start again" in error
    )
    code, error = told(capsys, "train", "t.jsonl", *SMALL, "--out", "t.jsonl")
    assert code == 1 and "--out: the folder t.jsonl cannot be made (File exists)" in error
    code, error = told(capsys, "train", "t.jsonl", *SMALL, "--out", "t.jsonl/new")
    assert code == 1 and "cannot be made (Not a directory)" in error
    code, error = told(capsys, "predict", "run", "t.jsonl", "--out", "run")
    assert code == 1 and "--out: run cannot be written (Is a directory)" in error
    code, error = told(capsys, "predict", "t.jsonl", "t.jsonl")
    assert code == 2
    Path("d.txt").mkdir()
    code, error = told(capsys, "inspect", "d.txt")
    assert code == 1 and "d.txt cannot be read or written (Is a directory)" in error


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_predictions_that_cannot_be_written_are_told(run, capsys):
    code, error = told(capsys, "predict", "run", "t.jsonl", "--out", "/dev/full")
    assert code == 1 and "--out: /dev/full cannot be written (No space left on device)" in error


def test_a_folder_that_cannot_be_written_is_told(run, monkeypatch, capsys):
    real = os.open

    def read_only(path, flags, *rest, **more):
        if flags & os.O_CREAT and str(path).startswith("run"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    code, error = told(capsys, "train", "--resume", "run", "--epochs", "3")
    assert code == 1 and "run/.lock cannot be written (Permission denied)" in error


def test_jax_arrays_come_back_as_they_were(tmp_path):
    tree = {"a": jax.numpy.arange(3.0), "b": [jax.numpy.int32(4)]}
    checkpoint.save(tmp_path, "last", tree, {"run": "r"}, 1)
    got, about = checkpoint.load(tmp_path, "last", jax.eval_shape(lambda: tree), "r")
    assert about["run"] == "r"
    for one, other in zip(jax.tree.leaves(tree), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_save_while_one_reads_is_read_in_its_place(tmp_path, monkeypatch):
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
