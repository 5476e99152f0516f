"""Makes the plan of a vertex function, once for given shapes of params, inputs and edges."""

from collections.abc import Hashable
from typing import Any

import jax

# Private: what `jax.jit` traces anew for. It has no public name.
from jax._src import config as _config

from cavs._function.gather_all import NestedGatherAll
from cavs._function.plan import FunctionPlan, make_plan
from cavs._function.trace import ArgumentShapes
from cavs._function.vertex import VertexFunction
from cavs._graphs.pytree import PyTree
from cavs._jaxpr.memo import memoized, results


def plan_of(function: VertexFunction, params: PyTree, inputs: PyTree, most: int = 4, edges: PyTree = None) -> FunctionPlan:
    """Returns F traced, differentiated and split.

    Args:
        params: shapes of the parameters.
        inputs: shapes of ONE vertex's row of the inputs.
        most: no vertex has more children. Only read if F calls `gather_all` within `gather_all`.
        edges: shapes of ONE edge's row of the edges.
    """
    leaves, tree = jax.tree.flatten(ArgumentShapes(params, inputs, edges))
    # JAX's configuration, the mesh that types name inside `jax.shard_map`, and the sizes of axes that F may read.
    context = _config.trace_context()
    shapes = (tree, tuple((x.shape, x.dtype, x.weak_type) for x in leaves))
    if not function.nests_gather_all:
        try:
            return _plan(function, shapes, None, context)
        except NestedGatherAll:
            function.nests_gather_all = True
    return _plan(function, shapes, most, context)


@memoized
def _plan(function: VertexFunction, shapes: tuple[Any, tuple[Any, ...]], most: int | None, context: Hashable) -> FunctionPlan:
    del context  # which tracing reads
    tree, avals = shapes
    arguments = tree.unflatten([jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in avals])
    return make_plan(function, arguments, most)


def plans_of(function: VertexFunction) -> list[FunctionPlan]:
    """Returns the plans that were made of a function, the latest last."""
    return results(_plan, function)


def latest_plan(function: VertexFunction) -> FunctionPlan | None:
    """Returns the plan that was made last, or `None` if there is none."""
    return next(reversed(plans_of(function)), None)
