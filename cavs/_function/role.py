"""F for one kind of vertex and one role: a leaf, or a vertex with children."""

import dataclasses

from cavs._function.domains import Domains
from cavs._jaxpr.equations import Program
from cavs._jaxpr.jaxprs import Atom, Var


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
    gathers_all: bool  # whether `gather_all` is called, even if nothing reads what it returns
    reads_edges: bool  # whether `gather_all` is called with `edges=True`
    # The line of F's first loop with a dynamic number of iterations, as the end of a sentence; empty if there is none.
    loop: str
    fixed: frozenset[Var] = frozenset()  # the arguments whose cotangents nobody asks for

    @property
    def arguments(self) -> tuple[Var, ...]:
        """The parameters, and the rows of inputs and edges."""
        return (*self.params, *self.inputs, *self.edges)

    @property
    def varied(self) -> set[Var]:
        """The arguments whose cotangents are asked for."""
        return {*self.arguments} - self.fixed
