"""Engine `native`: what its library computes for one kind in one direction, by names of tensors."""

import functools
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
from cavs._function.unroll import open_custom_calls
from cavs._jaxpr.equations import needed
from cavs._jaxpr.jaxprs import Atom, Eqn, Var, is_var
from cavs._jaxpr.memo import memoized
from cavs._stages.entrance import fixed

# (what, kind, number); states and their cotangents belong to no kind.
Name: TypeAlias = tuple[str, int, int]
NO_KIND = -1
_Numbers: TypeAlias = tuple[tuple[Var, int], ...]
NOTHING: Mapping[Var, int] = {}


class Lowered(NamedTuple):
    """A kind's program, and the static values that it reads."""

    program: KindProgram
    static_eqns: list[Eqn]  # equations that are evaluated once, before the levels
    statics: list[Var]  # the static variables that the program reads
    constants: list[np.ndarray]  # constants of F that it reads


def lowered(
    part: Split, kind: int, forward: bool, save: bool, reused: Mapping[Var, int] = NOTHING, own: Mapping[Var, int] = NOTHING
) -> Lowered:
    """Returns the program of a kind. Raises `Unfit` if the library lacks something that F needs.

    Args:
        kind: The number of the kind, for names.
        save: Whether the forward keeps what the backward reads.
        reused: Cut cotangents that overwrite kept values, with the number of these.
        own: Cut cotangents that overwrite the cotangents of a vertex's own state, with the number of the state leaf.
    """
    return _lowered(part, kind, forward, save, tuple(reused.items()), tuple(own.items()))


@memoized
def _lowered(part: Split, kind: int, forward: bool, save: bool, reused: _Numbers, own: _Numbers) -> Lowered:
    return (_Forward if forward else _Backward)(part, kind, save, dict(reused), dict(own)).lowered()


def check_lowered(part: Split, kind: int) -> None:
    """Raises `Unfit` if the library cannot compute a kind, forward or backward."""
    for forward in (True, False) if part.joint.differentiable else (True,):
        lowered(part, kind, forward, save=True)


def static_arrays(own: Lowered, part: Split, kind: int, statics: list[jax.Array]) -> dict[Name, jax.Array]:
    """Returns the static values that a program reads, by name."""
    env = fixed(part, statics)
    evaluate(own.static_eqns, env, {})
    found = {("static", kind, n): env[v] for n, v in enumerate(own.statics)}
    return found | {("constant", kind, n): jnp.asarray(x) for n, x in enumerate(own.constants)}


class _Direction:
    """Lowers one direction: `results` are computed from what `inputs` gives, and `outputs` stores them."""

    def __init__(self, part: Split, kind: int, save: bool, reused: Mapping[Var, int], own: Mapping[Var, int]):
        self.part, self.kind, self.save, self.reused, self.own = part, kind, save, reused, own
        self.constants: list[np.ndarray] = []
        self.wanted: dict[Var, None] = {}  # in the order of their first use, so that equal programs are lowered alike
        self.written: list[Written] = []

    def name(self, what: str, number: int = 0) -> Name:
        return what, self.kind, number

    def results(self) -> list[Atom]:
        raise NotImplementedError

    def available(self) -> set[Var]:
        raise NotImplementedError

    def inputs(self, low: Lowering) -> None:
        raise NotImplementedError

    def outputs(self, low: Lowering) -> None:
        raise NotImplementedError

    def lowered(self) -> Lowered:
        joint, results = self.part.joint, self.results()
        eqns, used = needed(joint.program.eqns, results, self.available())
        eqns, domain = open_custom_calls(eqns, joint.domain)
        static = [e for e in eqns if domain_of(e.outvars[0], domain) == STATIC]
        rest = [e for e in eqns if domain_of(e.outvars[0], domain) != STATIC]
        self.wanted = dict.fromkeys(x for x in (*(x for e in rest for x in e.invars), *used, *results) if is_var(x))
        low = Lowering(domain, self._constant)
        made = {v for e in rest for v in e.outvars}
        self.inputs(low)
        statics = [v for v in self.wanted if v not in made and v not in low.values]
        for n, v in enumerate(statics):
            low.static(v, self.name("static", n))
        for e in rest:
            low.equation(e)
        self.outputs(low)
        needs = needed(static, statics, set())[0]
        return Lowered(kind_program(low.ops, self.written), needs, statics, self.constants)

    def _constant(self, x: np.ndarray) -> Name:
        self.constants.append(x)
        return self.name("constant", len(self.constants) - 1)

    def entrance(self, low: Lowering, overwritten: frozenset[int]) -> None:
        """Declares what vertices read: eager rows, states of children, and their number of children."""
        part, f = self.part, self.part.forward
        for c, (v, domain) in enumerate(zip(f.cross, part.reverse.cross_domain, strict=True)):
            if v in self.wanted:
                low.rows(v, self.name("crossing", c), Shift.NONE, domain)
        gathers = [*zip(f.slots, part.recurrent.slots, strict=True)]
        gathers += [(v, (-1, i)) for v, i in zip(f.child, part.recurrent.child, strict=True)]
        for v, (child, i) in gathers:
            if v in self.wanted:
                low.gathered(v, ("cotangent" if i in overwritten else "state", NO_KIND, i), child)
        if f.num_children in self.wanted:
            low.rows(f.num_children, self.name("num_children"), Shift.NONE)

    def store(self, low: Lowering, x: Atom, what: str, number: int, shift: Shift, domain: Domain) -> None:
        """Stores a value in a tensor that the call creates."""
        name = self.name(what, number)
        low.stored(x, name, shift, domain)
        self.written.append(Written(name, domain, shift, repeat=what == "extra"))


