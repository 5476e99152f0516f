"""`cavs train` compiles its programs once each, on a thread, before they are called."""

import json
import threading
from typing import Any

from cavs import cli
from cavs._train.model import SoftmaxModel
from tests.test_training import trees


def test_a_run_traces_each_program_once_and_before_its_call(tmp_path, monkeypatch):
    traced, objective = [], SoftmaxModel.objective

    def noted(*args: Any, loss: str | None = None, **kwargs: Any) -> Any:
        traced.append(("training" if loss is None else "evaluation", threading.current_thread().name))
        return objective(*args, loss=loss, **kwargs)

    monkeypatch.setattr(SoftmaxModel, "objective", noted)
    path, run = trees(tmp_path / "t.txt", 22), str(tmp_path / "run")
    options = ["--program", "tree-fc", "--hidden", "8", "--batch", "4", "--out", run]
    assert cli.main(["train", path, *options, "--epochs", "2"]) == 0
    assert {name for _, name in traced} == {"cavs-compile"} and [what for what, _ in traced].count("evaluation") == 1
    assert 2 <= len(traced) <= 4  # one for each shape of batches, and the evaluation

    before = len(traced)
    assert cli.main(["train", "--resume", run, "--epochs", "3"]) == 0
    assert {name for _, name in traced[before:]} == {"cavs-compile"}
    assert len(json.loads((tmp_path / "run" / "last.json").read_text())["progress"]["history"]) == 3
