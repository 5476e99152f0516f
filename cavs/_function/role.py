"""F for one kind of vertex and one role: a leaf, or a vertex with children."""

import dataclasses

from cavs._function.domains import Domains
from cavs._jaxpr.equations import Program
from cavs._jaxpr.jaxprs import Atom, Var


@dataclasses.dataclass(frozen=True, eq=False)
class RoleProgram:
    """F for one kind of vertex and one role, as a program.

    Attributes:
        program: the equations, rewritten.
        domain: the domain of each of its variables.
        params: flat inputs of the program: the parameters.
        inputs: flat inputs of the program: one vertex's row of the inputs of `run`, which `pull` reads.
        edges: flat inputs of the program: one edge's row of the edges of `run`, which `gather_all` reads.
        slots: inputs of the program: `slots[k][i]` is leaf i of the state of child k, which `gather` reads.
        child: inputs of the program, one per leaf of the state: the state of any one child, which `gather_all` reads.
        num_children: input of the program.
        states: outputs of the program, one per leaf of the state: what the vertex scatters.
        pushes: outputs of the program: what the vertex pushes, flat.
        notes: a description of each group of fused products.
        gathers_all: whether `gather_all` is called, even if nothing reads what it returns.
        reads_edges: whether `gather_all` is called with `edges=True`.
        loop: the line of F's first loop with a dynamic number of iterations, as the end of a sentence; empty if there is none.
        fixed: those of `params`, `inputs` and `edges` whose cotangents nobody asks for.
    """

    program: Program
    domain: Domains
    params: tuple[Var, ...]
    inputs: tuple[Var, ...]
    edges: tuple[Var, ...]
    slots: tuple[tuple[Var, ...], ...]
    child: tuple[Var, ...]
    num_children: Var
    states: tuple[Atom, ...]
    pushes: tuple[Atom, ...]
    notes: tuple[str, ...]
    gathers_all: bool
    reads_edges: bool
    loop: str
    fixed: frozenset[Var] = frozenset()

    @property
    def arguments(self) -> tuple[Var, ...]:
        """The parameters, and the rows of inputs and edges."""
        return (*self.params, *self.inputs, *self.edges)

    @property
    def varied(self) -> set[Var]:
        """The arguments whose cotangents are asked for."""
        return {*self.arguments} - self.fixed
