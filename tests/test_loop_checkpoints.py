"""`cavs.io.save_checkpoint` and `restore_checkpoint`: a loop continues bit for bit, and so does the program of the guide."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from tests.markdown import ROOT, blocks

GRAPHS = cavs.from_parents([[2, 2, 4, 4, -1]] * 7 + [[1, -1]] * 4, input_id=np.arange(43) % 7)


@cavs.data.step
def step(state: Any, sched: cavs.Schedule) -> tuple[Any, Any]:
    key, used = jax.random.split(state["key"])
    x = state["x"] * 0.9 + jax.random.normal(used, state["x"].shape, state["x"].dtype) * sched.input_id.sum()
    return {"key": key, "x": x, "count": state["count"] + 1}, x.sum()


def initial() -> Any:
    return {"key": jax.random.key(0), "x": np.ones(3, np.float32), "count": 0}


def bits(state: Any) -> list[bytes]:
    found = jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(found)]


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize("stop", [1, 2, 4, 6])
def test_a_loop_continues_within_an_epoch(stop: int, tmp_path: Path) -> None:
    path, options = tmp_path / "runs" / "last.npz", {"steps": 2}

    def run(loader: cavs.data.Loader, state: Any, dispatches: int | None) -> Any:
        done = 0
        while loader.epoch < 2:
            for batches in loader:
                state, _ = step(state, batches)
                done += 1
                if done == dispatches:
                    cavs.io.save_checkpoint(state, path, loader)
                    return state
        return state

    whole = run(cavs.data.Loader(GRAPHS, 3, **options), initial(), None)
    before = initial()
    assert cavs.io.restore_checkpoint(path, before) is before  # there is none yet
    run(cavs.data.Loader(GRAPHS, 3, **options), before, stop)
    loader = cavs.data.Loader(GRAPHS, 3, **options)
    state = cavs.io.restore_checkpoint(path, initial(), loader)
    assert state["count"] == loader.seen > 0
    assert bits(run(loader, state, None)) == bits(whole) and loader.seen == 8
    assert [p.name for p in path.parent.iterdir()] == ["last.npz"]


def test_leaves_of_all_kinds(tmp_path: Path) -> None:
    state = {
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
        "half": [jnp.full((2, 3), 1.5, jnp.bfloat16), jnp.ones(3, jnp.float8_e4m3fn), jnp.arange(4, dtype=jnp.int4)],
        "other eighths": [jnp.arange(3, dtype=jnp.float8_e5m2), jnp.float8_e5m2(0.5), jnp.ones((2, 2), jnp.float8_e4m3fnuz)],
        "numbers": (3, 0.25, True, np.int32(4), None, ()),
        "weak": jnp.full((2,), 0.1),
        "empty": np.zeros((0, 3), np.float32),
        "file": np.array([np.nan, -np.inf, -0.0], np.float32),
        "a/b.npy": np.arange(3, dtype=np.uint8),
        "complex": jnp.ones(2, jnp.complex64) * 1j,
    }
    cavs.io.save_checkpoint(state, tmp_path / "a.npz")
    again = cavs.io.restore_checkpoint(tmp_path / "a.npz", state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
        assert jnp.result_type(x) == y.dtype and np.shape(x) == y.shape
        if not _is_key(y):
            assert jnp.asarray(x).weak_type == y.weak_type
            assert np.asarray(x, y.dtype).tobytes() == np.asarray(y).tobytes()
    assert bits(again["keys"]) == bits(state["keys"])
    cavs.io.save_checkpoint({"best": jnp.bfloat16(0.5), "n": 3}, tmp_path / "b.npz")  # they were 0 before the first step
    assert jax.tree.map(float, cavs.io.restore_checkpoint(tmp_path / "b.npz", {"best": 0, "n": 0})) == {"best": 0.5, "n": 3}
    cavs.io.save_checkpoint(jnp.arange(3), tmp_path / "one.npz")
    assert cavs.io.restore_checkpoint(tmp_path / "one.npz", np.zeros(3, int)).tolist() == [0, 1, 2]


def test_other_states_and_loaders_are_refused(tmp_path: Path) -> None:
    path, loader = tmp_path / "a.npz", cavs.data.Loader(GRAPHS, 3, steps=1)
    next(iter(loader))
    state = {"w": np.ones((2, 3), np.float32), "key": jax.random.key(0)}
    cavs.io.save_checkpoint(state, path, loader)
    for other, text in (
        ({**state, "w": np.ones((2, 4), np.float32)}, r"got float32\[2, 3\] at \['w'\]; expected float32\[2, 4\], as in state"),
        ({**state, "w": np.ones((2, 3), np.float16)}, r"got float32\[2, 3\] at \['w'\]; expected float16\[2, 3\]"),
        ({**state, "key": jax.random.key(0, impl="rbg")}, r"got key<fry>\[\] at \['key'\]; expected key<rbg>\[\]"),
        ({**state, "b": 1}, r"got nothing at \['b'\]; expected int\d+\[\]"),
        ({"w": state["w"]}, r"got key<fry>\[\] at \['key'\]; expected nothing"),
    ):
        with pytest.raises(ValueError, match=rf"restore_checkpoint: {path}: {text}"):
            cavs.io.restore_checkpoint(path, other, loader)
    with pytest.raises(ValueError, match="restore_checkpoint: loaders: got 0; expected 1, as were saved in"):
        cavs.io.restore_checkpoint(path, state)
    with pytest.raises(ValueError, match="restore: state: got the position of a loader with other batches"):
        cavs.io.restore_checkpoint(path, state, cavs.data.Loader(GRAPHS, 4))
    with pytest.raises(ValueError, match=r"save_checkpoint: state: got a leaf \['n'\] that is 1\d+; expected an int that fits"):
        cavs.io.save_checkpoint({"n": 2**70}, path)
    with pytest.raises(TypeError, match=r"save_checkpoint: state: got a str at \['a'\]; expected arrays and numbers"):
        cavs.io.save_checkpoint({"a": "relu"}, path)
    assert cavs.io.restore_checkpoint(path, state, loader)["w"].shape == (2, 3)  # the old file is still there


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path, state = tmp_path / "a.npz", {"a": np.arange(5.0)}
    cavs.io.save_checkpoint(state, path)
    data = path.read_bytes()
    for damaged in [
        data[: len(data) // 2],
        b"",
        b"{}",
        *(data[:i] + bytes([data[i] ^ 8]) + data[i + 1 :] for i in range(len(data))),
    ]:
        path.write_bytes(damaged)
        try:
            found = cavs.io.restore_checkpoint(path, state)
        except ValueError as error:
            assert str(error).startswith(f"restore_checkpoint: {path}")
        else:  # such as the time in the archive
            np.testing.assert_array_equal(found["a"], state["a"])
    np.savez(path, a=np.ones(3))
    with pytest.raises(ValueError, match="is no complete checkpoint"):
        cavs.io.restore_checkpoint(path, state)


PROGRAM = blocks("python", (ROOT / "docs/guide/training.md").read_text().split("## A whole program")[1])[0]
# Runs the program once without and once with an interruption, in two folders.
INTERRUPTED = """
import os, pathlib, sys
import jax, numpy as np

