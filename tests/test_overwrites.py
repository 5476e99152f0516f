"""Nothing overwrites what is still read: engines `native` and `persistent` refuse to build a program that does.

They check each program, and so those of all other tests. Here they are given programs with a mistake.
"""

import collections
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import cavs
from cavs._engines.native import program as native_program
from cavs._engines.native.check import check_accesses
from cavs._engines.native.values import Op, Opcode, Place, Segment, Slot
from cavs._engines.persistent import lower
from cavs.kernels import LevelProgram, Load, Phase, RowRead, native_unavailable
from cavs.kernels._program import check
from tests.odd_graphs import BATCHES
from tests.persistent_programs import CASES, COPIES, inputs_of, plan_of
from tests.programs import IN_FORESTS, PROGRAMS
from tests.truth import sched

NATIVE = pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))


def build(name: str) -> None:
    """Traces the gradients of a program by engine `native`, in float32."""
    program, batch = PROGRAMS[name], "forest" if (name, "forest") in IN_FORESTS else PROGRAMS[name].batches[0]
    function = copy.copy(program.function)
    vars(function).pop("_memo", None)  # a copy refers to what the original was traced to
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), program.params)
    x = jax.ShapeDtypeStruct((BATCHES[batch].num_vertices, *program.rows.shape), np.float32)

    def loss(params: Any, x: Any) -> Any:
        return sum(y.sum() for y in jax.tree.leaves(cavs.run(function, params, sched(batch), x, engine="native")))

    jax.eval_shape(jax.grad(loss, (0, 1)), params, x)


def built(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Segment], Any, list[Slot]]]:
    """What `check_accesses` is given for the programs of a vertex function."""
    found: list[Any] = []
    monkeypatch.setattr(native_program, "check_accesses", lambda *program: found.append(program))
    build(name)
    assert found
    return found


@NATIVE
@pytest.mark.parametrize("name", ["running_sum", "delayed", "swap_back"])
def test_cotangents_that_are_not_copied_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_program, "_with_copies", list)
    with pytest.raises(AssertionError, match=r"reads rows of \('cotangent', .* that are overwritten"):
        build(name)


def must_follow(later: Op, op: Op) -> bool:
    """Whether an operation reads all that another one writes, or overwrites rows that this one reads."""
    if op.to and any(view.base is op.to.base for view in later.sources):
        return op.n == op.to.base.n
    if later.opcode == Opcode.SCATTER:  # into rows of children
        return op.opcode == Opcode.GATHER and op.tensor == later.tensor or later.tensor in [tensor for _, tensor in op.gathered]
    rows = {view.base.tensor for view in op.sources if view.base.place == Place.ROWS}
    return bool(later.to) and later.to.base.tensor in rows


def in_front(segments: list[Segment], later: Op, op: Op) -> list[Segment]:
    """The segments with an operation in front of another one, or of the products of which this is one."""
    found = []
    for segment in segments:
        ops = [x for x in segment.ops if x is not later]
        if op in segment.ops or op in segment.products:
            at = ops.index(op) if op in segment.ops else len(ops)
            ops = [*ops[:at], later, *ops[at:]]
        found.append(Segment(ops, segment.products))
    return found


