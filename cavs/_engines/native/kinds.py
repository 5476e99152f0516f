"""Engine `native`: what its library computes for one kind in one direction, by names of tensors."""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from cavs._engines.native.lower import Lowering
from cavs._engines.native.program import KindProgram, Written, kind_program
from cavs._engines.native.values import Shift
from cavs._function.cut_parts import StoredCuts, stored_cuts
from cavs._function.domains import EDGE, ROW, STATIC, Domain, domain_of
from cavs._function.evaluate import evaluate
from cavs._function.split import Split
from cavs._function.unroll import opened_calls
from cavs._jaxpr.equations import needed
from cavs._jaxpr.jaxprs import Atom, Eqn, Var, is_var
from cavs._jaxpr.memo import memoized
from cavs._stages.entrance import fixed

# (label, kind, number); states and their cotangents belong to no kind.
Name: TypeAlias = tuple[str, int, int]
NO_KIND = -1
_Numbers: TypeAlias = tuple[tuple[Var, int], ...]  # the items of a dict


class Lowered(NamedTuple):
    """A kind's program, and the static values that it reads."""

    program: KindProgram
    static_eqns: list[Eqn]  # equations that are evaluated once, before the levels
    statics: list[Var]  # the static variables that the program reads
    constants: list[np.ndarray]  # constants of F that it reads


@memoized
def lowered(part: Split, kind: int, forward: bool, save: bool, reused: _Numbers, own: _Numbers) -> Lowered:
    """Returns the program of a kind. Raises `Unfit` if the library lacks something that F needs.

    `kind`: the number of the kind, for names. `save`: whether the forward keeps what the backward reads. `reused`: cut
    cotangents that overwrite kept values, with the number of these. `own`: cut cotangents that overwrite the cotangents of a
    vertex's own state, with the number of the state leaf.
    """
    f, r, joint = part.forward, part.reverse, part.joint
    cuts = StoredCuts([], {}, {}, {}, []) if forward else stored_cuts(joint)
    if forward:
        results, available = [*f.states, *f.extra, *(f.keep if save else ())], set[Var]()
    else:
        results, available = [*r.ct_slots.values(), *r.ct_child.values(), *cuts.values], joint.available
    eqns, used = needed(joint.program.eqns, results, available)
    eqns, domain = opened_calls(eqns, joint.domain)
    static = [e for e in eqns if domain_of(e.outvars[0], domain) == STATIC]
    dynamic = [e for e in eqns if domain_of(e.outvars[0], domain) != STATIC]
    # In the order of their first use, so that equal programs are lowered alike.
    wanted = dict.fromkeys(x for x in (*(x for e in dynamic for x in e.invars), *used, *results) if is_var(x))
    computed, constants = {v for e in dynamic for v in e.outvars}, list[np.ndarray]()

    def constant(x: np.ndarray) -> Name:
        constants.append(x)
        return "constant", kind, len(constants) - 1

    tensors = _Tensors(part, kind, Lowering(domain, constant), set(wanted))
    low = tensors.low
    if forward:
        tensors.entrance(frozenset())
    else:
        tensors.entrance(f.overwritten)
        tensors.backward_inputs()
    statics = [v for v in wanted if v not in computed and v not in low.values]
    for n, v in enumerate(statics):
        low.static(v, ("static", kind, n))
    for e in dynamic:
        low.equation(e)
    if forward:
        tensors.forward_outputs(save)
    else:
        tensors.backward_outputs(cuts, dict(reused), dict(own))
    return Lowered(kind_program(low.ops, tensors.written), needed(static, statics)[0], statics, constants)


def check_lowered(part: Split, kind: int) -> None:
    """Raises `Unfit` if the library cannot compute a kind, forward or backward."""
    for forward in (True, False) if part.joint.differentiable else (True,):
        lowered(part, kind, forward, True, (), ())


def static_arrays(lowered_kind: Lowered, part: Split, kind: int, statics: list[jax.Array]) -> dict[Name, jax.Array]:
    """Returns the static values that a program reads, by name."""
    env = fixed(part, statics)
    evaluate(lowered_kind.static_eqns, env, {})
    arrays = {("static", kind, n): env[v] for n, v in enumerate(lowered_kind.statics)}
    return arrays | {("constant", kind, n): jnp.asarray(x) for n, x in enumerate(lowered_kind.constants)}


