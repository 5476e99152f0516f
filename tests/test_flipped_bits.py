"""One wrong bit of a saved file is harmless, or an error that names the file: nothing is lost without a word."""

import gzip
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs._readers.npz import graphs_from_bytes, graphs_to_bytes
from tests.random_graphs import assert_same

GRAPHS = cavs.Graphs.build([3, 1], [2, 0, 0, 0], [1, 2], label=[1, 0, 2, 0], input_id=[-1, 0, 1, 2], vocab=["a", "b", "é"])
STATE = {"w": jnp.arange(6.0).reshape(2, 3), "step": 3}


def flips(data: bytes, all_from: int, each: int) -> Iterator[bytes]:
    """Returns `data` with each bit of the bytes from `all_from` on flipped, and with one random bit of every `each`-th byte."""
    rng = np.random.default_rng(0)
    some = [(i, int(rng.integers(8))) for i in range(0, all_from, each)]
    for i, bit in [*some, *((i, bit) for i in range(all_from, len(data)) for bit in range(8))]:
        changed = bytearray(data)
        changed[i] ^= 1 << bit
        yield bytes(changed)


def directory(data: bytes) -> int:
    """Where the directory of a zip file begins."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.start_dir  # type: ignore[attr-defined]


def rewritten(data: bytes, content: dict[str, bytes], **how: Any) -> bytes:
    """A zip file with other content of some members."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", **how) as new:
        for name in old.namelist():
            new.writestr(name, content.get(name, old.read(name)))
    return out.getvalue()


def test_graphs() -> None:
    data, harmless = graphs_to_bytes(GRAPHS), 0
    for changed in flips(data, directory(data), each=3):
        try:
            found = graphs_from_bytes("some/graphs.npz", changed)
        except cavs.io.FormatError as error:
            assert str(error).startswith("some/graphs.npz: got ")
            continue
        assert_same(found, GRAPHS)
        harmless += 1
    assert harmless  # such as a time


def test_compressed_graphs(tmp_path: Path) -> None:
    path = tmp_path / "graphs.npz.gz"
    cavs.io.save_npz(GRAPHS, path)
    data, harmless = path.read_bytes(), 0
    headers, rests = flips(data[:10], 0, 1), flips(data[10:], len(data) - 18, 2)
    for changed in [*(header + data[10:] for header in headers), *(data[:10] + rest for rest in rests)]:
        path.write_bytes(changed)
        try:
            found = cavs.io.load_npz(path)
        except cavs.io.FormatError as error:
            assert str(error).startswith(f"{path}: got ")
            continue
        assert_same(found, GRAPHS)
        harmless += 1
    assert harmless


def test_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    cavs.io.save_checkpoint(STATE, path)
    data, start, harmless = path.read_bytes(), jax.tree.map(lambda x: 0 * x, STATE), 0
    for changed in flips(data, directory(data), each=3):
        path.write_bytes(changed)
        try:
            found = cavs.io.restore_checkpoint(path, start)
        except ValueError as error:
            assert f"restore_checkpoint: {path} " in str(error)
            continue
        assert jax.tree.map(np.array_equal, found, STATE) == {"w": True, "step": True}
        harmless += 1
    assert harmless


def test_a_member_that_is_no_array_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    for name in ("children.npy", "cavs_version.npy", "vocab.bytes.npy", "label.npy"):
        path.write_bytes(rewritten(graphs_to_bytes(GRAPHS), {name: b"junk"}))
        with pytest.raises(cavs.io.FormatError, match=f"a.npz: got .*its member '{name.removesuffix('.npy')}' is not an array"):
            cavs.io.load_npz(path)
    cavs.io.save_checkpoint(STATE, path)
    data = path.read_bytes()
    for name in ("['w'].npy", "['step'].npy", "cavs_checkpoint.npy"):
        path.write_bytes(rewritten(data, {name: b"junk"}))
        with pytest.raises(ValueError, match="a.npz is no complete checkpoint .*is not an array"):
            cavs.io.restore_checkpoint(path, STATE)


def test_what_others_write_is_read(tmp_path: Path) -> None:
    data = graphs_to_bytes(GRAPHS)
    with np.load(io.BytesIO(data)) as file:
        np.savez_compressed(tmp_path / "a.npz", **file)
    (tmp_path / "b.npz").write_bytes(rewritten(data, {}))
    (tmp_path / "c.npz.gz").write_bytes(gzip.compress(data))
    for name in ("a.npz", "b.npz", "c.npz.gz"):
        assert_same(cavs.io.load_npz(tmp_path / name), GRAPHS)
