"""One direction of F's recurrent part as a `Level`: what a launch of engine `persistent` computes, reads and writes.

The levels of the forward are F's recurrent equations; those of the backward the rest of the joint program (`_function.split`).
"""

import math
from collections.abc import Sequence
from typing import Any

from cavs._engines.bounds import bound, bounds, state_bounds
from cavs._engines.chip import candidates
from cavs._engines.device_equations import at_level, rewritten, with_scaled_weights, zeros_at
from cavs._function.children import REDUCTIONS
from cavs._function.domains import EDGE, ROW, STATIC, Domain, Domains, domain_of
from cavs._function.equations import depends, needed
from cavs._function.jaxprs import is_var
from cavs._function.products import of_tf32_bits
from cavs._function.split import Split
from cavs.kernels import HALVES, Constant, Level, Place, Rows, Sum, Unfit, add_halves, cut, is_product

# Of the scalars that a launch reads, after `kernels._body.kernel.NUM_LEVELS`, `NUM_ROWS` and `NUM_EDGES`: bases of rows.
STATE_ROW, PAD, EDGE_PAD, SLOTS = 3, 4, 5, 6
LARGEST = 128.0  # of what products in float16 may read: times `FACTOR`, half of float16's range, for a sum's parts


class Program:
    """One direction of the recurrent part of an inner role as a `Level`, and what its launch is given and gives.

    `pushed`: states whose cotangents the pushes begin; those of the others come from parents alone. `largest`: bounds of the
    states, see `_engines.bounds.state_bounds`.
    """

    def __init__(self, part: Split, forward: bool, forest: bool, keep: bool, pushed: frozenset[int], largest: list[float]):
        self.part, self.forward, self.pushed = part, forward, pushed
        self.kept = part.forward.keep if keep else []
        self.made: dict[str, tuple[Any, int, int | None, int]] = {}  # name -> (variable, level, base, copies of its rows)
        joint, level = part.joint.program, part.joint.domain
        if forward:
            outputs = [*part.forward.states, *part.forward.extra, *self.kept]
            eqns, _ = needed(joint.eqns, outputs, set())
        else:
            self.operands = _summed_operands(part)
            outputs = [
                *part.reverse.ct_slots.values(),
                *part.reverse.ct_child.values(),
                *part.reverse.cuts,
                *self.operands,
            ]
            eqns, _ = needed(joint.eqns, outputs, part.joint.available)
        eqns, level = rewritten(eqns, level)
        places = self._places(eqns, level)
        gathered = {v: largest[i] for v, (_, i) in zip(part.forward.slots, part.recurrent.slots, strict=True)}
        gathered |= {v: largest[i] for v, i in zip(part.forward.child, part.recurrent.child, strict=True)}
        self.precision = _precision(eqns, level, bounds(eqns, gathered))
        if self.precision == "f16":
            eqns, level = with_scaled_weights(eqns, level)
        moving = [e for e in eqns if level.get(e.outvars[0], STATIC) != STATIC]
        self.static_eqns = [e for e in eqns if level.get(e.outvars[0], STATIC) == STATIC]
        weights = {e.invars[1] for e in moving if e.primitive.name == "dot_general"}
        read = dict.fromkeys(x for e in moving for x in e.invars if is_var(x))
        self.statics = [x for x in read if level.get(x, STATIC) == STATIC]
        self.weights = [x for x in self.statics if x in weights]
        sources = self._sources(forest)
        half = HALVES.get(self.precision)
        self.level: Level = cut(moving, {**level}, sources, places, self._written(), 32 if half else 16)
        if half:
            add_halves(self.level, half)

    def _written(self) -> frozenset[str]:
        if self.forward:
            return frozenset(f"state{i}" for i in range(len(self.part.forward.states)))
        return frozenset()

    def _sources(self, forest: bool) -> dict[Any, Any]:
        part = self.part
        out: dict[Any, Any] = {v: Constant(f"static{n}") for n, v in enumerate(self.statics)}
        out |= {v: Rows(f"cross{n}") for n, v in enumerate(part.forward.cross)}
        out |= {
            v: Rows(f"state{i}", index=f"kid{k}") for v, (k, i) in zip(part.forward.slots, part.recurrent.slots, strict=True)
        }
        out |= {v: Rows(f"state{i}", index="edge_child") for v, i in zip(part.forward.child, part.recurrent.child, strict=True)}
        out[part.forward.num_children] = Rows("num_children")
        if self.forward:
            return out
        for n, v in enumerate(part.forward.extra):
            if is_var(v):
                out.setdefault(v, Rows(f"extra{n}"))
        for i, v in enumerate(part.forward.states):
            if domain_of(v, part.joint.domain) != STATIC:
                out.setdefault(v, Rows(f"state{i}", base=STATE_ROW))
        for n, v in enumerate(part.forward.keep):
            out[v] = Rows(f"kept{n}", base=EDGE_PAD if part.joint.domain.get(v) == EDGE else PAD)
        for i, v in part.reverse.state_cts.items():
            parts = [(f"up{i}", "parent_slot")] if any(part.recurrent.slots[j][1] == i for j in part.reverse.ct_slots) else []
            parts += [(f"edge_up{i}", "parent")] if any(part.recurrent.child[j] == i for j in part.reverse.ct_child) else []
            ends = (None, None) if forest else ("parent_first", "parent_count")
            out[v] = Sum((f"g{i}", "g_row") if i in self.pushed else None, tuple(parts), *ends)
        for i, v in part.reverse.extra_cts.items():
            out[v] = Rows(f"extra_ct{i}")
        return out

    def _places(self, eqns: list[Any], level: Domains) -> dict[Any, list[Place]]:
        """Where outputs are stored; `eqns` and `level` gain what makes constants among them values of a vertex."""
        part = self.part
        places: dict[Any, list[Place]] = {}

        def put(v: Any, name: str, base: int | None, copies: int = 1, want: Domain = ROW) -> None:
            v = at_level(v, want, level, eqns)
            places.setdefault(v, []).append(Place(name, base))
            if not name.startswith("state"):
                self.made[name] = (v, want, base, copies)

        if self.forward:
            for i, v in enumerate(part.forward.states):
                put(v, f"state{i}", STATE_ROW)
            for n, v in enumerate(part.forward.extra):
                edge = part.role.domain.get(part.recurrent.extra[n]) == EDGE
                put(v, f"extra{n}", None, want=EDGE if edge else ROW)
            for n, v in enumerate(self.kept):
                edge = level.get(v) == EDGE
                put(v, f"kept{n}", EDGE_PAD if edge else PAD, want=level.get(v, STATIC))
            return places
        for j, v in part.reverse.ct_slots.items():
            slot, i = part.recurrent.slots[j]
            put(v, f"up{i}", SLOTS + slot, self.arity)
        # A child in a slot of which a state is not read gets nothing; but it looks there.
        read = {part.recurrent.slots[j]: v.aval for j, v in part.reverse.ct_slots.items()}
        for i, aval in {i: aval for (_, i), aval in read.items()}.items():
            for slot in range(self.arity):
                if (slot, i) not in read:
                    put(zeros_at(aval, ROW, level, eqns), f"up{i}", SLOTS + slot, self.arity)
        for j, v in part.reverse.ct_child.items():
            put(v, f"edge_up{part.recurrent.child[j]}", None, want=EDGE)
        for n, v in enumerate(part.reverse.cuts):
            put(v, f"cut{n}", None, want=part.reverse.cut_domain[v])
        for n, v in enumerate(self.operands):
            put(v, f"operand{n}", None, want=level.get(v, STATIC))
        return places

    @property
    def arity(self) -> int:
        """Slots that children fill."""
        return max((k for k, _ in self.part.recurrent.slots), default=-1) + 1


