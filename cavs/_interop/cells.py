"""`from_cell`: a vertex function from a recurrent cell `(params, carry, x) -> (carry, y)` of any library."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from cavs._function.gather_all import REDUCERS
from cavs._function.vertex import Vertex, VertexFunction
from cavs._graphs.arguments import check_takes
from cavs._graphs.pytree import PyTree

Cell: TypeAlias = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


def from_cell(cell: Cell, carry: PyTree, *, reduce: str | None = None) -> VertexFunction:
    """Creates a vertex function from a recurrent cell.

    A vertex gathers the carry of its child, pulls x, scatters the new carry and pushes y:

    ```python
    F = cavs.interop.from_cell(linen_cell.apply, linen_cell.initialize_carry(key, (inputs,)))           # Flax linen
    F = cavs.interop.from_cell(lambda cell, carry, x: cell(carry, x), nnx_cell.initialize_carry(...))   # Flax NNX
    F = cavs.interop.from_cell(lambda cell, carry, x: 2 * (cell(x, carry),), jnp.zeros(hidden))         # Equinox
    F = cavs.interop.from_cell(lambda p, carry, x: core.apply(p, x, carry)[::-1], jnp.zeros(hidden))    # Haiku
    ```

    The `params` of [`cavs.run`][] are then the first argument of the cell: Flax's variables, or the NNX or Equinox module
    itself.

    Args:
        cell: a pure function `cell(params, carry, x) -> (carry, y)` for one position, without a batch axis. `x` is
            `v.pull()`, a dict if `inputs` is a dict.
        carry: the initial carry of a leaf, a pytree of arrays; or, for zeros, of `jax.ShapeDtypeStruct`s.
        reduce: how the carries of several children are combined, as in `v.gather_all`: `"sum"`, `"mean"` or `"max"`, for
            trees and DAGs. `None` is for sequences, in which a vertex has at most one child.

    Returns:
        The vertex function. Its state has the structure, shapes and dtypes of `carry`.

    Raises:
        TypeError: `cell` is no function of three arguments, or returns no pair, or a leaf of `carry` is not an array.
        ValueError: `reduce` is unknown or `carry` is empty. A new carry of another structure, shape or dtype raises when the
            function runs.
    """
    check_takes("from_cell: cell", cell, "params", "carry", "x")
    if reduce is not None and (reduce not in REDUCERS or reduce == "softmax"):
        raise ValueError(f"from_cell: reduce: got {reduce!r}; expected 'sum', 'mean', 'max', or None for sequences.")
    leaves, tree = jax.tree.flatten(carry)
    not_arrays = [x for x in leaves if not hasattr(x, "shape") or not hasattr(x, "dtype")]
    if not_arrays or not leaves:
        got = f"a leaf {not_arrays[0]!r}" if not_arrays else "no leaves"
        raise (TypeError if not_arrays else ValueError)(
            f"from_cell: carry: got {got}; expected arrays, the carry before the first position. Write, for example, "
            "(jnp.zeros(64), jnp.zeros(64))."
        )
    # A leaf gathers zeros by default. If the carry is zero, leaving it out lets the products with it be skipped.
    start = [jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x) for x in leaves]
    start = tree.unflatten(start) if any(np.asarray(x).any() for x in start) else None

    def one_vertex(params: PyTree, v: Vertex) -> None:
        if v.is_leaf() and start is not None:
            before = start
        else:
            before = v.gather(0) if reduce is None else v.gather_all(reduce=reduce)
        out = cell(params, before, v.pull())
        if not isinstance(out, tuple) or len(out) != 2:
            got = f"a tuple of {len(out)}" if isinstance(out, tuple) else f"a {type(out).__name__}"
            raise TypeError(
                f"from_cell: cell: got {got} from it; expected (carry, y). For a cell that returns only the carry, such as "
                "those of Equinox, write cavs.interop.from_cell(lambda cell, carry, x: 2 * (cell(x, carry),), carry)."
            )
        v.scatter(out[0])
        v.push(out[1])

    state = tree.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
    return VertexFunction(one_vertex, state=state, arity=0 if reduce else 1)
