"""`DonatedState`: places the state of a step on its devices, in arrays that the step may overwrite."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cavs._function.arrays import beyond_32_bits, check_unmasked
from cavs._graphs.pytree import PyTree

MSG_TRACED = (
    "step: state: got {} that is traced, as inside of jax.jit or jax.grad; expected arrays, as a step compiles itself. Call it "
    "outside, or write step.__wrapped__(state, batch) for the function that it was made of."
)
MSG_DIVIDED = (
    "step: state: got {} that is divided over {} devices ({}); expected a state that each device has in full. Write "
    "jax.device_put(state, jax.devices()[0]), or jax.jit for the step."
)
MSG_LEAF = (
    "step: state: got a leaf {} that is {}; expected arrays and numbers ({}). Keep functions and other static parts out of the "
    "state, as equinox.partition does."
)
MSG_DELETED = (
    "{}: got arrays whose memory an earlier step has reused, as a step updates its state in place; expected the state "
    "that the last step returned. Write state, out = step(state, batches), or @cavs.data.step(donate=False) to keep old states."
)


@contextlib.contextmanager
def deleted_named(argument: str) -> Iterator[None]:
    """A context whose errors about arrays that a step has reused name an argument."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if "deleted" not in str(error):
            raise
        raise ValueError(MSG_DELETED.format(argument)) from error


def of_mesh(x: object) -> bool:
    """Returns whether `x` is an array of the devices of a mesh, which may be one: JAX refuses it beside others."""
    return isinstance(x, jax.Array) and (isinstance(x.sharding, NamedSharding) or len(x.sharding.device_set) > 1)


class DonatedState:
    """The arrays that a step returned. Only these may be overwritten: others are copied first, so the caller's stay valid.

    `donate`: whether the step overwrites its state.
    """

    def __init__(self, donate: bool):
        self._donate = donate
        self._last: PyTree = None  # keeps the arrays, so that no other one gets the same id
        self._mine: frozenset[int] = frozenset()
        self._mesh: Mesh | None = None

    def returned(self, state: PyTree, mesh: Mesh | None) -> None:
        """Notes the state that the step returned."""
        self._last, self._mine, self._mesh = state, frozenset(map(id, jax.tree.leaves(state))), mesh

    def of(self, state: PyTree, mesh: Mesh | None) -> PyTree:
        """Returns a state on the devices of a mesh, or on one device, in arrays that may be overwritten.

        Raises:
            TypeError: a leaf is neither an array nor a number, or is traced.
            ValueError: a leaf is divided over devices.
            ValueError, OverflowError: a number does not fit JAX's 32 bits.
        """
        same_mesh = mesh == self._mesh
        if same_mesh and state is self._last:
            return state
        sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec())

        def writable(path: Any, x: Any) -> Any:
            if same_mesh and id(x) in self._mine and isinstance(x, jax.Array):
                return x
            if text := beyond_32_bits(x):
                raise ValueError(f"step: state: got a leaf {jax.tree_util.keystr(path)} of {text}")
            check_unmasked(x, "step: state", jax.tree_util.keystr(path) or "the root")
            leaf = f"a leaf {jax.tree_util.keystr(path)}" if path else "an array"
            if isinstance(x, Tracer):
                raise TypeError(MSG_TRACED.format(leaf))
            if isinstance(x, jax.Array) and not x.is_fully_replicated:
                raise ValueError(MSG_DIVIDED.format(leaf, len(x.sharding.device_set), x.sharding))
            try:
                return self._copied(x, sharding)
            except (TypeError, OverflowError) as error:
                kind = OverflowError if isinstance(error, OverflowError) else TypeError
                raise kind(MSG_LEAF.format(jax.tree_util.keystr(path), f"{x!r:.80}", error)) from error

        return jax.tree_util.tree_map_with_path(writable, state)

    def _copied(self, x: Any, sharding: NamedSharding | None) -> jax.Array:
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(self._copied(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
        if sharding is not None:
            if isinstance(x, jax.Array) and x.sharding == sharding:
                return x.copy() if self._donate else x
            return jax.device_put(x if isinstance(x, int | float) else np.asarray(x), sharding)  # numbers stay weakly typed
        if of_mesh(x):
            x = np.asarray(x)  # to one device
        if isinstance(x, jax.Array) and not self._donate:
            return x
        return jax.device_put(x, may_alias=False) if isinstance(x, jax.Array | np.ndarray) else jnp.array(x)
