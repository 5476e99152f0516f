"""Paths that are no plain files: links stay links, and pipes and devices are refused before anything is read or replaced."""

import errno
import gc
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import cavs

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")

GRAPHS = cavs.from_parents([[1, -1]])
PLAN = cavs.memory.plan(lambda p, x: jnp.sum(p * x), 1.0, np.ones((4, 3), np.float32), parts=1)
READERS: dict[str, Callable[[Any], Any]] = {
    "read_trees": cavs.read_trees,
    "read_conllu": cavs.io.read_conllu,
    "read_edges": cavs.io.read_edges,
    "read_netlist": cavs.io.read_netlist,
    "load_npz": cavs.io.load_npz,
    "read_vectors": lambda path: cavs.io.read_vectors(path, ["the"]),
    "restore_checkpoint": lambda path: cavs.io.restore_checkpoint(path, {"w": jnp.ones(2)}),
}
WRITERS: dict[str, Callable[[Any, int], None]] = {
    "save_npz": lambda path, number: cavs.io.save_npz(GRAPHS[[0] * number], path),
    "write_edges": lambda path, number: cavs.io.write_edges(GRAPHS[[0] * number], path),
    "save_checkpoint": lambda path, number: cavs.io.save_checkpoint({"w": jnp.ones(number)}, path),
    "BatchPlan.save": lambda path, number: PLAN.save(path),
}


def saved(name: str, number: int, folder: Path) -> bytes:
    path = folder / f"{name}-{number}"
    WRITERS[name](path, number)
    return path.read_bytes()


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("kind", ["relative", "absolute", "of a link", "without a file", "of a folder"])
def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "state", tmp_path / "link"
    names = {"relative": "there/state", "absolute": target, "of a link": "other", "without a file": "there/state"}
    if kind == "of a link":
        (tmp_path / "other").symlink_to("there/state")
    if kind == "of a folder":
        (tmp_path / "folder").symlink_to("there")
        link = tmp_path / "folder" / "state"
    else:
        link.symlink_to(names[kind])
    if kind != "without a file":
        WRITERS[name](target, 1)
    WRITERS[name](link, 2)
    assert link.is_symlink() == (kind != "of a folder") and not target.is_symlink()
    assert target.read_bytes() == saved(name, 2, tmp_path)
    assert [path.name for path in target.parent.iterdir()] == ["state"]  # no temporary file is left


def test_a_checkpoint_creates_the_folder_that_a_link_names(tmp_path: Path) -> None:
    (tmp_path / "last.npz").symlink_to("runs/1/last.npz")
    cavs.io.save_checkpoint({"w": jnp.ones(2)}, tmp_path / "last.npz")
    assert cavs.io.restore_checkpoint(tmp_path / "runs" / "1" / "last.npz", {"w": jnp.zeros(2)})["w"].tolist() == [1, 1]


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_not_a_file_is_not_replaced(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "circle").symlink_to("circle")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path, tmp_path / "circle"):
        with pytest.raises(OSError, match=path.name) as found:
            WRITERS[name](path, 1)
        assert found.value.errno in (errno.EINVAL, errno.ELOOP)
    assert (tmp_path / "pipe").is_fifo() and sorted(path.name for path in tmp_path.iterdir()) == ["circle", "link", "pipe"]


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="the system has no /dev/fd")
@pytest.mark.parametrize("name", WRITERS)
def test_an_open_file_is_not_replaced(tmp_path: Path, name: str) -> None:
    """As `/dev/stdout` is, if the shell redirects it: what the program had printed was lost."""
    with open(tmp_path / "out", "w") as file:
        print("printed before", file=file, flush=True)
        (tmp_path / "link").symlink_to(f"/dev/fd/{file.fileno()}")
        for path in (f"/dev/fd/{file.fileno()}", tmp_path / "link"):
            with pytest.raises(OSError, match="is not a regular file"):
                WRITERS[name](path, 1)
            cavs.data.write_text("é\n", path)
        print("printed after", file=file)
    assert (tmp_path / "out").read_text("utf-8") == "printed before\né\né\nprinted after\n"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # `ZipFile.__del__` writes, too
@pytest.mark.parametrize("name", WRITERS)
def test_an_error_of_a_write_names_the_file(tmp_path: Path, name: str) -> None:
    """As of a full disk: it was the error of an unnamed file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    WRITERS[name](tmp_path / "out", 1)
    old = (tmp_path / "out").read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="out") as found:
            WRITERS[name](tmp_path / "out", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found.value.errno == errno.EFBIG and found.value.filename == str(tmp_path / "out")
    del found
    gc.collect()
    assert (tmp_path / "out").read_bytes() == old and [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", READERS)
def test_pipes_and_devices_are_not_read(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe.bench")
    (tmp_path / "link.bench").symlink_to("pipe.bench")
    (tmp_path / "zeros.bench").symlink_to("/dev/zero")
    for path in tmp_path.iterdir():
        with pytest.raises(OSError, match="is not a regular file") as found:
            READERS[name](path)
        assert found.value.filename == str(path)
        if name != "restore_checkpoint":
            assert f"expected one. Write: cat {path} > FILE, and read that file" in str(found.value)


def test_a_pipe_is_read_as_an_open_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("(2 (2 a) (1 b))\n",))
    writer.start()
    with open(pipe) as file:
        assert cavs.read_trees(file).num_vertices == 3
    writer.join()
