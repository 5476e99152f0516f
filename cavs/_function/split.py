"""The split of F into eager, recurrent and lazy parts (Cavs 3.5, definition 1 and proposition 2).

- static: computed from parameters alone, once.
- eager: depends on no gather. One batch over all vertices, before the levels; or over all edges, if it reads rows of edges.
- recurrent: on a path from gather to scatter. The only part that the levels run.
- lazy: depends on a gather, but scatter does not need it. One batch after the levels.

The transposed program is split in the same way (`_function.transpose`).
"""

import dataclasses

from cavs._function.children import ALL, TO_EDGES, TO_ROWS
from cavs._function.cut_parts import with_kept_together
from cavs._function.domains import EDGE, STATIC, Domain, Domains, domain_of
from cavs._function.joint import Forward, Joint, Recurrent, Reverse, RoleProgram
from cavs._function.keep_options import KeepOptions
from cavs._function.keeping import can_overwrite, front, with_keeping
from cavs._function.transpose import joint_of, without_transpose
from cavs._function.user_rules import has_rule
from cavs._jaxpr.equations import needed, reads
from cavs._jaxpr.jaxprs import Eqn, Var, is_var

_VIEWS = {"split", "squeeze", "reshape", "slice"}


@dataclasses.dataclass(frozen=True, eq=False)
class Eager:
    """The eager part of a role."""

    eqns: list[Eqn]  # its equations
    # The variables that the recurrent and lazy parts read of it: first `Recurrent.cross`, in its order. Inputs of F among them
    # are pulled rows, and rows of edges.
    outs: list[Var]
    reads_edges: bool  # whether it reads or returns rows of edges


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """F at vertices with children, split. All fields but `joint` refer to variables of `role.program`."""

    role: RoleProgram  # F at vertices with children, of one kind
    static_eqns: list[Eqn]  # the equations that are evaluated once
    eager: Eager  # the eager part
    recurrent: Recurrent  # the recurrent part
    lazy_eqns: list[Eqn]  # the equations of the lazy part
    joint: Joint  # the recurrent part and its VJP in one program

    @property
    def forward(self) -> Forward:
        """The recurrent part's place in the joint program."""
        return self.joint.forward

    @property
    def reverse(self) -> Reverse:
        """The VJP's place in the joint program."""
        return self.joint.reverse

    @property
    def gathers_all(self) -> bool:
        """Whether F calls `gather_all`, even if for a value that does not depend on the children."""
        return any(e.primitive in ALL for e in self.role.program.eqns)

    @property
    def extra_domain(self) -> list[Domain]:
        """The domain of each of `recurrent.extra`."""
        return [self.role.domain[v] for v in self.recurrent.extra]

    def for_forward_mode(self) -> "Split":
        """Returns the split whose levels JAX may differentiate in forward mode: they call functions with derivative rules."""
        if not any(map(has_rule, self.recurrent.eqns)):
            return self
        return dataclasses.replace(self, joint=without_transpose(self.role, self.recurrent))

    def keeping(self, overwritten: frozenset[int], options: KeepOptions) -> "Split":
        """Returns the split whose backward overwrites these leaves of the state, and saves what the options say."""
        products = front(self.joint, overwritten)[-1].again if options.again else ()
        joint = with_keeping(self.joint, products, overwritten, options.share, options.names, options.masks)
        joint = with_kept_together(joint) if options.together and joint.differentiable else joint
        return dataclasses.replace(self, joint=joint)

    def can_overwrite(self, arity: int) -> set[int]:
        """Returns the leaves of the state whose rows the cotangents of a forest may overwrite.

        In a forest, the task of a vertex's parent is the last to read its state, and the only one to write its cotangent. So
        the lazy part and the lazy gradients must not read the leaf, and a task must write the cotangent of each child once: by
        number or by `gather_all`, not by both.
        """
        role, reverse, lazy = self.role, self.reverse, reads(self.lazy_eqns, self.role.pushes)
        by_number = {self.recurrent.slots[j] for j in reverse.ct_slots}
        by_all = {self.recurrent.child[j] for j in reverse.ct_child}

        def written_once(i: int) -> bool:
            numbers = {k for k, leaf in by_number if leaf == i}
            return not numbers if i in by_all else len(numbers) == arity > 0 and not self.gathers_all

        def read_later(i: int) -> bool:
            return role.states[i] in lazy or role.child[i] in lazy or any(slot[i] in lazy for slot in role.slots)

        leaves = can_overwrite(self.joint, self.recurrent.slots, self.recurrent.child)
        return {i for i in leaves if written_once(i) and not read_later(i)}


