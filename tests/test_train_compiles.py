"""`cavs train` compiles each of its programs once, and quickly."""

import os
from typing import Any

import pytest

import cavs
from cavs import cli
from cavs._step import host_memory
from cavs.recipes.trees import Trees
from tests.small_run import history_of
from tests.test_fit import trees


def test_a_run_traces_each_program_once(tmp_path, monkeypatch):
    traced, loss = [], Trees.loss

    def noted(self: Any, params: Any, batch: Any, key: Any = None) -> Any:
        traced.append("evaluation" if key is None else "training")
        return loss(self, params, batch, key)

    monkeypatch.setattr(Trees, "loss", noted)
    path, run = trees(tmp_path / "t.txt", 22), str(tmp_path / "run")
    options = ["--program", "tree-fc", "--hidden", "8", "--batch", "4", "--out", run]
    assert cli.main(["train", path, *options, "--epochs", "3"]) == 0
    assert traced.count("evaluation") == 1 and 1 <= traced.count("training") <= 3  # one for each shape of batches
    assert len(history_of(run)) == 3


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
    cavs.data.compile_quickly()
    assert os.environ["XLA_FLAGS"] == flags  # a GPU computes
    monkeypatch.setattr(host_memory, "_NVIDIA", "there is none")
    cavs.data.compile_quickly()
    assert os.environ["XLA_FLAGS"] == then
