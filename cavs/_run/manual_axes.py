"""`run` inside `jax.shard_map` with `check_vma=True`: a call whose inside JAX does not check.

With the check, the type of every value says along which mesh axes it may differ between devices, and an operation refuses
operands that differ in this. The sweeps bind equations of F that were traced before, and create constants, which are the same
on all devices. Inside a sweep nothing communicates, so the types are no help there. They matter at the border: all arguments
are made to vary first, and so are all results. The transpose of that is the sum over devices that the gradients of common
parameters need. A sweep stays one equation (`_jaxpr.ruled.sealed`), because JAX checks again what it traces again.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from cavs._graphs.pytree import PyTree
from cavs._jaxpr.custom_rules import reverse_differentiable
from cavs._jaxpr.jaxprs import Arrays
from cavs._jaxpr.mesh_types import is_checked, vary
from cavs._jaxpr.ruled import sealed
from cavs._jaxpr.tunable import tunable, tuned
from cavs._stages.cotangents import differentiated, with_differentiated


def devices() -> tuple[tuple[str, ...], int]:
    """Returns the mesh axes of the `shard_map` that is being traced, and its number of devices; () and 1 outside of one."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(mesh.manual_axes)
    return axes, math.prod(mesh.shape[axis] for axis in axes)


def checked_axes() -> tuple[str, ...]:
    """Returns the mesh axes of the `shard_map` that is being traced if it checks types, else ()."""
    return devices()[0] if is_checked() else ()


def across_axes(call: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """Returns `call` for use inside a `shard_map` that checks types. Elsewhere it is `call` itself."""
    if not (axes := checked_axes()):
        return call
    return tunable(lambda options: (_across(call if options is None else tuned(call, options), axes), ""), None)


def _across(call: Callable[..., Arrays], axes: tuple[str, ...]) -> Callable[..., Arrays]:
    """Returns `call` for use inside a `shard_map` over these axes."""

    def forward(varied: PyTree, *values: PyTree) -> PyTree:
        def saving(*values: PyTree) -> PyTree:
            return jax.vjp(lambda floats: call(*with_differentiated(values, floats)), differentiated(values, varied))

        outs, pull = sealed(saving)(*values)
        return outs, jax.tree_util.Partial(backward, pull)

    def backward(pull: Callable[[PyTree], PyTree], cts: PyTree) -> PyTree:
        floats = [None if ct.dtype == jax.dtypes.float0 else vary(jnp.asarray(ct), axes) for ct in cts]
        zero_cts = [np.zeros(ct.shape, jax.dtypes.float0) for ct in cts]

        def pulled(pull: Callable[[PyTree], PyTree], floats: PyTree) -> PyTree:
            return pull(with_differentiated(zero_cts, floats))[0]

        return sealed(pulled)(pull, floats)

    function = reverse_differentiable(sealed(call), forward, "run", once=True)
    return lambda *args: function(*jax.tree.map(lambda x: vary(x, axes), args))