def _summed_operands(part: Split) -> list[Any]:
    """What parameter gradients read of the forward that is a sum over children: made in the kernel, in a fixed order."""
    sums = [v for e in part.joint.program.eqns if e.primitive in REDUCTIONS for v in e.outvars]
    wanted = [v for u in part.reverse.uses for v in u.operands.values() if is_var(v) and v not in part.joint.available]
    return [v for v in dict.fromkeys(wanted) if v in depends(part.joint.program.eqns, set(sums))]


def program_of(plan: Any, name: str | None, forward: bool, forest: bool = True, keep: bool = True) -> Program:
    """One direction of the inner role of a kind, kept with it. Raises [`Unfit`][].

    `forest`: no vertex has two parents; without `keep` a forward leaves nothing for a backward.
    """
    part = plan.inner[name]
    key = (forward, forest or forward, keep or not forward)
    if key not in part.launches:
        pushes = plan.push_states
        pushed = frozenset(range(len(plan.state_avals)) if pushes is None else pushes)
        try:
            made = Program(part, *key, pushed, state_bounds(plan))
            if made.precision == "f16" and not _measured(made):
                made = Program(part, *key, pushed, [math.inf] * len(plan.state_avals))
            part.launches[key] = made
        except Unfit as e:
            part.launches[key] = e
    found = part.launches[key]
    if isinstance(found, Unfit):
        raise found
    return found


def _measured(program: Program) -> bool:
    """Whether such products in float16 have run on a GPU: of at most two rows' sum, with weights that stay on chip."""
    sums = [operand for phase in program.level.phases for p in phase.products for operand in p.operands]
    return all(len(rows) <= 2 for rows in sums) and any(c.resident for c in candidates(program.level, program.precision))


def _precision(eqns: Sequence[Any], level: Domains, found: dict[Any, float]) -> str:
    """How products are computed: as JAX computes float32 products on this GPU at the precision that F asks for.

    What is in tf32 is as exact in "f16" where all that products read is bounded (`bounds`), so that it is in float16's range;
    half the bytes come from L2 then, and half as many steps are multiplied.
    """
    products = [e for e in eqns if is_product(e, {**level})]
    asked = {str(e.params["precision"]) for e in products}
    if any("HIGHEST" in a or "F32_F32_F32" in a for a in asked if "TF32" not in a and "BF16" not in a):
        return "fp32"
    if any("BF16_BF16" in a for a in asked):
        return "bf16"
    summed = [e.invars[1].aval.shape[e.params["dimension_numbers"][0][1][0]] for e in products]
    small = all(bound(e.invars[0], found) <= LARGEST and of_tf32_bits(e.params["precision"]) for e in products)
    return "f16" if products and small and all(k % 32 == 0 for k in summed) else "tf32"
