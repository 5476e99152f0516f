"""The plans of a vertex function, cached on it by the shapes of params and inputs."""

from collections.abc import Hashable

import jax

from cavs._function.gather_all import NestedGatherAll
from cavs._function.plan import FunctionPlan, make_plan
from cavs._function.trace import ArgumentShapes
from cavs._function.vertex import VertexFunction
from cavs._graphs.pytree import PyTree

_NESTED = "nested"  # a key of the cache: whether F calls `gather_all` within `gather_all`, as far as is known


def plan_of(function: VertexFunction, params: PyTree, inputs: PyTree, most: int = 4, edges: PyTree = None) -> FunctionPlan:
    """Returns F traced, differentiated and split.

    Args:
        function: F.
        params: shapes of the parameters.
        inputs: shapes of ONE vertex's row of the inputs.
        most: no vertex has more children. Only read if F calls `gather_all` within `gather_all`.
        edges: shapes of ONE edge's row of the edges.
    """
    given = ArgumentShapes(params, inputs, edges)
    leaves, tree = jax.tree.flatten(given)
    # The types of values inside `jax.shard_map` name its mesh.
    mesh = jax.sharding.get_abstract_mesh()
    context = (jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision, mesh)  # type: ignore[attr-defined]
    shapes = (tree, tuple((x.shape, x.dtype, x.weak_type) for x in leaves), context)
    if _NESTED not in function.cache:
        try:
            return _cached(function, shapes, given, None)
        except NestedGatherAll:
            function.cache[_NESTED] = True
    return _cached(function, shapes, given, most)


def _cached(function: VertexFunction, key: Hashable, shapes: ArgumentShapes, most: int | None) -> FunctionPlan:
    if (key, most) not in function.cache:
        function.cache[key, most] = make_plan(function, shapes, most)
    return function.cache[key, most]


def latest_plan(function: VertexFunction) -> FunctionPlan | None:
    """Returns the plan that was made last, or `None` if there is none."""
    return next((plan for plan in reversed(function.cache.values()) if isinstance(plan, FunctionPlan)), None)
