"""`from_cell`: a recurrent cell `(params, carry, x) -> (carry, y)` of any library as a vertex function."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cavs._function.gather_all import REDUCERS
from cavs._function.vertex import Vertex, VertexFunction


def from_cell(cell: Callable[[Any, Any, Any], tuple[Any, Any]], carry: Any, *, reduce: str | None = None) -> VertexFunction:
    """F from a recurrent cell: a vertex gathers the carry of its child, pulls x, scatters the new carry and pushes y.

    ```python
    F = cavs.interop.from_cell(linen_cell.apply, linen_cell.initialize_carry(key, (inputs,)))           # Flax linen
    F = cavs.interop.from_cell(lambda cell, carry, x: cell(carry, x), nnx_cell.initialize_carry(...))   # Flax NNX
    F = cavs.interop.from_cell(lambda cell, carry, x: 2 * (cell(x, carry),), jnp.zeros(hidden))         # Equinox
    F = cavs.interop.from_cell(lambda p, carry, x: core.apply(p, x, carry)[::-1], jnp.zeros(hidden))    # Haiku
    ```

    `params` of `cavs.run` is then what the cell's first argument is: Flax's variables, the NNX or the Equinox module
    itself.

    **Arguments:**

    - `cell`: a pure function `cell(params, carry, x) -> (carry, y)` for ONE position, without a batch axis; `x` is
      `v.pull()`, a dict where `inputs` is one.
    - `carry`: what a leaf starts from: a pytree of arrays; or, for zeros, of `jax.ShapeDtypeStruct`s.
    - `reduce`: how the carries of several children become one, as in `v.gather_all`: `"sum"`, `"mean"` or `"max"`, for
      trees and DAGs. `None`: sequences, one child a vertex.

    **Raises:** `TypeError` for a carry of other leaves and for a cell that returns no pair; `ValueError` for an unknown
    `reduce`; what the cell returns must fit `carry` in structure, shapes and dtypes (`v.scatter` checks).
    """
    if not callable(cell):
        raise TypeError(f"from_cell: cell is a {type(cell).__name__}, wanted a function cell(params, carry, x) -> (carry, y).")
    if reduce is not None and (reduce not in REDUCERS or reduce == "softmax"):
        raise ValueError(f"from_cell: reduce is {reduce!r}, wanted 'sum', 'mean', 'max', or None for sequences.")
    leaves, tree = jax.tree.flatten(carry)
    for x in leaves:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(
                f"from_cell: carry has a leaf {x!r}; wanted arrays, such as (jnp.zeros(64), jnp.zeros(64)): the carry before "
                "the first position."
            )
    if not leaves:
        raise ValueError("from_cell: carry is empty; wanted arrays, such as (jnp.zeros(64), jnp.zeros(64)).")
    # A carry of zeros is what a leaf gathers anyway: known to be zero, so that its products are skipped.
    zeros = all(isinstance(x, jax.ShapeDtypeStruct) or not np.asarray(x).any() for x in leaves)
    start = None if zeros else tree.unflatten([jnp.zeros(x.shape, x.dtype) + (0 if _is_shape(x) else x) for x in leaves])

    def one_vertex(params: Any, v: Vertex) -> None:
        if v.is_leaf() and start is not None:
            before = start
        else:
            before = v.gather(0) if reduce is None else v.gather_all(reduce=reduce)
        out = cell(params, before, v.pull())
        if not isinstance(out, tuple) or len(out) != 2:
            got = f"a tuple of {len(out)}" if isinstance(out, tuple) else f"a {type(out).__name__}"
            raise TypeError(
                f"from_cell: the cell returned {got}, wanted (carry, y). For a cell that returns the carry alone, as "
                "Equinox' do, write from_cell(lambda cell, carry, x: 2 * (cell(x, carry),), carry)."
            )
        v.scatter(out[0])
        v.push(out[1])

    state = tree.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
    return VertexFunction(one_vertex, state=state, arity=0 if reduce else 1)


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)
