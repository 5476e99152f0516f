"""The folder of a run: one run and one process per folder, kills before the first save, full disks, unwritable files."""

import errno
import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

from cavs import cli
from cavs._readers import files
from cavs._train import checkpoint, folder as folders
from cavs._train.config import Config, TrainError
from cavs._train.loop import Trainer
from tests.small_run import SMALL, arrays_of, fails, rewrite, train_run


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
    before = {path.name: path.read_bytes() for path in run.glob("*.json")}
    with folders.locked(run):
        code, error = fails(capsys, "train", "--resume", "run", "--epochs", "3")
        assert code == 2 and f"run: process {os.getpid()} on " in error and "Wait until it ends" in error
        (tmp_path / "empty").mkdir()
    with folders.locked(tmp_path / "empty"):
        code, error = fails(capsys, "train", "t.jsonl", *SMALL, "--out", "empty")
        assert code == 2 and "is training in it. Wait until it ends, or write --out DIR with another folder" in error
    assert before == {path.name: path.read_bytes() for path in run.glob("*.json")}
    assert [path.name for path in (tmp_path / "empty").iterdir()] == [".lock"]
    with folders.locked(run):  # it is unlocked again
        pass


def test_runs_that_start_together_get_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config(train="t.jsonl")
    with folders.new(config, None) as one, folders.new(config, None) as other:
        assert {one.name, other.name} == {"t", "t-2"}
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as if both looked before either created its folder
    with folders.new(config, None) as third:
        assert third.name == "t-3"


def test_a_run_that_started_meanwhile_is_not_overwritten(run):
    with pytest.raises(TrainError, match="already contains a run"), folders.new(Config(), str(run)):
        pass


def test_files_of_another_run_are_refused(run, capsys):
    names = {json.loads(path.read_text())["run"] for path in run.glob("*.json")}
    assert len(names) == 1
    rewrite(run / "model.json", run="another")
    for words in (["predict", "run", "t.jsonl"], ["train", "--resume", "run"]):
        code, error = fails(capsys, *words)
        assert code == 2 and "belongs to another run than run/model.json" in error


# ---- kills ----


class Killed(BaseException):
    """Simulates SIGKILL: no `except Exception` of the program catches it."""


@pytest.mark.parametrize("write", range(1, 4))
def test_a_run_killed_before_its_first_epoch_is_restarted_or_resumed(run, monkeypatch, write):
    """Killed at one of its first writes (of the arrays, of `last.json`, of `model.json`), and again after them."""
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


def test_temporary_files_of_a_killed_save_are_removed(run):
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


# ---- files that cannot be written ----


@pytest.mark.parametrize("when", range(3))
def test_the_error_of_a_full_disk_names_the_file_and_how_to_resume(run, monkeypatch, capsys, when):
    """The disk is full at the arrays of step 0, at the first save of an epoch, or at the picture."""
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
        code, error = fails(capsys, "train", "t.jsonl", *SMALL, "--epochs", "1", "--out", "new")
    assert code == 1 and f"{seen[-1]} cannot be written (No space left on device)" in error
    if when:
        assert cli.main(["train", "--resume", "new"]) == 0
        assert "The last save is intact." in error and "cavs train --resume new" in error
    else:
        assert "Nothing was saved." in error and not Path("new/model.json").exists()


def test_the_error_of_a_missing_or_invalid_folder_names_it(run, monkeypatch, capsys):
    fit = Trainer.fit

    def goes(trainer, *rest):
        shutil.rmtree(trainer.folder)
        return fit(trainer, *rest)

    monkeypatch.setattr(Trainer, "fit", goes)
    code, error = fails(capsys, "train", "t.jsonl", *SMALL, "--epochs", "1", "--out", "new")
    assert code == 1 and "cannot be written (No such file or directory)" in error and "Nothing was saved." in error
    code, error = fails(capsys, "train", "t.jsonl", *SMALL, "--out", "t.jsonl")
    assert code == 1 and "--out: the folder t.jsonl cannot be created (File exists)" in error
    code, error = fails(capsys, "train", "t.jsonl", *SMALL, "--out", "t.jsonl/new")
    assert code == 1 and "cannot be created (Not a directory)" in error
    code, error = fails(capsys, "predict", "run", "t.jsonl", "--out", "run")
    assert code == 1 and "--out: run cannot be written (Is a directory)" in error
    code, error = fails(capsys, "predict", "t.jsonl", "t.jsonl")
    assert code == 2
    Path("d.txt").mkdir()
    code, error = fails(capsys, "inspect", "d.txt")
    assert code == 2 and "FILE: got d.txt, a directory; expected the path of a file" in error


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_the_error_of_an_output_that_cannot_be_written_names_it(run, capsys):
    code, error = fails(capsys, "predict", "run", "t.jsonl", "--out", "/dev/full")
    assert code == 1 and "--out: /dev/full cannot be written (No space left on device)" in error


def test_the_error_of_a_read_only_folder_names_it(run, monkeypatch, capsys):
    real = os.open

    def read_only(path, flags, *rest, **more):
        if flags & os.O_CREAT and str(path).startswith("run"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", read_only)
    code, error = fails(capsys, "train", "--resume", "run", "--epochs", "3")
    assert code == 1 and "run/.lock cannot be written (Permission denied)" in error
