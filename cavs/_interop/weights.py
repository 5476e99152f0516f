"""Weights as safetensors files: arrays by name, no code, no pickle; other systems read them, too."""

import os
from typing import Any

import jax
import numpy as np

from cavs._interop.names import named_leaves
from cavs._readers.files import open_regular, replacing


def save_params(path: str | os.PathLike[str], params: Any, metadata: dict[str, str] | None = None) -> None:
    """Writes a pytree of arrays as a safetensors file, whole or not at all.

    Tensors are named by their place: "cell.w", "layers.0.b". All dtypes are kept, bfloat16 among them. `metadata`: texts
    for the file's header, such as the sizes that the program was made with; `safetensors.safe_open` reads them.

    **Raises:** `TypeError` for a leaf that is no array, or a PRNG key; `ValueError` where two leaves get one name;
    `ImportError` where safetensors is not installed.
    """
    save_file = _safetensors("save_params").save_file
    arrays = {}
    for name, x in named_leaves(params, "save_params: params").items():
        key = hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
        array = np.zeros((), object) if key else np.asarray(x)
        if array.dtype == object:
            hint = "Save jax.random.key_data(key)" if key else "Of an Equinox module save equinox.filter(module, is_array)"
            raise TypeError(f"save_params: params has a {type(x).__name__} at {name!r}, wanted arrays alone. {hint}.")
        arrays[name] = array
    with replacing(path) as temporary:
        save_file(arrays, temporary, metadata)


def load_params(path: str | os.PathLike[str], like: Any = None) -> Any:
    """The arrays of a safetensors file as a pytree; the program that wrote them is not needed.

    **Arguments:** `like`: a pytree of the structure, shapes and dtypes that are wanted: `program.init(key)`, an Equinox
    module, `jax.eval_shape` of such. `None`: dicts by the parts of the names between dots; where these parts are 0, 1, ...
    a list.

    **Raises:** `ValueError` that names the file, for one that is damaged or no safetensors file; for the first array that the
    file and `like` do not have alike; without `like`, for two arrays of which one would lie inside the other ("a" and "a.b").
    `OSError` for a file that is not there or no file; `ImportError` where safetensors is not installed.
    """
    load_file = _safetensors("load_params").load_file
    open_regular(path).close()
    try:
        arrays = load_file(os.fspath(path))
    except Exception as error:  # safetensors' own, and what NumPy and JAX make of wrong headers
        raise ValueError(f"load_params: {os.fspath(path)} is no whole safetensors file ({error}).") from error
    if like is not None:
        wanted = named_leaves(like, "load_params: like")
        for name in [*wanted, *sorted(arrays)]:
            got, want = (_about(tree.get(name)) for tree in (arrays, wanted))
            if got != want:
                raise ValueError(f"load_params: {path} has {got} at {name!r}, but like has {want}.")
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])
    if list(arrays) == [""]:
        return arrays[""]
    root: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, last = name.split(".")
        level = root
        for part in parents:
            level = level.setdefault(part, {})
            if not isinstance(level, dict):
                break
        if not isinstance(level, dict) or last in level:
            inner = next(other for other in arrays if other.startswith(f"{name}.") or name.startswith(f"{other}."))
            raise ValueError(
                f"load_params: {os.fspath(path)} has arrays {name!r} and {inner!r}, of which one would lie inside the other; "
                "wanted names that nest, or pass like=, a pytree of the structure that was saved."
            )
        level[last] = array
    return _with_lists(root)


def _safetensors(who: str) -> Any:
    try:
        # Named after Flax, but needs JAX alone: the one that knows bfloat16.
        import safetensors.flax
    except ImportError as error:
        raise ImportError(
            f"{who}: safetensors is not installed; wanted it for weights. Write: pip install safetensors"
        ) from error
    return safetensors.flax


def _about(x: Any) -> str:
    return "nothing" if x is None else f"{x.dtype}{list(x.shape)}"


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    inside = {name: _with_lists(x) for name, x in tree.items()}
    numbers = [str(i) for i in range(len(inside))]
    return [inside[i] for i in numbers] if inside and {*inside} == {*numbers} else inside
