"""Checkpoints: arrays as `.npz`, everything else as JSON; nothing is pickled, and no write can be half done.

A run's folder holds

    model.json            what the model is: program, sizes, words, labels, configuration (enough, with best, to predict)
    best.json, best-*.npz parameters with the best held-out score
    last.json, last-*.npz parameters, optimiser state, epoch and step (to go on)
    curve.png             the training curve

A JSON file names the `.npz` it belongs to and is put in place last, by a rename: until then the old pair stands.
"""

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cavs._train.config import TrainError

FORMAT = 1


def write_json(path: Path, value: Any) -> None:
    """Writes the whole file or, when interrupted, none of it."""
    _write(path, json.dumps(value, ensure_ascii=False, indent=1, allow_nan=True).encode())


def save(folder: Path, name: str, tree: Any, about: dict[str, Any], step: int) -> None:
    """Saves a pytree of arrays and the facts `about` it as `name`, in place of what was saved under it."""
    arrays: dict[str, Any] = {key: np.asarray(x) for key, x in _named(jax.device_get(tree)).items()}
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    file = folder / f"{name}-{step:08d}.npz"
    _write(file, buffer.getvalue())
    write_json(folder / f"{name}.json", {"format": FORMAT, "arrays": file.name, **about})
    for old in folder.glob(f"{name}-*.npz"):
        if old != file:
            old.unlink(missing_ok=True)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The facts saved as `name`.

    **Raises:** `TrainError` where there are none, they are damaged, or a later version wrote them.
    """
    path = folder / f"{name}.json"
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainError(
            f"{folder} holds no {path.name}; wanted the folder of a run, as `cavs train --out DIR` writes it."
        ) from None
    except (OSError, ValueError) as error:
        raise TrainError(f"{path}: {error}; wanted JSON as `cavs train` writes it.") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        got = about.get("format") if isinstance(about, dict) else type(about).__name__
        raise TrainError(f"{path}: format is {got!r}, wanted {FORMAT}: another version of cavs wrote it.")
    return about


def load(folder: Path, name: str, like: Any) -> tuple[Any, dict[str, Any]]:
    """The pytree saved as `name`, of the structure and shapes of `like`, and the facts about it.

    **Raises:** `TrainError` as `read_json`, and for arrays that are missing or of another shape.
    """
    about = read_json(folder, name)
    path = folder / str(about.get("arrays"))
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise TrainError(f"{path}: {error}; wanted the arrays that {name}.json names.") from error
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


def _named(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