@NATIVE
@pytest.mark.parametrize("name", ["running_sum", "swap_back", "BinaryTreeLSTM", "attention", "matrix states"])
def test_operations_in_another_order_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in front of any other one that it must follow."""
    tried: collections.Counter[Opcode] = collections.Counter()
    for segments, bases, slots in built(name, monkeypatch):
        check_accesses(segments, bases, slots)
        everything = [op for segment in segments for ops in segment for op in ops]
        for n, later in enumerate(everything):
            for op in everything[:n] if later.opcode != Opcode.PRODUCT else ():
                if must_follow(later, op):
                    with pytest.raises(AssertionError, match="engine native"):
                        check_accesses(in_front(segments, later, op), bases, slots)
                    tried[later.opcode] += 1
    assert tried.total() > 9 and (name != "BinaryTreeLSTM" or tried[Opcode.SCATTER])


@NATIVE
@pytest.mark.parametrize("name", ["BinaryTreeLSTM", "attention"])
def test_values_that_share_a_slot_too_early_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0
    for segments, bases, slots in built(name, monkeypatch):
        for a in range(len(slots)):
            for b in [b for b in range(a) if slots[b][1:] == slots[a][1:]]:
                wide = [slot._replace(n=max(slots[a].n, slots[b].n)) for slot in slots]
                with pytest.raises(AssertionError, match="engine native"):
                    check_accesses(segments, {base: b if slot == a else slot for base, slot in bases.items()}, wide)
                tried += 1
    assert tried > 9


# Engine persistent.


def replacing() -> Iterator[lower.Recurrence]:
    """The backwards of all programs in which cut cotangents replace kept values."""
    for name, (make, graphs) in (CASES | COPIES).items():
        F, params = make()
        made = lower.recurrence_of(plan_of(F, params, inputs_of(name, graphs)), None, False)
        if made.replaced:
            yield made


def with_operation(program: LevelProgram, n: int, old: Any, new: Any) -> LevelProgram:
    """The program with another operation in phase n."""
    operations = tuple(new if op is old else op for op in program.phases[n].operations)
    phases = [dataclasses.replace(phase, operations=operations) if n == i else phase for i, phase in enumerate(program.phases)]
    return dataclasses.replace(program, phases=tuple(phases))


def test_kept_values_that_are_read_too_late_are_refused() -> None:
    """In another phase after the store, among the operations of whose order nothing is known, by another thread, or block."""
    tried = 0
    for made in replacing():
        program, overwritten = made.program, made.overwritten
        for n, phase in enumerate(program.phases):
            for load in phase.of(Load):
                if not isinstance(load.source, RowRead) or load.source.tensor not in overwritten:
                    continue
                wrong = [dataclasses.replace(program, phases=(*program.phases, Phase(phase.domain, (load,), False)))]
                source = dataclasses.replace(load.source, index=lower.EDGE_CHILD)
                wrong.append(with_operation(program, n, load, dataclasses.replace(load, source=source)))
                if overwritten[load.source.tensor] in phase.writes():
                    wrong.append(with_operation(program, n, load, dataclasses.replace(load, early=False)))
                for product in phase.products:
                    operands = (((load.source,),), *product.operands[1:])
                    wrong.append(with_operation(program, n, product, dataclasses.replace(product, operands=operands)))
                for other in wrong:
                    with pytest.raises(AssertionError, match="replaced[0-9], .* may have replaced it"):
                        check.check_accesses(other, overwritten)
                tried += 1
    assert tried > 9


def test_products_without_a_barrier_are_refused() -> None:
    tried = 0
    for name, (make, graphs) in CASES.items():
        F, params = make()
        plan = plan_of(F, params, inputs_of(name, graphs))
        for forward in (True, False):
            program = lower.recurrence_of(plan, None, forward).program
            phases = tuple(dataclasses.replace(phase, barrier=False) for phase in program.phases)
            with pytest.raises(AssertionError, match="is read before it is stored"):
                check.check_accesses(dataclasses.replace(program, phases=phases), {})
            tried += 1
    assert tried == 2 * len(CASES)


def test_phases_in_another_order_and_second_stores_are_refused() -> None:
    make, graphs = CASES["reset before the product"]
    F, params = make()
    program = lower.recurrence_of(plan_of(F, params, inputs_of("reset before the product", graphs)), None, False).program
    with pytest.raises(AssertionError, match="is read before it is stored"):
        check.check_accesses(dataclasses.replace(program, phases=program.phases[::-1]), {})
    phase = program.phases[0]
    twice = dataclasses.replace(phase, operations=(*phase.operations, phase.stores[0]))
    with pytest.raises(AssertionError, match="is stored twice"):
        check.check_accesses(dataclasses.replace(program, phases=(twice, *program.phases[1:])), {})