class _Forward(_Direction):
    def results(self) -> list[Atom]:
        f = self.part.forward
        return [*f.states, *f.extra, *(f.keep if self.save else ())]

    def available(self) -> set[Var]:
        return set()

    def inputs(self, low: Lowering) -> None:
        self.entrance(low, frozenset())

    def outputs(self, low: Lowering) -> None:
        part, f = self.part, self.part.forward
        for i, x in enumerate(f.states):
            low.stored(x, ("state", NO_KIND, i), Shift.STATE, ROW)
        for n, v in enumerate(f.keep if self.save else ()):
            self.store(low, v, "kept", n, Shift.PADDED, EDGE if part.joint.domain.get(v) == EDGE else ROW)
        for n, (x, domain) in enumerate(zip(f.extra, part.extra_domain, strict=True)):
            self.store(low, x, "extra", n, Shift.NONE, domain)


class _Backward(_Direction):
    @functools.cached_property
    def cuts(self) -> StoredCuts:
        return stored_cuts(self.part.joint)

    @property
    def known(self) -> set[Var]:
        """The cut cotangents of the eager part's results, which the call is given, so that it does not store them."""
        return set() if self.part.role.states else set(self.part.reverse.extra_cts.values())

    def results(self) -> list[Atom]:
        r = self.part.reverse
        return [*r.ct_slots.values(), *r.ct_child.values(), *self.cuts.values]

    def available(self) -> set[Var]:
        return self.part.joint.available

    def inputs(self, low: Lowering) -> None:
        part, f, r = self.part, self.part.forward, self.part.reverse
        self.entrance(low, f.overwritten)
        for n, v in enumerate(f.keep):
            if v in self.wanted and v not in low.values:
                low.rows(v, self.name("kept", n), Shift.PADDED, EDGE if part.joint.domain.get(v) == EDGE else ROW)
        for n, (v, domain) in enumerate(zip(f.extra, part.extra_domain, strict=True)):
            if is_var(v) and v in self.wanted and v not in low.values:
                low.rows(v, self.name("extra", n), Shift.NONE, domain)
        for i, v in enumerate(f.states):
            if is_var(v) and v in self.wanted and v not in low.values and i not in f.overwritten:
                low.rows(v, ("state", NO_KIND, i), Shift.STATE)
        for i, v in r.state_cts.items():
            low.rows(v, ("cotangent", NO_KIND, i), Shift.STATE)
        for i, v in r.extra_cts.items():
            low.rows(v, self.name("extra_cotangent", i), Shift.PADDED, part.extra_domain[i])

    def outputs(self, low: Lowering) -> None:
        part, r = self.part, self.part.reverse
        for n, v in enumerate(self.cuts.values):
            if v in self.known:
                continue
            domain = EDGE if self.cuts.domain[v] == EDGE else ROW
            if v in self.reused:
                low.stored(v, self.name("kept", self.reused[v]), Shift.PADDED, domain, last=True)
            elif v in self.own:
                low.stored(v, ("cotangent", NO_KIND, self.own[v]), Shift.STATE, domain, last=True)
            else:
                self.store(low, v, "cut", n, Shift.PADDED, domain)
        for slots, numbers in ((r.ct_slots, part.recurrent.slots), (r.ct_child, [(-1, i) for i in part.recurrent.child])):
            for j, x in slots.items():
                child, i = numbers[j]
                domain = EDGE if child < 0 else ROW
                low.scattered(x, ("cotangent", NO_KIND, i), child, domain, i not in part.forward.overwritten)
