"""Checkpoints of a training loop: its state and the positions of its loaders in one `.npz` file. Nothing is pickled."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from cavs._feed.loader import Loader
from cavs._function.arrays import beyond_32_bits, check_unmasked
from cavs._graphs.files import check_path, open_regular, replacing, target_of
from cavs._graphs.pytree import PyTree
from cavs._readers.names import describe_array
from cavs._readers.npz import stored_arrays
from cavs._step.donated_state import deleted_named

State = TypeVar("State")

ABOUT = "cavs_checkpoint"  # the array with the JSON of `About`
VERSION = 1
MSG_DAMAGED = "restore_checkpoint: {} is no complete checkpoint ({})."


class About(NamedTuple):
    """What a checkpoint says about itself."""

    version: int  # of this format
    positions: list[dict[str, int]]  # `state` of each loader
    leaves: dict[str, tuple[str, bool]]  # the dtype and shape of each leaf, and whether it is weakly typed, by its path


def save_checkpoint(state: PyTree, path: str | os.PathLike[str], *loaders: Loader) -> None:
    """Writes what a training loop needs to continue bit for bit: its state, and the positions of its loaders.

    ```python
    state = cavs.io.restore_checkpoint("run.npz", state, loader)      # `state` itself if there is no such file yet
    while loader.epoch < 10:
        for batches in loader:
            state, values = step(state, batches)
        cavs.io.save_checkpoint(state, "run.npz", loader)             # also within an epoch
    ```

    The file replaces an older one when it is complete. Its folder is created. If `path` is a symbolic link, the link stays and
    the file that it names is replaced. Of several processes, the first one writes; the others return at once.

    Args:
        state: a pytree of arrays and numbers: parameters, the state of an optimizer, keys of `jax.random`.
        path: the file, usually with the ending `.npz`.
        loaders: the loaders of the loop.

    Raises:
        TypeError, ValueError: `path` is no path; a loader is none; a leaf of the state is neither an array nor a number, or
            does not fit JAX's 32 bits, or is an array that a step has reused.
    """
    check_path("save_checkpoint", path, "Write save_checkpoint(state, path, *loaders).")
    _check_loaders("save_checkpoint", loaders)
    if jax.process_index():
        return
    named = _named(state)
    like = {name: _like(x, "save_checkpoint", name) for name, x in named.items()}
    with deleted_named("save_checkpoint: state"):
        data = jax.device_get({name: jax.random.key_data(x) if _is_key(x) else x for name, x in named.items()})
    arrays = {name: np.asarray(x, None if _is_key(named[name]) else like[name].dtype) for name, x in data.items()}
    # Files do not know bfloat16 and its like, and what NumPy writes for some of them (float8_e5m2), it cannot read.
    arrays = {name: x.view(f"V{x.dtype.itemsize}") if x.dtype.isbuiltin == 2 else x for name, x in arrays.items()}
    leaves = {name: (describe_array(x), x.weak_type) for name, x in like.items()}
    about = About(VERSION, [loader.state() for loader in loaders], leaves)
    arrays[ABOUT] = np.frombuffer(json.dumps(about._asdict()).encode(), np.uint8)
    Path(target_of(path)).parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, **cast(Any, arrays))


def restore_checkpoint(path: str | os.PathLike[str], state: State, *loaders: Loader[Any]) -> State:
    """Reads what [`cavs.io.save_checkpoint`][] wrote, and moves the loaders to the saved positions.

    Args:
        path: the file.
        state: a state with the structure, shapes and dtypes of the saved one, such as the initial state.
        loaders: as many loaders as were saved, of the same batches.

    Returns:
        The saved state; `state` itself if there is no such file.

    Raises:
        TypeError: `path` is no path, or a loader is none.
        ValueError: the file is damaged; it has another state; or its loaders had other batches.
        OSError: the file cannot be read.
    """
    check_path("restore_checkpoint", path, "Write restore_checkpoint(path, state, *loaders).")
    _check_loaders("restore_checkpoint", loaders)
    try:
        with open_regular(path) as file:
            arrays, about = _read(path, file)
    except FileNotFoundError:
        return state
    avals = {name: _like(x, "restore_checkpoint", name) for name, x in _named(state).items()}
    avals = {name: _retyped(x, about.leaves.get(name, ("",))[0]) for name, x in avals.items()}
    for name in [*avals, *sorted(about.leaves)]:
        got, expected = about.leaves.get(name, ("nothing",))[0], describe_array(avals.get(name))
        if got != expected:
            raise ValueError(f"restore_checkpoint: {path}: got {got} at {name}; expected {expected}, as in state.")
    if len(about.positions) != len(loaders):
        raise ValueError(
            f"restore_checkpoint: loaders: got {len(loaders)}; expected {len(about.positions)}, as were saved in {path}."
        )
    try:
        leaves = [_restored(arrays[name], x, about.leaves[name][1]) for name, x in avals.items()]
    except (TypeError, ValueError) as error:
        raise ValueError(MSG_DAMAGED.format(path, error)) from error
    for loader, position in zip(loaders, about.positions, strict=True):
        loader.restore(position)
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def _check_loaders(function: str, loaders: Sequence[object]) -> None:
    for loader in loaders:
        if not hasattr(loader, "state"):  # `Keeper` saves what only has this
            raise TypeError(
                f"{function}: loaders: got a {type(loader).__name__}; expected cavs.data.Loader. Put other values into "
                "the state."
            )


def _read(path: str | os.PathLike[str], file: IO[bytes]) -> tuple[dict[str, np.ndarray], About]:
    try:
        arrays = stored_arrays(file)
        about = About(**json.loads(arrays.pop(ABOUT).tobytes()))
        if {name for name, (_, _) in about.leaves.items()} != {*arrays}:
            raise ValueError("its arrays have other names")
    except Exception as error:  # see stored_arrays
        raise ValueError(MSG_DAMAGED.format(path, f"{error!r:.200}")) from error
    if about.version != VERSION:
        raise ValueError(f"restore_checkpoint: {path}: got a checkpoint of version {about.version}; expected {VERSION}.")
    return arrays, about


def _restored(array: np.ndarray, like: jax.ShapeDtypeStruct, weak: bool) -> jax.Array:
    """A leaf from its array in the file.

    Raises:
        TypeError, ValueError: the array does not have the shape and dtype of `like`.
    """
    if _is_key(like):
        leaf = jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(jnp.empty(0, like.dtype)))
    elif weak:  # only converting a Python number creates such an array
        leaf = jnp.full(array.shape, array.dtype.type(0).item()).at[...].set(array)
    else:
        leaf = jnp.asarray(array.view(like.dtype) if array.dtype.kind == "V" else array)
    if describe_array(leaf) != describe_array(like):
        raise ValueError(f"got {describe_array(leaf)}; expected {describe_array(like)}")
    return leaf


def _like(x: Any, function: str, name: str) -> jax.ShapeDtypeStruct:
    """The shape and dtype that a leaf has in JAX."""
    check_unmasked(x, f"{function}: state", name)
    if text := beyond_32_bits(x):
        raise ValueError(f"{function}: state: got a leaf {name} of {text}")
    try:
        if not hasattr(x, "shape") and not isinstance(x, int | float | complex):  # JAX takes the text "float32" for a dtype
            raise TypeError
        dtype = jnp.result_type(x)
        if isinstance(x, int):
            np.asarray(x, dtype)
    except OverflowError as error:
        raise ValueError(
            f"{function}: state: got a leaf {name} that is {x}; expected an int that fits {dtype}. Write float(...), or "
            "jax.config.update('jax_enable_x64', True) for 64 bits."
        ) from error
    except (TypeError, ValueError) as error:
        got = f"an array of {x.dtype}" if isinstance(x, np.ndarray) else f"a {type(x).__name__}"
        raise TypeError(f"{function}: state: got {got} at {name}; expected arrays and numbers.") from error
    weak = isinstance(x, int | float | complex) and not isinstance(x, bool | np.generic)
    return jax.ShapeDtypeStruct(np.shape(x), dtype, weak_type=getattr(x, "weak_type", weak))


def _retyped(like: jax.ShapeDtypeStruct, saved: str) -> jax.ShapeDtypeStruct:
    """What a leaf is like in a file: a Python number may have taken another dtype in a step."""
    try:
        return jax.ShapeDtypeStruct(like.shape, jnp.dtype(saved.split("[")[0])) if like.weak_type else like
    except TypeError:
        return like


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key)


def _named(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path) or "array": x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