def split(role: RoleProgram, eager: bool) -> Split:
    """Splits a role of vertices with children by proposition 2, and its transpose, too.

    `eager`: if false, the equations that scatter needs are recurrent, unless they are static.
    """
    static_eqns, eager_eqns, recurrent_eqns = _sorted_out(role, eager)
    recurrent, lazy_eqns, pulled = _boundaries(role, static_eqns, eager_eqns, recurrent_eqns)
    outs = list(dict.fromkeys([*recurrent.cross, *pulled]))
    eager_eqns = needed(eager_eqns, outs)[0]
    return Split(
        role=role,
        static_eqns=static_eqns,
        eager=Eager(eager_eqns, outs, not reads(eager_eqns, outs).isdisjoint(role.edges)),
        recurrent=recurrent,
        lazy_eqns=lazy_eqns,
        joint=joint_of(role, recurrent),
    )


def split_leaf(role: RoleProgram) -> Split:
    """Splits a role of leaves as if it were one of vertices with children: all that is not static is recurrent.

    An engine that runs levels can then run all leaves of a kind as one level. The lazy part only names what is pushed.
    """
    whole = dataclasses.replace(role, states=(*role.states, *role.pushes), pushes=())
    static_eqns, _, eqns = _sorted_out(whole, eager=False)
    recurrent, _, _ = _boundaries(whole, static_eqns, [], eqns)
    computed = {v for e in eqns for v in e.outvars} - {x for x in role.states if is_var(x)}
    recurrent = dataclasses.replace(recurrent, extra=list(dict.fromkeys(x for x in role.pushes if is_var(x) and x in computed)))
    eager = Eager([], recurrent.cross, reads_edges=False)
    return Split(role, static_eqns, eager, recurrent, [], joint_of(role, recurrent))


def _sorted_out(role: RoleProgram, eager: bool) -> tuple[list[Eqn], list[Eqn], list[Eqn]]:
    """Returns the static, the eager and the recurrent equations."""
    eqns, domain = role.program.eqns, role.domain
    before_scatter = {id(e) for e in needed(eqns, role.states, set(role.program.consts))[0]}
    static_eqns, eager_eqns, recurrent = [], [], set()
    not_eager = _gathered(role)  # variables that the eager part cannot read
    of_edges = set(role.edges)  # values of edges that the eager part has
    for e in eqns:
        result_domain = max(domain_of(v, domain) for v in e.outvars)
        if result_domain == STATIC:
            static_eqns.append(e)
            continue
        early = not any(is_var(x) and x in not_eager for x in e.invars) and (eager or id(e) not in before_scatter)
        if early and _can_be_eager(e, result_domain, of_edges):
            eager_eqns.append(e)
            if result_domain == EDGE and e.primitive not in TO_EDGES:
                of_edges.update(e.outvars)
        else:
            not_eager.update(e.outvars)
            if id(e) in before_scatter:
                recurrent.add(id(e))
    # If the recurrent part reads views of an eager value, that value crosses over instead, and the views are computed on both
    # sides: one buffer crosses, not several. A value of the vertex that is spread to its edges crosses as it is, too.
    read = reads([e for e in eqns if id(e) in recurrent], role.states)
    products = {e.outvars[0] for e in eager_eqns if e.primitive.name == "dot_general"}
    for e in reversed(eager_eqns):
        view = e.primitive in TO_EDGES or e.primitive.name in _VIEWS and domain_of(e.invars[0], domain) != STATIC
        if view and is_var(e.invars[0]) and any(v in read for v in e.outvars):
            recurrent.add(id(e))
            read.add(e.invars[0])
        elif e.outvars[0] in read and (product := _before_bias(e, products, domain)) is not None:
            if e.outvars[0] not in reads([other for other in eqns if id(other) not in recurrent], role.pushes):
                recurrent.add(id(e))
                read.add(product)
    return static_eqns, eager_eqns, [e for e in eqns if id(e) in recurrent]


