"""Weights as safetensors files: arrays by name, without code or pickle, readable by other frameworks."""

import os
from collections.abc import Mapping
from typing import TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from cavs._function.arrays import beyond_32_bits, check_unmasked
from cavs._graphs.arguments import optional_module
from cavs._graphs.checks import check_type
from cavs._graphs.files import check_path, open_regular, replacing
from cavs._graphs.pytree import PyTree
from cavs._readers.names import aval_of, describe_array, named_leaves, nested

Params = TypeVar("Params")
SAFETENSORS = "safetensors.flax"  # despite its name it needs only JAX; it is the module that supports bfloat16
DTYPES = "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 bfloat16 float16 float32 float64 complex64".split()
MSG_SAFETENSORS = "{}: safetensors is not installed; expected it for weights files. Write: pip install safetensors"


def save_params(params: PyTree, path: str | os.PathLike[str], metadata: dict[str, str] | None = None) -> None:
    """Writes a pytree of arrays to a safetensors file, atomically.

    The names of the tensors are the paths of the leaves, such as "cell.w" or "layers.0.b". Dtypes are preserved, including
    bfloat16.

    Args:
        params: a pytree of arrays.
        path: the file to write.
        metadata: strings for the header of the file, such as the sizes of the program. `safetensors.safe_open` reads them.

    Raises:
        TypeError: `path` is no path, or `metadata` no dict of strings; a leaf is not an array, or is a PRNG key.
        ValueError: two leaves have the same name, or a leaf has a dtype of which safetensors reads no arrays, such as float8.
        ImportError: safetensors is not installed.
    """
    check_path("save_params", path, "Write save_params(params, path).")
    check_type("save_params: metadata", metadata, Mapping | None, "a dict of strings, or None")
    metadata = None if metadata is None else dict(metadata)
    for name, x in (metadata or {}).items():
        if not isinstance(name, str) or not isinstance(x, str):
            raise TypeError(
                f"save_params: metadata: got {name!r}: {x!r:.80}; expected strings. Write {{'hidden': str(hidden)}}."
            )
    save_file = optional_module(SAFETENSORS, MSG_SAFETENSORS.format("save_params")).save_file
    arrays = {}
    for name, x in named_leaves(params, "save_params: params").items():
        check_unmasked(x, "save_params: params", repr(name))
        key = hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
        array = np.zeros((), object) if key else np.asarray(x, order="C")  # safetensors writes memory as it lies
        if array.dtype.kind in "OSU":
            hint = "Write jax.random.key_data(key)" if key else "For an Equinox module write equinox.filter(module, is_array)"
            raise TypeError(f"save_params: params: got a {type(x).__name__} at {name!r}; expected only arrays. {hint}.")
        if name == "__metadata__":
            raise ValueError(f"save_params: params: got a leaf {name!r}, a name of safetensors' own; expected another name.")
        if array.dtype.name not in DTYPES:
            raise ValueError(
                f"save_params: params: got {array.dtype} at {name!r}; expected one of {', '.join(DTYPES)}. Write "
                "x.astype(jnp.bfloat16) for small floats, or cavs.io.save_checkpoint, which stores all dtypes of JAX."
            )
        arrays[name] = array
    with replacing(path) as temporary:
        save_file(arrays, temporary, metadata)


@overload
def load_params(path: str | os.PathLike[str], like: None = None) -> PyTree: ...
@overload
def load_params(path: str | os.PathLike[str], like: Params) -> Params: ...
def load_params(path: str | os.PathLike[str], like: PyTree | None = None) -> PyTree:
    """Loads the arrays of a safetensors file as a pytree. The program that wrote them is not needed.

    Args:
        path: the file to read.
        like: a pytree with the expected structure, shapes and dtypes: `program.init(key)`, an Equinox module, or
            `jax.eval_shape` of one. `None` returns nested dicts whose keys are the parts of the names between dots, and lists
            where these parts are 0, 1, ...

    Returns:
        The arrays, in the structure of `like`, or in dicts and lists. Unless `jax_enable_x64` is set, JAX has 32 bits: a
        float64 becomes a float32, in the file as in `like`.

    Raises:
        ValueError: the file is damaged or not a safetensors file; values do not fit JAX's 32 bits; an array differs from
            `like`; or, without `like`, the name of one array is a prefix of another's ("a" and "a.b").
        OSError: the file does not exist or is not a regular file.
        ImportError: safetensors is not installed.
    """
    check_path("load_params", path, "Write load_params(path).")
    load_file = optional_module(SAFETENSORS, MSG_SAFETENSORS.format("load_params")).load_file
    open_regular(path).close()
    try:
        with jax.enable_x64(True):
            arrays = load_file(os.fspath(path))
    except Exception as error:  # of safetensors, or of NumPy and JAX for an invalid header
        raise ValueError(f"load_params: {os.fspath(path)} is not a complete safetensors file ({error}).") from error
    arrays = {name: _in_jax(x, f"load_params: {os.fspath(path)}: got an array {name!r}") for name, x in arrays.items()}
    if like is not None:
        wanted = {name: aval_of(x, "load_params: like", name) for name, x in named_leaves(like, "load_params: like").items()}
        for name in [*wanted, *sorted(arrays)]:
            got, expected = (describe_array(tree.get(name)) for tree in (arrays, wanted))
            if got != expected:
                raise ValueError(f"load_params: {os.fspath(path)}: got {got} at {name!r}; expected {expected}, as in like.")
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])
    if list(arrays) == [""]:
        return arrays[""]
    try:
        return _with_lists(nested(arrays, "."))
    except ValueError as error:
        raise ValueError(
            f"load_params: {os.fspath(path)}: {error}. Write like=..., a pytree with the structure that was saved."
        ) from error


def _in_jax(x: jax.Array, got: str) -> jax.Array:
    """Returns an array of a file in JAX's 32 or 64 bits. Raises a `ValueError`, which begins with `got`, if it does not fit."""
    if x.dtype == jax.dtypes.canonicalize_dtype(x.dtype):
        return x
    rows = np.asarray(x)
    if text := beyond_32_bits(rows):
        raise ValueError(f"{got} of {text}")
    return jnp.asarray(rows)


def _with_lists(tree: PyTree) -> PyTree:
    """Replaces dicts with the keys "0", "1", ... by lists."""
    if not isinstance(tree, dict):
        return tree
    converted = {name: _with_lists(x) for name, x in tree.items()}
    numbers = [str(i) for i in range(len(converted))]
    return [converted[i] for i in numbers] if converted and {*converted} == {*numbers} else converted
