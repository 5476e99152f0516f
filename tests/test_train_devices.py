"""`cavs train` on several devices and in several processes: the weights of one device, also after a process was killed."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import cli
from cavs._step.rows import _distinct, _sums, added
from tests.small_run import arrays_of
from tests.test_train_memory import numbers

ROOT = Path(__file__).parents[1]
SMALL = ["--hidden", "4", "--batch", "4", "--epochs", "2", "--dropout", "0.5", "--optimizer", "sgd"]


def start(tmp_path: Path, dies: str, options: list[str]) -> list[subprocess.Popen]:
    """Starts the two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, "-m", "tests.train_devices_script"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment, "cwd": tmp_path}
    return [subprocess.Popen([*command, str(number), port, dies, *options], **pipes) for number in range(2)]


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_the_run_resumes_on_one_device(tmp_path: Path) -> None:
    train = numbers(tmp_path / "t.jsonl", 14)
    options = [train, "--dev", train, "--task", "regress", "--program", "elman-rnn", *SMALL]
    started = start(tmp_path, "dies", [*options, "--out", "killed"])
    try:
        jax.config.update("jax_enable_x64", False)  # as in the two processes
        assert cli.main(["train", *options, "--out", str(tmp_path / "whole")]) == 0
        said, error = started[0].communicate(timeout=300)
        quiet = started[1].communicate(timeout=300)[0]
        # Process 0 learns it from a failed sum, or JAX ends it when the heartbeats of process 1 stop.
        assert started[0].returncode in (1, -signal.SIGABRT) and started[1].returncode == -signal.SIGKILL, error
        told = "another process of this run ended" if started[0].returncode == 1 else "another task died"
        assert told in error and "Traceback" not in error
        assert "epoch   1" in said and "epoch   2" not in said and "epoch" not in quiet  # the first process writes and prints
        assert cli.main(["train", "--resume", str(tmp_path / "killed"), "--devices", "1"]) == 0
    finally:
        jax.config.update("jax_enable_x64", True)
        for process in started:
            process.kill()
            process.communicate()
    got, want = (arrays_of(str(tmp_path / name)) for name in ("killed", "whole"))
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--devices", "99"], "--devices: got 99; expected at most 1, the devices that JAX sees"),
        (["--devices", "-1"], "--devices: got -1; expected a number from 0"),
        (["--distributed", "here"], "--distributed: got 'here'; expected HOST:PORT,N,I: the address of process 0"),
        (["--distributed", "here:1,2,2"], "--distributed: got 'here:1,2,2'; expected HOST:PORT,N,I"),
    ],
)
def test_devices_that_are_not_there_are_named(options: list[str], text: str, tmp_path: Path, capsys) -> None:
    assert cli.main(["train", *SMALL, *options, "--out", str(tmp_path / "run")]) == 2
    assert text in capsys.readouterr().err


def test_rows_are_those_of_indexing() -> None:
    table, ids = jnp.arange(12.0).reshape(4, 3), jnp.array([2, -1, 0, 2])
    weight = jnp.cos(jnp.arange(12.0)).reshape(4, 3)
    want, pull = jax.vjp(lambda t: jnp.concatenate([t[2:3], jnp.zeros((1, 3)), t[:1], t[2:3]]), table)
    got, mine = jax.vjp(lambda t: cavs.data.rows(t, ids), table)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(mine(weight)[0], pull(weight)[0])
    distinct, first = _distinct(ids, 4)
    found = added(jnp.zeros_like(table), distinct[None], _sums(weight, first)[None])  # what devices exchange
    np.testing.assert_allclose(found, pull(weight)[0], rtol=1e-12)
    unknown, back = jax.vjp(lambda t: cavs.data.rows(t, jnp.array([4, -1, 0])), table)
    np.testing.assert_array_equal(unknown, [[np.nan] * 3, [0] * 3, [0, 1, 2]])
    np.testing.assert_array_equal(back(jnp.ones((3, 3)))[0], [[1] * 3, *[[0] * 3] * 3])
    with pytest.raises(ValueError, match=r"rows: ids: got shape \(4,\) and dtype float64; expected \(U,\) ints"):
        cavs.data.rows(table, ids + 0.5)
    large, few = jnp.arange(200.0), jnp.array([3, -1, 100], jnp.int8)  # int8 has no 200
    for dtype in (jnp.float32, jnp.bfloat16):
        assert cavs.data.rows(large.astype(dtype), few).tolist() == [3, 0, 100]


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("ids", ["int8", "uint8", "int16", "uint32"])
def test_ids_of_any_width_read_long_tables(ids: str, kind: str) -> None:
    table = jnp.arange(300, dtype=kind)
    got, pull = jax.vjp(lambda t: cavs.data.rows(t, np.array([100, 0, 100], ids)), table)
    assert got.tolist() == [100, 0, 100]
    assert np.flatnonzero(pull(got)[0]).tolist() == [100]


def test_gradients_of_a_row_that_is_read_often_add_up_in_32_bits() -> None:
    """bfloat16 cannot count to 257."""
    ids, table = jnp.zeros(1000, jnp.int32).at[::2].set(-1), jnp.ones((3, 2), jnp.bfloat16)
    got = jax.grad(lambda table: cavs.data.rows(table, ids).astype(jnp.float32).sum())(table)
    assert got.dtype == jnp.bfloat16 and got.tolist() == [[500, 500], [0, 0], [0, 0]]
    assert _sums(jnp.ones(1000, jnp.bfloat16), jnp.zeros(1000, jnp.int32))[0] == 1000  # what devices exchange
