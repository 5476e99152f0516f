"""F in one role as a program, and the joint program: its recurrent part and its VJP in one (built by `_function.transpose`)."""

import dataclasses

from cavs._function.domains import EDGE, ROW, Domain, Domains, domain_of
from cavs._jaxpr.equations import Program, depends
from cavs._jaxpr.jaxprs import Atom, Eqn, Var, is_var


@dataclasses.dataclass(frozen=True, eq=False)
class RoleProgram:
    """F for one kind of vertex and one role, as a program."""

    program: Program  # the equations, rewritten
    domain: Domains  # the domain of each of its variables
    params: tuple[Var, ...]  # flat inputs of the program: the parameters
    inputs: tuple[Var, ...]  # flat inputs of the program: one vertex's row of the inputs of `run`, which `pull` reads
    edges: tuple[Var, ...]  # flat inputs of the program: one edge's row of the edges of `run`, which `gather_all` reads
    # Inputs of the program: `slots[k][i]` is leaf i of the state of child k, which `gather` reads.
    slots: tuple[tuple[Var, ...], ...]
    # Inputs of the program, one per leaf of the state: the state of any one child, which `gather_all` reads.
    child: tuple[Var, ...]
    num_children: Var  # input of the program
    states: tuple[Atom, ...]  # outputs of the program, one per leaf of the state: what the vertex scatters
    pushes: tuple[Atom, ...]  # outputs of the program: what the vertex pushes, flat
    notes: tuple[str, ...]  # a description of each group of fused products
    gathering: frozenset[str | None]  # the kinds whose function calls `gather_all`, even if nothing reads what it returns
    reads_edges: bool  # whether `gather_all` is called with `edges=True`
    written: Program  # as F wrote it; rewritten equations do not know their lines
    fixed: frozenset[Var] = frozenset()  # the arguments whose cotangents nobody asks for

    @property
    def arguments(self) -> tuple[Var, ...]:
        """The parameters, and the rows of inputs and edges."""
        return (*self.params, *self.inputs, *self.edges)

    @property
    def varied(self) -> set[Var]:
        """The arguments whose cotangents are asked for."""
        return {*self.arguments} - self.fixed

    @property
    def written_fixed(self) -> set[Var]:
        """The inputs of `written` whose cotangents nobody asks for."""
        return {own for own, v in zip(self.written.invars, self.program.invars, strict=True) if v in self.fixed}

    def from_params(self) -> set[Var]:
        """The variables through which parameters get cotangents: those that depend on them without a `stop_gradient`."""
        eqns = [e for e in self.program.eqns if e.primitive.name != "stop_gradient"]
        return depends(eqns, self.varied & {*self.params})


@dataclasses.dataclass(frozen=True, eq=False)
class Recurrent:
    """The recurrent part of a role, and what it exchanges with the other parts, as variables of `role.program`."""

    eqns: list[Eqn]  # its equations
    statics: list[Var]  # STATIC variables that it reads
    cross: list[Var]  # variables of the eager part that it reads: rows of vertices, or of edges
    slots: list[tuple[int, int]]  # (k, state leaf) of each gathered state that the recurrent or the lazy part reads
    child: list[int]  # state leaves that the recurrent or the lazy part reads by `gather_all`
    extra: list[Var]  # its variables, other than states, that the lazy part reads


@dataclasses.dataclass(frozen=True, eq=False)
class ParamUse:
    """One recurrent equation that reads parameters, and what its lazy parameter gradient needs."""

    eqn: Eqn  # the equation, of `role.program`
    domain: Domain  # the domain of its outputs
    statics: tuple[int, ...]  # positions of its differentiable STATIC operands
    operands: dict[int, Atom]  # position -> joint variable, for the row operands whose VALUE the gradient needs
    cuts: tuple[Atom, ...]  # joint variables: cut cotangents of its float outputs


@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
    """Inputs and outputs of the joint program's forward: joint variables, in the order of the fields of `Recurrent`."""

    statics: tuple[Var, ...]  # inputs
    cross: tuple[Var, ...]  # inputs: rows of the eager part, of vertices or of edges
    slots: tuple[Var, ...]  # inputs: gathered states
    child: tuple[Var, ...]  # inputs: the state of a child, per edge
    num_children: Var  # input
    states: tuple[Atom, ...]  # outputs: what the vertex scatters
    extra: tuple[Atom, ...]  # outputs that the lazy part reads
    keep: list[Var]  # variables that the forward stores for the backward
    # State leaves whose cotangents overwrite them, so that the backward cannot read a vertex's own state.
    overwritten: frozenset[int] = frozenset()
    # Kept values that are stored side by side; `None` if each has a tensor of its own, and if the same holds for parts of
    # cut cotangents.
    together: tuple[tuple[Var, ...], ...] | None = None

    @property
    def places(self) -> list[tuple[Var, ...]]:
        """The kept values of each tensor."""
        grouped = {v for group in self.together or () for v in group}
        return [*(self.together or ()), *((v,) for v in self.keep if v not in grouped)]


@dataclasses.dataclass(frozen=True, eq=False)
class Reverse:
    """Inputs and outputs of the joint program's VJP: joint variables."""

    state_cts: dict[int, Var]  # inputs: state leaf -> cotangent
    extra_cts: dict[int, Var]  # inputs: index into `Recurrent.extra` -> cotangent
    # Outputs: index into `Recurrent.cross` -> cotangent, if something that it depends on is differentiated.
    ct_cross: dict[int, Atom]
    ct_slots: dict[int, Atom]  # outputs: index into `Recurrent.slots` -> cotangent
    ct_child: dict[int, Atom]  # outputs: index into `Recurrent.child` -> cotangent
    uses: list[ParamUse]  # the equations whose parameter gradients are lazy
    cross_domain: tuple[Domain, ...]  # the domain of each of `Recurrent.cross`: ROW or EDGE

    @property
    def operands(self) -> list[Var]:
        """The variables whose values the lazy parameter gradients need, in the order of `uses`."""
        return [x for use in self.uses for x in use.operands.values() if is_var(x)]

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
    """The recurrent part of F and its VJP."""

    program: Program  # both, in one program
    domain: Domains  # the domain of each of its variables
    forward: Forward  # the recurrent part
    reverse: Reverse  # its VJP
    differentiable: bool  # false if a recurrent loop has no reverse derivative; then `reverse` has no outputs
    names: dict[str, set[Var]]  # the variables that the user has named

    def row_domain(self, v: Atom) -> Domain:
        """Returns what a tensor of a value has rows for: `EDGE`, or `ROW` for vertices."""
        return EDGE if domain_of(v, self.domain) == EDGE else ROW

    @property
    def available(self) -> set[Var]:
        """The variables that the backward can read without computing them: kept, gathered again, or states."""
        f = self.forward
        free = {*f.statics, *f.cross, *f.slots, *f.child, f.num_children, *f.keep}
        readable = [v for i, v in enumerate(f.states) if i not in f.overwritten]
        return free | {v for v in (*readable, *f.extra) if is_var(v)}
