"""`cavs train` compiles its programs once each, on a thread, before they are called, and quickly."""

import json
import os
import threading
from typing import Any

import pytest

from cavs import cli
from cavs._feed import host_memory
from cavs._train import start_quickly
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


@pytest.mark.parametrize(
    ("flags", "then"),
    [
        ("", "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"),
        ("--one=1", "--one=1 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"),
        ("--xla_backend_extra_options=other", "--xla_backend_extra_options=other"),
    ],
)
def test_commands_compile_quickly_unless_the_user_has_options_of_the_code_generator(flags, then, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    start_quickly()
    assert os.environ["XLA_FLAGS"] == then


def test_commands_take_a_gpus_memory_when_it_is_needed_unless_the_user_chose(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(host_memory, "_NVIDIA", __file__)  # a GPU
    for name in ("PREALLOCATE", "ALLOCATOR", "MEM_FRACTION"):
        monkeypatch.delenv(f"XLA_PYTHON_CLIENT_{name}", raising=False)
    with monkeypatch.context() as patch:
        patch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
        start_quickly()
        assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ
    start_quickly()
    assert os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE") == "false" and not os.environ["XLA_FLAGS"]
    assert not host_memory.keep_host_memory()  # XLA compiles for a GPU on many threads, which would share one arena
    monkeypatch.setattr(host_memory, "_NVIDIA", "there is none")
    start_quickly()
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ and os.environ["XLA_FLAGS"]
