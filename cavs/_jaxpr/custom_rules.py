"""Functions with a derivative of their own in reverse mode, which depends on what is differentiated."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from cavs._graphs.pytree import PyTree
from cavs._jaxpr.equations import is_float
from cavs._jaxpr.mesh_types import zeros
from cavs._jaxpr.reverse_only import Cotangents, Linear, forward_only_p, linear
from cavs._jaxpr.ruled import Arrays, Flat, Rules, Tangents, call, flat, pushed

MSG_LINEARIZED = (
    "{name}: got tangents for a function that jax.linearize returned; expected none, as that function is only transposed. "
    "Write jax.jvp for a derivative in forward mode, and jax.vjp for one in reverse mode."
)
MSG_TWICE = (
    "{name}: got a second derivative in reverse mode, as of jax.grad of jax.grad or of jax.jvp; expected one in forward mode. "
    "Write jax.jvp(jax.grad(loss), (params,), (direction,))[1] for a product with the Hessian, and jax.hessian(loss) for the "
    "Hessian."
)


def reverse_differentiable(
    primal: Callable[..., PyTree],
    forward: Callable[..., tuple[PyTree, Callable[[PyTree], tuple[PyTree, ...]]]],
    name: str,
    once: bool = False,
) -> Callable[..., PyTree]:
    """Returns `primal` with a reverse derivative that depends on which arguments are differentiated.

    Where it is differentiated, a rule finds out which they are, calls `forward`, and returns tangents whose transpose is what
    `forward` returned (`_jaxpr.reverse_only`). In forward mode, the tangents of `primal` are computed.

    Args:
        primal: the function of positional arguments, pytrees of arrays. Like the others, it closes over no tracers.
        forward: `forward(varied, *args) -> (results, pull)`; `varied` are the arguments with bools as leaves. As with
            `jax.vjp`, `pull` is a pytree (a `jax.tree_util.Partial`) that maps cotangents of results to cotangents of args,
            with `None` for what is not differentiated.
        name: of the function, for errors.
        once: whether JAX cannot differentiate these functions in reverse mode, as for loops of unknown length. The error then
            says what to write.
    """

    def seal(tree: PyTree) -> PyTree:
        return in_forward_mode(tree, MSG_TWICE.format(name=name)) if once else tree

    def differentiable(*args: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(args)
        structures = [jax.tree.structure(x) for x in args]
        shapes: list[Any] = []
        run = flat(primal, tree, shapes)

        def push(primals: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
            varied = [t is not None for t in tangents]
            results, pull_back = forward(tree.unflatten(varied), *tree.unflatten(primals))
            outs, shapes[:] = (flattened := jax.tree.flatten(seal(results)))[0], [flattened[1]]
            saved, saved_tree = jax.tree.flatten(pull_back)
            types = [jax.typeof(x).strip_weak_type().to_tangent_aval() for x in outs]
            floats = [i for i, x in enumerate(outs) if is_float(x)]
            out_tree = shapes[0]

            def compute(primals: Arrays, varied_tangents: Arrays) -> Arrays:
                left = iter(varied_tangents)
                _, out_tangents = pushed(run, primals, [next(left) if is_varied else None for is_varied in varied])
                return seal([out_tangents[i] for i in floats])

            def pull(saved: Arrays, float_cts: Cotangents) -> Cotangents:
                cts: list[Any] = [np.zeros(t.shape, jax.dtypes.float0) for t in types]
                for i, ct in zip(floats, float_cts, strict=True):
                    cts[i] = zeros(types[i]) if ct is None else ct
                arg_cts = seal(saved_tree.unflatten(saved)(out_tree.unflatten(cts)))
                pairs = zip(arg_cts, structures, strict=True)
                grads = [g for ct, like in pairs for g in ([None] * like.num_leaves if ct is None else like.flatten_up_to(ct))]
                return [g for g, is_varied in zip(grads, varied, strict=True) if is_varied]

            float_types = tuple(types[i] for i in floats)
            refusal = MSG_LINEARIZED.format(name=name)
            linear_fn = Linear(compute, pull, len(primals), len(saved), float_types, refusal)
            left = iter(linear(linear_fn, primals, saved, [t for t in tangents if t is not None]))
            return outs, [next(left) if is_float(x) else None for x in outs]

        outs = call(_rules(run, push), *leaves)
        return shapes[0].unflatten(outs)

    return differentiable


def _rules(run: Flat, push: Callable[[Arrays, Tangents], tuple[Arrays, Tangents]]) -> Rules:
    """Returns the rules of a function that is differentiated by `push`, batched or not."""

    def batch(over: Callable[..., Flat], dims: list[int | None], operands: Arrays) -> Arrays:
        def of_batch(primals: Arrays, tangents: Tangents) -> tuple[Arrays, Tangents]:
            tangent_dims = [None if t is None else d for t, d in zip(tangents, dims, strict=True)]
            return over(push, (dims, tangent_dims))(primals, tangents)  # type: ignore[return-value]

        return call(_rules(over(run, tuple(dims)), of_batch), *operands)

    return Rules(run, push, batch)


def in_forward_mode(tree: PyTree, refusal: str) -> PyTree:
    """Returns the arrays of a tree. `refusal` is the text of the `TypeError` if they are differentiated in reverse mode."""
    return jax.tree.map(lambda x: forward_only_p.bind(x, refusal=refusal) if is_float(x) else x, tree)
