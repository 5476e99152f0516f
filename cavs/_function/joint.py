"""The joint program: the recurrent part of F and its VJP in one program (built by `_function.transpose`)."""

import dataclasses

from cavs._function.domains import Domain, Domains
from cavs._jaxpr.equations import Program
from cavs._jaxpr.jaxprs import Atom, Eqn, Var, is_var


@dataclasses.dataclass(frozen=True, eq=False)
class Recurrent:
    """The recurrent part of a role, and what it exchanges with the other parts. Variables are those of `role.program`.

    Attributes:
        eqns: its equations.
        statics: STATIC variables that it reads.
        cross: variables of the eager part that it reads: rows of vertices, or of edges.
        slots: (k, state leaf) of each gathered state that the recurrent or the lazy part reads.
        child: state leaves that the recurrent or the lazy part reads by `gather_all`.
        extra: its variables, other than states, that the lazy part reads.
    """

    eqns: list[Eqn]
    statics: list[Var]
    cross: list[Var]
    slots: list[tuple[int, int]]
    child: list[int]
    extra: list[Var]


@dataclasses.dataclass(frozen=True, eq=False)
class ParamUse:
    """One recurrent equation that reads parameters, and what its lazy parameter gradient needs.

    Attributes:
        eqn: the equation, of `role.program`.
        domain: the domain of its outputs.
        statics: positions of its differentiable STATIC operands.
        operands: position -> joint variable, for the row operands whose VALUE the gradient needs.
        cuts: joint variables: cut cotangents of its float outputs.
    """

    eqn: Eqn
    domain: Domain
    statics: tuple[int, ...]
    operands: dict[int, Atom]
    cuts: tuple[Atom, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """Inputs and outputs of the joint program's forward: joint variables, in the order of the fields of `Recurrent`.

    Attributes:
        statics: inputs.
        cross: inputs: rows of the eager part, of vertices or of edges.
        slots: inputs: gathered states.
        child: inputs: the state of a child, per edge.
        num_children: input.
        states: outputs: what the vertex scatters.
        extra: outputs that the lazy part reads.
        keep: variables that the forward stores for the backward.
        overwritten: state leaves whose cotangents overwrite them, so that the backward cannot read a vertex's own state.
        together: kept values that are stored side by side; `None` if each has a tensor of its own, and if the same holds for
            parts of cut cotangents.
    """

    statics: tuple[Var, ...]
    cross: tuple[Var, ...]
    slots: tuple[Var, ...]
    child: tuple[Var, ...]
    num_children: Var
    states: tuple[Atom, ...]
    extra: tuple[Atom, ...]
    keep: list[Var]
    overwritten: frozenset[int] = frozenset()
    together: tuple[tuple[Var, ...], ...] | None = None

    @property
    def places(self) -> list[tuple[Var, ...]]:
        """The kept values of each tensor."""
        others = {v for group in self.together or () for v in group}
        return [*(self.together or ()), *((v,) for v in self.keep if v not in others)]


@dataclasses.dataclass(frozen=True, eq=False)
class Reverse:
    """Inputs and outputs of the joint program's VJP: joint variables.

    Attributes:
        state_cts: inputs: state leaf -> cotangent.
        extra_cts: inputs: index into `Recurrent.extra` -> cotangent.
        ct_cross: outputs: index into `Recurrent.cross` -> cotangent, if something that it depends on is differentiated.
        ct_slots: outputs: index into `Recurrent.slots` -> cotangent.
        ct_child: outputs: index into `Recurrent.child` -> cotangent.
        uses: the equations whose parameter gradients are lazy.
        cross_domain: the domain of each of `Recurrent.cross`: ROW or EDGE.
    """

    state_cts: dict[int, Var]
    extra_cts: dict[int, Var]
    ct_cross: dict[int, Atom]
    ct_slots: dict[int, Atom]
    ct_child: dict[int, Atom]
    uses: list[ParamUse]
    cross_domain: tuple[Domain, ...]

    @property
    def cuts(self) -> list[Var]:
        """The variables that the levels store for the gradients of the lazy and eager parts, each once."""
        cts = [*self.ct_cross.values(), *(cut for use in self.uses for cut in use.cuts)]
        return list(dict.fromkeys(v for v in cts if is_var(v)))

    @property
    def cut_domain(self) -> Domains:
        """The domain of each of `cuts`: ROW or EDGE."""
        domain = {v: use.domain for use in self.uses for v in use.cuts if is_var(v)}
        return domain | {v: self.cross_domain[c] for c, v in self.ct_cross.items() if is_var(v)}


@dataclasses.dataclass(frozen=True, eq=False)
class Joint:
    """The recurrent part of F and its VJP.

    Attributes:
        program: both, in one program.
        domain: the domain of each of its variables.
        forward: the recurrent part.
        reverse: its VJP.
        differentiable: false if a recurrent loop has no reverse derivative; then `reverse` has no outputs.
        names: the variables that the user has named.
    """

    program: Program
    domain: Domains
    forward: Forward
    reverse: Reverse
    differentiable: bool
    names: dict[str, set[Var]] = dataclasses.field(default_factory=dict)

    @property
    def available(self) -> set[Var]:
        """The variables that the backward can read without computing them: kept, gathered again, or states."""
        f = self.forward
        free = {*f.statics, *f.cross, *f.slots, *f.child, f.num_children, *f.keep}
        own = [v for i, v in enumerate(f.states) if i not in f.overwritten]
        return free | {v for v in (*own, *f.extra) if is_var(v)}
