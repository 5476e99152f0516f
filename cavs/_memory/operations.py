"""What XLA makes of an equation: which of its operands and results have buffers, and which of them may be one buffer."""

import copy
from collections.abc import Mapping
from typing import Any

import jax

from cavs._function.costs import CUMULATIVE, REDUCTIONS, is_costly
from cavs._function.jaxprs import Atom, Eqn, Jaxpr, Var, bodies_in, is_var
from cavs._memory.fused_products import is_outer, is_sum

_VIEWS = frozenset({"reshape", "squeeze", "expand_dims"})
_UPDATES = {"dynamic_update_slice", "scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter-min", "scatter-max"}
# A reference takes over the buffer of the array that it begins as, and the array that it is frozen to takes it back.
MOVES = {"new_ref", "freeze"}
_IN_PLACE = {*_UPDATES, *MOVES}
_MOVING = {"transpose", "rev", "gather", "dynamic_slice", "concatenate", "pad", "slice", "roll"}
_EXTERNAL = {"ffi_call", "native_call"}
_LAUNCHES = {"mpmd_map", "pallas_call", "core_map"}  # kernels: what is inside lies on the chip
_REDUCTIONS = REDUCTIONS | CUMULATIVE
# XLA does not compute these twice to fuse them into two readers.
_EXPENSIVE = {"tanh", "logistic", "exp", "log", "div", "erf", "pow", "rsqrt", "sqrt", "sin", "cos", "log1p", "expm1"}


class EqnFacts:
    """What is known of an equation, whatever its operands and results are called. Operands are given by their places.

    Attributes:
        name: of the primitive.
        is_sum: whether this is a reduction, into which XLA fuses the operands.
        alone: whether this is an operation of its own, with buffers for its results.
        stored: the operands that have a buffer.
        views: the primitives whose results are views of a buffer for this operation.
        inside: what is known of its loop bodies or branches.
        twice: whether the result has a buffer if two equations read it.
        alike: the operands that are read at the places that are written.
        overwritable: the operands whose buffers the results may take over.
    """

    def __init__(self, eqn: Eqn) -> None:
        name = self.name = eqn.primitive.name
        self.is_view, self.is_barrier, self.twice = name in _VIEWS, name == "optimization_barrier", name in _EXPENSIVE
        self.is_update = name in _UPDATES
        on_gpu = name == "dot_general" and jax.default_backend() != "cpu"
        as_sum, as_map = on_gpu and is_sum(eqn), on_gpu and is_outer(eqn)
        self.is_sum = name in _REDUCTIONS or as_sum
        self.costly, self.bodies = is_costly(eqn) and not as_sum and not as_map, [] if name in _LAUNCHES else bodies_in(eqn)
        self.inside: dict[tuple[Jaxpr, bool], Any] = {}
        self.alone = name in (*_IN_PLACE, *_EXTERNAL) or self.is_sum or self.costly or bool(self.bodies)
        self.is_dropped = name not in (*_EXTERNAL, *_LAUNCHES)  # XLA drops its results if no equation reads them
        self.views = _VIEWS | {"transpose"} if name == "dot_general" else _VIEWS
        places = tuple(range(len(eqn.invars)))
        self.stored = self._stored(places)
        self.alike = (
            ()
            if self.alone or name in _MOVING
            else tuple(i for i in places if eqn.invars[i].aval.shape == eqn.outvars[0].aval.shape)
        )
        self.overwritable = self._overwritable(eqn, places)

    def _stored(self, places: tuple[int, ...]) -> tuple[int, ...]:
        if self.is_sum:  # XLA fuses the operands of a reduction, and the rows of a scatter, into it
            return ()
        if self.name in _IN_PLACE or self.name == "gather":
            return places[:1]
        return places if self.alone or self.is_barrier else ()

    def _overwritable(self, eqn: Eqn, places: tuple[int, ...]) -> tuple[int, ...]:
        if self.name in _IN_PLACE:
            return places[:1]
        if self.name in _EXTERNAL:
            return tuple(i for i, _ in eqn.params["input_output_aliases"])
        if self.name == "while":
            return places[eqn.params["cond_nconsts"] + eqn.params["body_nconsts"] :]
        return places if self.name == "scan" or self.is_view else self.alike


class Operation:
    """An equation, with `EqnFacts`."""

    def __init__(self, eqn: Eqn) -> None:
        self.eqn, self.facts = eqn, EqnFacts(eqn)
        self.invars, self.outvars = eqn.invars, eqn.outvars
        self.reads = [x for x in eqn.invars if is_var(x)]

    def renamed(self, names: Mapping[Var, Atom], outvars: list[Var] | None = None) -> "Operation":
        """Returns the same operation with other operands, and maybe other results."""
        if outvars is None and not any(x in names for x in self.reads):
            return self
        other = copy.copy(self)
        other.invars = [names.get(x, x) if is_var(x) else x for x in self.invars]
        other.reads = [x for x in other.invars if is_var(x)]
        other.outvars = self.outvars if outvars is None else outvars
        return other
