"""Checkpoints: arrays as `.npz`, everything else as JSON; nothing is pickled, and no write can be half done.

A run's folder holds

    model.json            what the model is: program, sizes, words, labels, configuration (enough, with best, to predict)
    best.json, best-*.npz parameters with the best held-out score
    last.json, last-*.npz parameters, optimiser state, epoch and step (to go on)
    last-before.json      what was `last` one save earlier, and its last-*.npz: gone on with where `last` is damaged
    curve.png             the training curve

A JSON file names the `.npz` it belongs to and is put in place last, by a rename: until then the old pair stands. It holds
the run that it is of (`run`), the SHA-256 of the `.npz` (`arrays_sha256`), and that of its own content (`sha256`), so that
no flipped bit and no file of another run is taken for what was saved.
"""

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cavs._readers.files import read_whole, write_whole
from cavs._train.config import SaveError, TrainError

FORMAT = 2
BEFORE = "-before"
_MODEL = {"run": str, "task": str, "config": dict, "model": dict, "words": list, "labels": list | None, "files": dict}


class DamagedError(TrainError):
    """A file of a checkpoint is not what was saved."""


def versions() -> dict[str, str]:
    """Of what decides the bits of a step."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")}


def write(path: Path, data: bytes) -> None:
    """Writes the whole file or, when interrupted, none of it. **Raises:** `SaveError` that names the file and the cause."""
    try:
        write_whole(path, data)
    except OSError as error:
        raise SaveError(f"{path} cannot be written ({error.strerror or error}).") from error


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes facts with the checksum that `read_json` looks for."""
    value = {"format": FORMAT, **value}
    text = json.dumps(value | {"sha256": _checksum(value)}, ensure_ascii=False, indent=1, allow_nan=True)
    write(path, text.encode("utf-8", "backslashreplace"))  # words may hold half a surrogate pair: in JSON that is `\ud800`


def save(folder: Path, name: str, tree: Any, about: dict[str, Any], step: int, keep: bool = False) -> None:
    """Saves a pytree of arrays and the facts `about` it as `name`, in place of what was saved under it; with `keep` that
    stays as it was, under another name."""
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
    """The facts saved as `name`, of the run `run` where it is given.

    **Raises:** `TrainError` where there are none, they are damaged, of another run, or another version wrote them.
    """
    path = folder / f"{name}.json"
    try:
        about = json.loads(read_whole(path))
    except FileNotFoundError:
        raise TrainError(
            f"{folder} holds no {path.name}; wanted the folder of a run, as `cavs train --out DIR` writes it."
        ) from None
    except NotADirectoryError:
        raise TrainError(f"{folder} is no folder; wanted that of a run, as `cavs train --out DIR` writes it.") from None
    except OSError as error:
        raise TrainError(f"{path} cannot be read ({error.strerror}); wanted JSON as `cavs train` writes it.") from error
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: {error}; wanted JSON as `cavs train` writes it.") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        got = about.get("format") if isinstance(about, dict) else type(about).__name__
        raise DamagedError(f"{path}: format is {got!r}, wanted {FORMAT}: another version of cavs wrote it, or it is damaged.")
    if about.pop("sha256", None) != _checksum(about):
        raise DamagedError(f"{path} is damaged: it has not the checksum that it was written with.")
    if run is not None and about.get("run") != run:
        raise DamagedError(f"{path} is of another run than {folder}/model.json; wanted files of one run.")
    return about


def read_model(folder: Path) -> dict[str, Any]:
    """The facts of `model.json`, of the types that they are written with.

    **Raises:** `TrainError` as `read_json`.
    """
    about = read_json(folder, "model")
    for name, kind in _MODEL.items():
        if not isinstance(about.get(name), kind):
            raise DamagedError(f"{folder}/model.json: {name} is a {type(about.get(name)).__name__}; it is damaged.")
    for name in ("words", "labels"):
        if not all(isinstance(word, str) for word in about[name] or ()):
            raise DamagedError(f"{folder}/model.json: {name} are no list of texts; it is damaged.")
    return about


def load(folder: Path, name: str, like: Any, run: str | None = None) -> tuple[Any, dict[str, Any]]:
    """The pytree saved as `name`, of the structure and shapes of `like`, and the facts about it.

    **Raises:** `TrainError` as `read_json`, and for arrays that are damaged, missing or of another shape.
    """
    about = read_json(folder, name, run)
    path = folder / os.path.basename(str(about.get("arrays")))
    try:
        data = read_whole(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and read_json(folder, name, run) != about:
            return load(folder, name, like, run)  # a run that goes on has saved meanwhile
        raise DamagedError(f"{path} cannot be read ({error.strerror}); wanted the arrays that {name}.json names.") from error
    if hashlib.sha256(data).hexdigest() != about.get("arrays_sha256"):
        raise DamagedError(f"{path} is damaged: it is not the file that {name}.json was written with.")
    arrays = _arrays(path, data)
    leaves = []
    for key, want in _named(like).items():
        got = arrays.get(key)
        if got is None or got.shape != want.shape or got.dtype != want.dtype:
            has = "nothing" if got is None else f"{got.dtype}{list(got.shape)}"
            raise TrainError(
                f"{path}: {key} is {has}, wanted {want.dtype}{list(want.shape)}; another version of cavs or optax wrote it."
            )
        leaves.append(got)
    return jax.device_put(jax.tree.unflatten(jax.tree.structure(like), leaves)), about


def _arrays(path: Path, data: bytes) -> dict[str, np.ndarray]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            members = file.infolist()
        # We compress nothing; whoever does may mean to fill the memory.
        if any(m.compress_type != zipfile.ZIP_STORED for m in members) or sum(m.file_size for m in members) > len(data):
            raise ValueError("its arrays are compressed")
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except Exception as error:
        # zipfile and numpy raise a dozen types between them, as cavs._readers.npz says.
        raise DamagedError(f"{path}: {error}; wanted arrays as `cavs train` writes them.") from error


def _keep(path: Path, name: Path) -> None:
    """A second name of a file, in place of what was under it: while there is none, `path` itself stands."""
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


def _named(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
