"""The split of F into eager, recurrent and lazy parts (Cavs 3.5, definition 1 and proposition 2).

- static: follows from parameters alone; once.
- eager: depends on no gather. One batch over all vertices before the levels.
- recurrent: on a path from gather to scatter. The only part that levels run.
- lazy: fed by a gather but not needed by scatter. One batch after the levels.

The transposed program is split the same way (`_function.transpose`).
"""

import dataclasses
from typing import Any

from cavs._function.children import ALL
from cavs._function.equations import ROW, STATIC, Program, is_var, level_of, needed, reads
from cavs._function.transpose import ParamUse as ParamUse, joint_of

_VIEWS = {"split", "squeeze", "reshape", "slice"}


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """F at vertices with children, split. Variables are those of `role.program` unless said to be of `joint`."""

    role: Any
    static_eqns: list[Any]
    eager_eqns: list[Any]
    eager_outs: list[Any]  # what later parts read of the eager part; inputs of F among them are pulled rows
    recurrent_eqns: list[Any]
    recurrent_statics: list[Any]
    cross: list[Any]  # the part of eager_outs that the recurrent part reads
    slots: list[tuple[int, int]]  # (k, state leaf) that recurrent or lazy part read
    child: list[int]  # state leaves read by gather_all
    extra: list[Any]  # recurrent values that the lazy part reads and that are no states
    lazy_eqns: list[Any]

    joint: Program  # recurrent part and its VJP in one program
    joint_level: dict[Any, int]
    j_statics: tuple[Any, ...]
    j_cross: tuple[Any, ...]
    j_slots: tuple[Any, ...]
    j_child: tuple[Any, ...]
    j_num_children: Any
    j_state_cts: dict[int, Any]  # state leaf -> cotangent input
    j_extra_cts: dict[int, Any]
    j_states: tuple[Any, ...]
    j_extra: tuple[Any, ...]
    keep: list[Any]  # joint variables stored by the forward for the backward
    ct_cross: dict[int, Any]  # index into cross -> joint variable
    ct_slots: dict[int, Any]
    ct_child: dict[int, Any]
    uses: list[ParamUse]
    differentiable: bool  # false: a recurrent loop has no reverse derivative, and the fields from `joint` on are forward alone
    launches: dict[Any, Any] = dataclasses.field(default_factory=dict)  # made by engine `persistent`, by kind of graph

    @property
    def cuts(self) -> list[Any]:
        """Joint variables that the levels store for the lazy and eager parts' gradients; each once."""
        return list(dict.fromkeys(v for v in [*self.ct_cross.values(), *(c for u in self.uses for c in u.cuts)] if is_var(v)))

    @property
    def cut_level(self) -> dict[Any, int]:
        """Whether each of `cuts` has a value per vertex or per edge."""
        level = {v: u.level for u in self.uses for v in u.cuts if is_var(v)}
        return level | {v: ROW for v in self.ct_cross.values() if is_var(v)}

    @property
    def gathers_all(self) -> bool:
        """Whether F calls `gather_all`, be it for what is no child's."""
        return any(e.primitive in ALL for e in self.role.program.eqns)

    @property
    def extra_level(self) -> list[int]:
        """Whether each of `extra` has a value per vertex or per edge."""
        return [self.role.level[v] for v in self.extra]

    @property
    def available(self) -> set[Any]:
        """Joint variables that the backward can read without computing: kept, gathered again, or states."""
        free = {*self.j_statics, *self.j_cross, *self.j_slots, *self.j_child, self.j_num_children, *self.keep}
        return free | {v for v in (*self.j_states, *self.j_extra) if is_var(v)}


def split(role: Any, optimizations: Any) -> Split:
    """Proposition 2 on the program of `role` (`trace.Role`, of vertices with children), and the same on its transpose."""
    eqns, level, consts = role.program.eqns, role.level, role.program.consts
    gathered = {v for slot in role.slots for v in slot} | set(role.child)
    states = {x for x in role.states if is_var(x)}
    static_eqns, eager_eqns, recurrent = _sorted_out(role, gathered, optimizations.eager)

    inside = {v for e in recurrent for v in e.outvars}
    entering = [*(x for e in recurrent for x in e.invars), *role.states]
    entering = list(dict.fromkeys(x for x in entering if is_var(x) and x not in inside and x not in consts))
    statics = [x for x in entering if level_of(x, level) == STATIC]
    cross = [x for x in entering if level_of(x, level) == ROW and x not in gathered and x is not role.num_children]
    eager_made = {v for e in eager_eqns for v in e.outvars}
    static_made = {v for e in static_eqns for v in e.outvars} | set(role.params)
    ready = eager_made | inside | gathered | set(role.inputs) | {role.num_children} | states
    lazy_eqns, lazy_reads = needed(eqns, role.pushes, ready | static_made | set(consts))
    extra = [x for x in dict.fromkeys(lazy_reads) if x in inside and x not in eager_made and x not in states]
    pulled = [x for x in lazy_reads if x in eager_made or (x in role.inputs and level_of(x, level) == ROW)]
    eager_outs = list(dict.fromkeys([*cross, *pulled]))
    used = {*entering, *lazy_reads}
    slots = [(k, i) for k, slot in enumerate(role.slots) for i, v in enumerate(slot) if v in used]
    child = [i for i, v in enumerate(role.child) if v in used]
    return Split(
        role=role,
        static_eqns=static_eqns,
        eager_eqns=needed(eager_eqns, eager_outs, set())[0],
        eager_outs=eager_outs,
        recurrent_eqns=recurrent,
        recurrent_statics=statics,
        cross=cross,
        slots=slots,
        child=child,
        extra=extra,
        lazy_eqns=lazy_eqns,
        **joint_of(role, recurrent, statics, cross, slots, child, extra),
    )


def _sorted_out(role: Any, gathered: set[Any], eager: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """The static, the eager and the recurrent equations; without `eager` what scatter needs is recurrent, if not static."""
    eqns, level = role.program.eqns, role.level
    before_scatter = {id(e) for e in needed(eqns, role.states, set(role.program.consts))[0]}
    static_eqns, eager_eqns, recurrent = [], [], set()
    late = set(gathered)  # what the eager part cannot read
    for e in eqns:
        top = max(level_of(v, level) for v in e.outvars)
        if top == STATIC:
            static_eqns.append(e)
        elif top == ROW and not any(is_var(x) and x in late for x in e.invars) and (eager or id(e) not in before_scatter):
            eager_eqns.append(e)
        else:
            late.update(e.outvars)
            if id(e) in before_scatter:
                recurrent.add(id(e))
    # Views of eager values cross over as what they are views of, so that one buffer crosses instead of several: they are
    # made on both sides.
    read = reads([e for e in eqns if id(e) in recurrent], role.states)
    for e in reversed(eager_eqns):
        if e.primitive.name in _VIEWS and level_of(e.invars[0], level) == ROW and any(v in read for v in e.outvars):
            recurrent.add(id(e))
            read.add(e.invars[0])
    return static_eqns, eager_eqns, [e for e in eqns if id(e) in recurrent]