class _Tensors:
    """Declares the tensors that one direction of a kind reads and writes."""

    def __init__(self, part: Split, kind: int, low: Lowering, wanted: set[Var]):
        self.part, self.kind, self.low, self.wanted = part, kind, low, wanted
        self.written: list[Written] = []

    def entrance(self, overwritten: frozenset[int]) -> None:
        """Declares what vertices read: eager rows, states of children, and their number of children."""
        part, f, low = self.part, self.part.forward, self.low
        for c, (v, domain) in enumerate(zip(f.cross, part.reverse.cross_domain, strict=True)):
            if v in self.wanted:
                low.rows(v, ("crossing", self.kind, c), Shift.NONE, domain)
        gathers = [*zip(f.slots, part.recurrent.slots, strict=True)]
        gathers += [(v, (-1, i)) for v, i in zip(f.child, part.recurrent.child, strict=True)]
        for v, (child, i) in gathers:
            if v in self.wanted:
                low.gathered(v, ("cotangent" if i in overwritten else "state", NO_KIND, i), child)
        if f.num_children in self.wanted:
            low.rows(f.num_children, ("num_children", self.kind, 0), Shift.NONE)

    def backward_inputs(self) -> None:
        """Declares what the backward reads of the forward, and cotangents."""
        part, f, r, low = self.part, self.part.forward, self.part.reverse, self.low
        rows = [(v, ("kept", self.kind, n), Shift.PADDED, part.joint.row_domain(v)) for n, v in enumerate(f.keep)]
        extra = zip(f.extra, part.extra_domain, strict=True)
        rows += [(v, ("extra", self.kind, n), Shift.NONE, domain) for n, (v, domain) in enumerate(extra) if is_var(v)]
        states = [(i, v) for i, v in enumerate(f.states) if is_var(v) and i not in f.overwritten]
        rows += [(v, ("state", NO_KIND, i), Shift.STATE, ROW) for i, v in states]
        for v, tensor, shift, domain in rows:
            if v in self.wanted and v not in low.values:
                low.rows(v, tensor, shift, domain)
        for i, v in r.state_cts.items():
            low.rows(v, ("cotangent", NO_KIND, i), Shift.STATE)
        for i, v in r.extra_cts.items():
            low.rows(v, ("extra_cotangent", self.kind, i), Shift.PADDED, part.extra_domain[i])

    def forward_outputs(self, save: bool) -> None:
        """Stores the states, what the backward reads, and what the lazy part reads."""
        part, f = self.part, self.part.forward
        for i, x in enumerate(f.states):
            self.low.stored(x, ("state", NO_KIND, i), Shift.STATE, ROW)
        for n, v in enumerate(f.keep if save else ()):
            self.store(v, "kept", n, Shift.PADDED, part.joint.row_domain(v))
        for n, (x, domain) in enumerate(zip(f.extra, part.extra_domain, strict=True)):
            self.store(x, "extra", n, Shift.NONE, domain)

    def backward_outputs(self, cuts: StoredCuts, reused: Mapping[Var, int], own: Mapping[Var, int]) -> None:
        """Stores cut cotangents, and adds the cotangents of children to theirs."""
        part, r, low = self.part, self.part.reverse, self.low
        # The call is given the cut cotangents of the eager part's results, so it does not store them.
        known = set() if part.role.states else set(r.extra_cts.values())
        for n, v in enumerate(cuts.values):
            domain = EDGE if cuts.domain[v] == EDGE else ROW
            if v in known:
                continue
            if v in reused:
                low.stored(v, ("kept", self.kind, reused[v]), Shift.PADDED, domain, last=True)
            elif v in own:
                low.stored(v, ("cotangent", NO_KIND, own[v]), Shift.STATE, domain, last=True)
            else:
                self.store(v, "cut", n, Shift.PADDED, domain)
        children = [(x, part.recurrent.slots[j], ROW) for j, x in r.ct_slots.items()]
        children += [(x, (-1, part.recurrent.child[j]), EDGE) for j, x in r.ct_child.items()]
        for x, (child, i), domain in children:
            low.scattered(x, ("cotangent", NO_KIND, i), child, domain, i not in part.forward.overwritten)

    def store(self, x: Atom, label: str, number: int, shift: Shift, domain: Domain) -> None:
        """Stores a value in a tensor that the call creates."""
        name = label, self.kind, number
        self.low.stored(x, name, shift, domain)
        self.written.append(Written(name, domain, shift, repeat=label == "extra"))
