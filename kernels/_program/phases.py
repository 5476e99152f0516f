"""Cuts a level's program into phases: what a group of thread blocks runs without a barrier (VPPS section III, Cavs 3.5).

A program is straight-line equations for ONE vertex (or one of its child edges), in the domains STATIC, ROW and EDGE. A phase
has one domain, and the operands of its products were gathered, or stored by an earlier phase; `_program.assign` decides
which phase computes what. Between the two phases, the thread blocks of a group synchronise, or the product polls the rows
that it reads (`LaunchConfig.dataflow`).
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from cavs.kernels._program.assign import Operands, can_read, gathered_sum, phase_of_values
from cavs.kernels._program.comparisons import computed_once
from cavs.kernels._program.fit import (
    ACROSS,
    ELEMENTWISE,
    REDUCTIONS,
    STRUCTURE,
    check,
    check_dtypes,
    check_known,
    contracted_axis,
    is_product,
    unit_of,
    varying,
)
from cavs.kernels._program.jaxprs import (
    DOMAIN_NAMES,
    EDGE,
    ROW,
    STATIC,
    Atom,
    Domain,
    Domains,
    Eqn,
    Var,
    aval,
    domain_of,
    dtype_of,
    is_var,
)
from cavs.kernels._program.names import Tensor, TensorRole
from cavs.kernels._program.operations import (
    Equation,
    LevelProgram,
    Load,
    Operation,
    Phase,
    Product,
    ReduceChildren,
    ReduceVector,
    RowAddress,
    RowRead,
    Scratch,
    Source,
    Spread,
    Store,
)
from cavs.kernels._program.widths import num_blocks, stored_dtype


def cut(
    eqns: Sequence[Eqn],
    domains: Domains,
    sources: Mapping[Var, Source],
    outputs: Mapping[Var, list[RowAddress]],
    written: frozenset[Tensor],
    multiple: int = 16,
) -> LevelProgram:
    """Cuts a program into phases.

    Args:
        eqns: The equations of domains ROW and EDGE, in order; STATIC ones are computed before the launch.
        domains: The domain of every variable.
        sources: Where each input is read.
        outputs: Where each output is stored.
        written: The tensors that other thread blocks of the group write at earlier levels.
        multiple: What the lengths of products' sums must be a multiple of.

    Raises:
        Unfit: If the kernels cannot compute an equation.
    """
    for e in eqns:
        check_known(e)
    check_dtypes(outputs, "a value that levels store")
    valid, unit = unit_of(eqns, domains, sources, multiple)
    for e in eqns:
        check(e, domains, valid)
    cutter = _Cutter(eqns, domains, dict(sources), outputs, valid, unit, multiple)
    for n in reversed(range(len(cutter.drafts))):
        cutter.fill(n)
    return cutter.program(written)


@dataclasses.dataclass(eq=False)
class _Draft:
    """A phase that is being collected."""

    domain: Domain
    eqns: dict[Var, Eqn] = dataclasses.field(default_factory=dict)  # by each variable that they compute
    products: list[Eqn] = dataclasses.field(default_factory=list)
    stores: dict[Var, list[RowAddress]] = dataclasses.field(default_factory=dict)
    inputs: dict[Var, Source] = dataclasses.field(default_factory=dict)  # of inputs that it stores for later phases
    barrier: bool = False


class _Cutter:
    """Collects the phases, from the last to the first, and turns them into operations."""

    def __init__(
        self,
        eqns: Sequence[Eqn],
        domains: Domains,
        sources: dict[Var, Source],
        outputs: Mapping[Var, list[RowAddress]],
        valid: int,
        unit: int,
        multiple: int,
    ):
        self.domains, self.sources, self.valid, self.unit, self.multiple = domains, sources, valid, unit, multiple
        self.producer = {v: e for e in eqns for v in e.outvars}
        self.scratch: dict[Tensor, Scratch] = {}
        self.phase = phase_of_values(eqns, domains, sources, self.gathered)
        self.once = computed_once(eqns)
        count = max(self.phase.values(), default=-1) + 1
        of_phase = [next(domains[v] for v, n in self.phase.items() if n == i) for i in range(count)]
        # An input may be stored as it is, although no phase has its domain.
        of_phase += [d for d in (ROW, EDGE) if d not in of_phase and any(domains[v] == d for v in outputs)]
        self.drafts = [_Draft(domain) for domain in of_phase]
        for v, places in outputs.items():
            self.home(v).stores.setdefault(v, []).extend(places)

    def gathered(self, x: Atom) -> Operands | None:
        """The gathered rows whose sum is `x`: a product can read these although `x` is not stored. `None` if there are none."""
        return gathered_sum(x, self.producer, self.sources, self.joinable)

    def joinable(self, width: int) -> bool:
        """Whether a product can read rows of a width side by side."""
        return width // self.valid * self.unit % self.multiple == 0

    def home(self, v: Var) -> _Draft:
        """The first phase in which a value is available."""
        if v in self.phase:
            return self.drafts[self.phase[v]]
        return next(draft for draft in self.drafts if draft.domain == self.domains[v])

    def fill(self, n: int) -> None:
        """Collects the equations that the stores of phase n need.

        What another phase computes is stored there, unless it is cheap to compute again, and computed again it may differ in
        the last bit.
        """
        draft = self.drafts[n]
        todo: list[Atom] = list(draft.stores)
        seen: set[Var] = set()
        while todo:
            x = todo.pop()
            if not is_var(x) or x in seen or domain_of(x, self.domains) == STATIC or x not in self.producer:
                continue
            seen.add(x)
            e = self.producer[x]
            again = self.domains[x] == draft.domain and x not in self.once and self.cheap(e, draft.domain)
            if self.phase[x] != n and not again:
                self.store(x)
                continue
            for v in e.outvars:
                draft.eqns[v] = e
                seen.add(v)
            if is_product(e, self.domains):
                if self.gathered(e.invars[0]) is None:
                    self.store(e.invars[0])
                if all(other is not e for other in draft.products):
                    draft.products.append(e)
            elif e.primitive.name in REDUCTIONS or e.primitive.name in ACROSS:
                y = e.invars[0]
                if domain_of(y, self.domains) != STATIC and (
                    y not in self.sources or not can_read(e, y, self.domains, self.sources)
                ):
                    self.store(y)
            else:
                todo += list(e.invars)

    def store(self, x: Atom) -> None:
        """Has the phase that computes `x` store it, so that other phases read it from there."""
        assert is_var(x)
        draft = self.home(x)
        if x not in self.producer:
            draft.inputs.setdefault(x, self.sources[x])
        places = draft.stores.setdefault(x, [])
        if not places:
            tensor = Tensor(TensorRole.SCRATCH, len(self.scratch))
            places.append(RowAddress(tensor))
            width = max(1, num_blocks(aval(x), self.valid)) * self.unit
            self.scratch[tensor] = Scratch(self.domains[x], width, stored_dtype(aval(x)))
        self.sources[x] = RowRead(places[0].tensor, base=places[0].base, part=places[0].offset // self.valid)

    def cheap(self, eqn: Eqn, domain: Domain) -> bool:
        """Whether a value follows from inputs of `domain` by elementwise maths alone."""
        if eqn.primitive.name not in ELEMENTWISE and eqn.primitive.name not in STRUCTURE:
            return False
        return all(
            self.domains[x] == domain and (x not in self.producer or self.cheap(self.producer[x], domain))
            for x in varying(eqn, self.domains)
        )

    def program(self, written: frozenset[Tensor]) -> LevelProgram:
        """The phases as operations."""
        phases: list[Phase] = []
        fresh = set(written)  # tensors that were written since the last barrier
        for draft in self.drafts:
            products = [self.product(e) for e in draft.products]
            read = {tensor for p in products for tensor in p.tensors()} | self.reduced(draft)
            barrier = bool(read & fresh)
            fresh = set() if barrier else fresh
            fresh |= {place.tensor for places in draft.stores.values() for place in places}
            if draft.stores:
                _check_domain(draft, self.domains)
                phases.append(Phase(draft.domain, self.operations(draft, products), barrier))
        reduced = {tensor for draft in self.drafts if draft.stores for tensor in self.reduced(draft)}
        program = LevelProgram(tuple(phases), self.valid, self.unit, self.scratch, {}, False, {})
        read = {dtype_of(p.eqn.invars[0]) for p in program.products()}
        flows = read == {np.dtype(np.float32)} and not reduced & program.stored()
        return dataclasses.replace(program, flows=flows)

    def product(self, eqn: Eqn) -> Product:
        """A product, and the rows that it reads."""
        x, weight, axis = eqn.invars[0], eqn.invars[1], contracted_axis(eqn)
        assert is_var(x) and is_var(weight), "a weight is a variable"
        rows = self.gathered(x)
        if rows is None:
            source = self.sources[x]
            assert isinstance(source, RowRead), "a product's operand is stored"
            shape = aval(x).shape
            lead, k = int(np.prod(shape[:-1])), shape[-1] // self.valid
            rows = [[(dataclasses.replace(source, part=source.part + i * k),)] for i in range(lead)]
        return Product(eqn, weight, axis, tuple(map(tuple, rows)), aval(weight).shape[1 - axis] // self.valid)

    def reduced(self, draft: _Draft) -> set[Tensor]:
        """The tensors of which a phase reduces whole vectors."""
        operands = [e.invars[0] for e in draft.eqns.values() if e.primitive.name in REDUCTIONS]
        sources = [self.sources[x] for x in operands if is_var(x)]
        return {source.tensor for source in sources if isinstance(source, RowRead)}

    def operations(self, draft: _Draft, products: list[Product]) -> tuple[Operation, ...]:
        """The operations of a phase; the equations in the order in which its stores need them."""
        by_eqn: dict[int, Operation] = {id(p.eqn): p for p in products}
        for e in draft.eqns.values():
            if id(e) not in by_eqn:
                by_eqn[id(e)] = self.operation(e)
        stores = tuple(Store(v, place) for v, places in draft.stores.items() for place in places)
        everything = (*self.loads(draft, [e for e in by_eqn.values() if isinstance(e, Equation)]), *by_eqn.values())
        phase = Phase(draft.domain, everything, False)
        ordered = tuple(op for op in phase.in_order(stores) if not isinstance(op, Store))
        loads = [op for op in everything if isinstance(op, Load)]
        return (*loads, *products, *(op for op in ordered if not isinstance(op, Load | Product)), *stores)

    def operation(self, eqn: Eqn) -> Operation:
        """The operation of an equation that is not a product; one that reads stored rows names their tensor."""
        name, value, x = eqn.primitive.name, eqn.outvars[0], eqn.invars[0] if eqn.invars else None
        if name not in ACROSS and name not in REDUCTIONS:
            return Equation(eqn)
        assert x is not None and is_var(x) and domain_of(x, self.domains) != STATIC, "constants are not spread"
        source = self.sources[x]
        assert isinstance(source, RowRead), "what is read of other rows or thread blocks is stored"
        if name in REDUCTIONS:
            return ReduceVector(value, x, source, REDUCTIONS[name])
        if name == "spread":
            return Spread(value, x, source)
        return ReduceChildren(value, x, source, ACROSS[name])

    def loads(self, draft: _Draft, equations: Sequence[Equation]) -> list[Load]:
        """The values that a phase's equations and stores read from memory.

        A value that is also reduced whole is loaded late: the reduction reads it first.
        """
        operands = {
            e.invars[0] for e in draft.eqns.values() if e.primitive.name in (*ACROSS, *REDUCTIONS) if is_var(e.invars[0])
        }
        by_eqn = {id(e.eqn): e for e in equations}
        read = [x for e in draft.eqns.values() if id(e) in by_eqn for x in e.invars if is_var(x)]
        needed = [x for x in dict.fromkeys([*read, *draft.stores]) if x not in draft.eqns]
        loads = [Load(x, draft.inputs.get(x) or self.sources[x], early=x not in operands) for x in needed]
        return sorted(loads, key=lambda load: not load.early)


def _check_domain(draft: _Draft, domains: Domains) -> None:
    """Asserts that all that a phase computes, stores and reads by its own row is of its domain.

    Otherwise it would access other rows, or rows that do not exist. Only the equations `ACROSS` lead between rows and edges,
    by indices of the schedule.
    """
    wrong = [v for v in (*draft.eqns, *draft.stores) if domains[v] != draft.domain]
    for e in draft.eqns.values():
        if e.primitive.name not in ACROSS:
            wrong += [x for x in varying(e, domains) if domains[x] != draft.domain]
    assert not wrong, f"a phase over {DOMAIN_NAMES[draft.domain]} has values of another domain: {wrong}"
