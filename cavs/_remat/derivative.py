"""Functions of JAX whose derivative keeps the values of a plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex

from cavs._jaxpr.custom_rules import in_forward_mode, reverse_differentiable
from cavs._jaxpr.mesh_types import zeros
from cavs._remat.graph import Kept

Flat = Callable[..., list[Any]]  # a function of flat arrays
Keep = Callable[[list[int]], Kept]  # from the inputs that are differentiated to what is kept


def with_derivative(closed: Any, keep: Keep) -> Flat:
    """Returns the flat function of a closed jaxpr, whose derivative keeps the values that `keep` chooses."""

    def backward(kept: Kept, values: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        outs = [kept.graph.outs[i] for i in kept.graph.float_outs]
        filled = [zeros(x) if isinstance(g, SymbolicZero) else g for x, g in zip(outs, cotangents, strict=True)]
        return kept.pull_back(values, filled, late=True)

    return planned(jex.jaxpr_as_fun(closed), keep, lambda kept, args: kept.forward(args, late=True), backward)


def planned(
    plain: Flat,
    keep: Keep,
    forward: Callable[[Kept, Sequence[Any]], tuple[list[Any], list[Any]]],
    backward: Callable[[Kept, Sequence[Any], Sequence[Any]], list[Any]],
) -> Flat:
    """Returns a flat function with a derivative.

    Args:
        plain: the function.
        keep: is called at each differentiation.
        forward: from what is kept and the inputs to the outputs, and the values for the backward.
        backward: from what is kept, these values and the cotangents of the float outputs, which may be `SymbolicZero`, to
            those of the differentiated inputs.
    """

    def keeping(varied: Sequence[bool], *primals: Any) -> tuple[list[Any], _Saved]:
        kept = keep([i for i, is_varied in enumerate(varied) if is_varied])
        outs, values = forward(kept, primals)
        outs = in_forward_mode(outs, kept.graph.refusal) if kept.graph.refusal else outs
        return outs, _Saved(values, kept, len(primals))

    def pull_back(saved: _Saved, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        graph = saved.kept.graph
        found = backward(saved.kept, saved.values, [cotangents[i] for i in graph.float_outs])
        found = in_forward_mode(found, graph.refusal) if graph.refusal else found
        grads = dict(zip(graph.diff, found, strict=True))
        return tuple(grads.get(i) for i in range(saved.num_inputs))

    return reverse_differentiable(plain, keeping, pull_back, "recompute")


@jax.tree_util.register_pytree_node_class
@dataclass(eq=False)
class _Saved:
    """The values that the forward passes to the backward."""

    values: list[Any]
    kept: Kept
    num_inputs: int

    def tree_flatten(self) -> tuple[tuple[list[Any]], tuple[Kept, int]]:
        return (self.values,), (self.kept, self.num_inputs)

    @classmethod
    def tree_unflatten(cls, aux: tuple[Kept, int], children: tuple[list[Any]]) -> "_Saved":
        return cls(children[0], *aux)