def run(folder, text, interrupt=None):
    os.chdir(folder)
    names = {"interrupt": interrupt}
    exec(compile(text, "program", "exec"), names)
    return names

def interrupt(loader):
    if loader.epoch == 1 and loader.batch > 3:
        raise KeyboardInterrupt

whole, parts, text = sys.argv[1], sys.argv[2], sys.stdin.read()
a = run(whole, text)
try:
    run(parts, text.replace("log(values)", "interrupt(loader); log(values)"), interrupt)
except KeyboardInterrupt:
    print("interrupted")
b = run(parts, text)
assert b["loader"].seen == a["loader"].seen == 18
for x, y in zip(jax.tree.leaves(a["state"]), jax.tree.leaves(b["state"]), strict=True):
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
again = run(parts, text)  # nothing is left to do
assert np.asarray(again["state"][0]["out"]).tobytes() == np.asarray(a["state"][0]["out"]).tobytes()
"""


def test_the_program_of_the_guide_is_short() -> None:
    lines = [line for line in PROGRAM.splitlines() if line.strip()]
    assert len(lines) <= 30 and max(map(len, lines)) <= 120 and ";" not in PROGRAM and "#" not in PROGRAM


@pytest.mark.slow
def test_the_program_of_the_guide_continues_bit_for_bit(tmp_path: Path) -> None:
    text = re.sub(r"while loader.epoch < \d+", "while loader.epoch < 3", PROGRAM)
    folders = [tmp_path / "whole", tmp_path / "parts"]
    for folder in folders:
        folder.mkdir()
        (folder / "cavs").symlink_to(ROOT / "cavs")
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *map(str, folders)], input=text, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout == "interrupted\n", done.stderr
    steps = [[re.search(r'"step": (\d+)', line)[1] for line in (f / "reviews.jsonl").read_text().splitlines()] for f in folders]  # type: ignore[index]
    assert steps == [["6", "12", "18"], ["6", "12", "18"]]  # the log of an interrupted epoch is not written
