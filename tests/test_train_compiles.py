"""`cavs train` compiles its programs once each, on a thread, before they are called, and quickly."""

import json
import os
import threading
from typing import Any

import pytest

from cavs import cli
from cavs._step import host_memory
from cavs._train import compile_quickly, run
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
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(host_memory, "_NVIDIA", __file__)
    compile_quickly()
    assert os.environ["XLA_FLAGS"] == flags  # a GPU computes
    monkeypatch.setattr(host_memory, "_NVIDIA", "there is none")
    compile_quickly()
    assert os.environ["XLA_FLAGS"] == then


@pytest.mark.parametrize("size, needed", [("8", True), ("1000000", False)])
def test_little_memory_of_a_gpu_is_taken_when_it_is_needed_unless_the_user_chose(size, needed, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(host_memory, "_NVIDIA", __file__)  # a GPU
    for name in ("PREALLOCATE", "ALLOCATOR", "MEM_FRACTION"):
        monkeypatch.delenv(f"XLA_PYTHON_CLIENT_{name}", raising=False)
    assert not host_memory.keep_host_memory()  # XLA compiles for a GPU on many threads, which would share few arenas
    monkeypatch.setattr(run, "begin", lambda *_: exit(0))  # JAX would start here
    arguments = [
        "train",
        trees(tmp_path / "t.txt", 22),
        "--out",
        str(tmp_path / "run"),
        "--program",
        "tree-fc",
        "--hidden",
        size,
    ]
    for variable, chosen in (("MEM_FRACTION", "0.5"), ("PREALLOCATE", None)):
        with monkeypatch.context() as patch:
            if chosen:
                patch.setenv(f"XLA_PYTHON_CLIENT_{variable}", chosen)
            with pytest.raises(SystemExit):
                cli.main(arguments)
            expected = "false" if needed and not chosen else None
            assert os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None) == expected
