"""Checkpoints: arrays as `.npz`, everything else as JSON. Nothing is pickled, and every write is atomic.

The folder of a run contains

    model.json             the model: program, sizes, words, labels, configuration (enough, with best, to predict)
    best.json, best-*.npz  the parameters with the best held-out score
    last.json, last-*.npz  parameters, optimiser state, epoch and step (to resume)
    last-before.json       the previous `last` with its own last-*.npz, used to resume if `last` is damaged
    curve.png              the training curve

A JSON file names its `.npz` and is written after it, by a rename: until then the old pair remains valid. It stores the
identifier of its run (`run`), the SHA-256 of the `.npz` (`arrays_sha256`) and the SHA-256 of its own content (`sha256`).
Reading therefore detects every flipped bit and every file that belongs to another run.
"""

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cavs._graphs.pytree import PyTree
from cavs._readers.files import read_whole, write_whole
from cavs._readers.npz import stored_arrays
from cavs._train.config import SaveError, TrainError

FORMAT = 2
BEFORE = "-before"
_MODEL_TYPES = {"run": str, "task": str, "config": dict, "model": dict, "words": list, "labels": list | None, "files": dict}


class DamagedError(TrainError):
    """A file of a checkpoint differs from what was saved."""


def versions() -> dict[str, str]:
    """The versions of the packages that determine the bits of a step."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")}


def write(path: Path, data: bytes) -> None:
    """Writes a file atomically, in the first of several processes.

    Raises a `SaveError` that names the file and the cause if it cannot be written.
    """
    if jax.process_index():  # the first process writes
        return
    try:
        write_whole(path, data)
    except OSError as error:
        raise SaveError(f"{path} cannot be written ({error.strerror or error}).") from error


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a dict as JSON, with the checksum that `read_json` verifies."""
    value = {"format": FORMAT, **value}
    text = json.dumps(value | {"sha256": _checksum(value)}, ensure_ascii=False, indent=1, allow_nan=True)
    write(path, text.encode("utf-8", "backslashreplace"))  # words may contain half a surrogate pair: `\ud800` in JSON


def save(folder: Path, name: str, tree: PyTree, about: dict[str, Any], step: int, keep: bool = False) -> None:
    """Saves a pytree of arrays and the JSON facts `about` it as `name`, replacing the previous save of that name.

    With `keep`, the previous save remains under the name with the suffix `BEFORE`.
    """
    if jax.process_index():  # the first process saves
        return
    arrays: dict[str, Any] = {key: np.asarray(x) for key, x in _named(jax.device_get(tree)).items()}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    data = buffer.getvalue()
    file, now, before = (folder / f"{name}{end}" for end in (f"-{step:08d}.npz", ".json", f"{BEFORE}.json"))
    write(file, data)
    stay = {file.name}
    if keep and now.exists():
        _keep(now, before)
        with contextlib.suppress(TrainError):
            stay.add(str(read_json(folder, before.stem).get("arrays")))
    write_json(now, {**about, "arrays": file.name, "arrays_sha256": hashlib.sha256(data).hexdigest()})
    for old in folder.glob(f"{name}-*.npz"):
        if old.name not in stay:
            with contextlib.suppress(OSError):
                old.unlink()


def read_json(folder: Path, name: str, run: str | None = None) -> dict[str, Any]:
    """Reads the facts saved as `name`.

    Raises:
        TrainError: there are none, they are damaged, another version of cavs wrote them, or they do not belong to `run`.
    """
    path = folder / f"{name}.json"
    try:
        about = json.loads(read_whole(path))
    except FileNotFoundError:
        raise TrainError(
            f"{folder}: there is no {path.name} in it; expected the folder of a run, as `cavs train --out DIR` writes it."
        ) from None
    except NotADirectoryError:
        raise TrainError(
            f"{folder} is not a folder; expected the folder of a run, as `cavs train --out DIR` writes it."
        ) from None
    except OSError as error:
        raise TrainError(f"{path} cannot be read ({error.strerror}); expected JSON as `cavs train` writes it.") from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: {error}; expected JSON as `cavs train` writes it.") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        got = about.get("format") if isinstance(about, dict) else type(about).__name__
        raise DamagedError(
            f"{path}: format: got {got!r}; expected {FORMAT}. Another version of cavs wrote it, or it is damaged."
        )
    if about.pop("sha256", None) != _checksum(about):
        raise DamagedError(f"{path} is damaged: its checksum is wrong.")
    if run is not None and about.get("run") != run:
        raise DamagedError(f"{path} belongs to another run than {folder}/model.json; expected files of one run.")
    return about


def read_model(folder: Path) -> dict[str, Any]:
    """Reads `model.json` and checks the types of its facts. Raises a `TrainError` as `read_json` does."""
    about = read_json(folder, "model")
    for name, kind in _MODEL_TYPES.items():
        if not isinstance(about.get(name), kind):
            raise DamagedError(f"{folder}/model.json: {name}: got a {type(about.get(name)).__name__}; the file is damaged.")
    for name in ("words", "labels"):
        if not all(isinstance(word, str) for word in about[name] or ()):
            raise DamagedError(f"{folder}/model.json: {name}: got values that are not strings; the file is damaged.")
    return about


def load(folder: Path, name: str, like: PyTree, run: str | None = None) -> tuple[PyTree, dict[str, Any]]:
    """Loads the pytree saved as `name`, with the structure and shapes of `like`, and the facts about it.

    Raises:
        TrainError: as `read_json`, and if an array is damaged, missing or has another shape or dtype.
    """
    about = read_json(folder, name, run)
    path = folder / os.path.basename(str(about.get("arrays")))
    try:
        data = read_whole(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and read_json(folder, name, run) != about:
            return load(folder, name, like, run)  # a running training saved again between the two reads
        raise DamagedError(f"{path} cannot be read ({error.strerror}); expected the arrays that {name}.json names.") from error
    if hashlib.sha256(data).hexdigest() != about.get("arrays_sha256"):
        raise DamagedError(f"{path} is damaged: its checksum is not the one in {name}.json.")
    arrays = _arrays(path, data)
    leaves = []
    for key, want in _named(like).items():
        got = arrays.get(key)
        if got is None or got.shape != want.shape or got.dtype != want.dtype:
            has = "nothing" if got is None else f"{got.dtype}{list(got.shape)}"
            raise TrainError(
                f"{path}: {key}: got {has}; expected {want.dtype}{list(want.shape)}. Another version of cavs or optax wrote it."
            )
        leaves.append(got)
    return jax.device_put(jax.tree.unflatten(jax.tree.structure(like), leaves)), about


def _arrays(path: Path, data: bytes) -> dict[str, np.ndarray]:
    try:
        return stored_arrays(io.BytesIO(data))
    except Exception as error:  # see stored_arrays
        raise DamagedError(f"{path}: {error}; expected arrays as `cavs train` writes them.") from error


def _keep(path: Path, name: Path) -> None:
    """Links (or copies) a file to a second name. Between the two system calls `path` itself remains valid."""
    name.unlink(missing_ok=True)
    try:
        os.link(path, name)
    except OSError:  # a file system without links
        try:
            shutil.copyfile(path, name)
        except OSError as error:
            raise SaveError(f"{name} cannot be written ({error.strerror}).") from error


def _checksum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _named(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