def _before_bias(e: Eqn, products: set[Var], domain: Domains) -> Var | None:
    """Returns the product to which an equation adds a bias, a static vector; `None` if it does something else.

    The levels add the bias to what crosses over. XLA for GPUs often adds it in a pass of its own over all rows.
    """
    if e.primitive.name != "add":
        return None
    product = [x for x in e.invars if is_var(x) and x in products]
    static = [x for x in e.invars if domain_of(x, domain) == STATIC and x.aval.shape == e.outvars[0].aval.shape]
    return product[0] if len(product) == len(static) == 1 else None


def _can_be_eager(e: Eqn, domain: Domain, of_edges: set[Var]) -> bool:
    """Returns whether an equation that reads no gathered value is eager, given the values of edges that the eager part has.

    What is the same for all edges of a vertex is not: the levels read it once a vertex, and spread it.
    """
    if e.primitive in TO_EDGES:
        return bool(of_edges)
    reads_edge = any(is_var(x) and x in of_edges for x in e.invars)
    return reads_edge if domain == EDGE or e.primitive in TO_ROWS else True


def _boundaries(
    role: RoleProgram, static_eqns: list[Eqn], eager_eqns: list[Eqn], eqns: list[Eqn]
) -> tuple[Recurrent, list[Eqn], list[Var]]:
    """Returns the recurrent part (of `eqns`), the lazy equations, and what the lazy part reads of the eager part."""
    domain, consts, gathered = role.domain, role.program.consts, _gathered(role)
    states = {x for x in role.states if is_var(x)}
    inside = {v for e in eqns for v in e.outvars}
    entering = [*(x for e in eqns for x in e.invars), *role.states]
    entering = list(dict.fromkeys(x for x in entering if is_var(x) and x not in inside and x not in consts))

    # The lazy part spreads values of the vertex itself.
    from_eager = {v for e in eager_eqns if e.primitive not in TO_EDGES for v in e.outvars}
    from_static = {v for e in static_eqns for v in e.outvars} | set(role.params)
    ready = from_eager | inside | gathered | {*role.inputs, *role.edges, role.num_children} | states
    lazy_eqns, lazy_reads = needed(role.program.eqns, role.pushes, ready | from_static | set(consts))
    used = {*entering, *lazy_reads}
    recurrent = Recurrent(
        eqns=eqns,
        statics=[x for x in entering if domain_of(x, domain) == STATIC],
        cross=[x for x in entering if domain_of(x, domain) != STATIC and x not in gathered and x is not role.num_children],
        slots=[(k, i) for k, slot in enumerate(role.slots) for i, v in enumerate(slot) if v in used],
        child=[i for i, v in enumerate(role.child) if v in used],
        extra=[x for x in dict.fromkeys(lazy_reads) if x in inside and x not in from_eager and x not in states],
    )
    pulled = [x for x in lazy_reads if x in from_eager or x in role.inputs or x in role.edges]
    return recurrent, lazy_eqns, pulled


def _gathered(role: RoleProgram) -> set[Var]:
    """Returns the inputs that gather and `gather_all` read."""
    return {v for slot in role.slots for v in slot} | set(role.child)
