"""Layouts of engine `persistent`: which it chooses, and that tight, spread and wide ones compute the same."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs._engines.persistent import chip, lower, wide_levels
from cavs._run import plans
from cavs.kernels import H200, Target, persistent
from tests.odd_graphs import joined
from tests.persistent_programs import CASES, INTERPRETER, assert_near, inputs_of, laid_out, plan_of, values
from tests.slow import few

pytestmark = pytest.mark.usefixtures("poisoned")


@INTERPRETER
@pytest.mark.parametrize("name", few(["ElmanRNN", "LSTM"], 1))
def test_tight_and_streaming_weights_in_the_interpreter(name: str) -> None:
    """Three tf32 numbers in two words, on the chip and from memory: the same as one in each."""
    make, graphs = CASES[name]
    F, params = make(48)
    x = inputs_of(name, graphs)
    loose, *others = (
        values(make(48)[0], params, graphs, x, laid_out(functools.partial(_with_weights, *place), interpret=True))
        for place in ((False, True), (True, True), (True, False))
    )
    for found in others:
        assert_near(found, loose, 1e-6)
    with jax.default_matmul_precision("highest"):
        assert_near(loose, values(F, params, graphs, x, "scan"), 2e-3)


def _with_weights(tight: bool, resident: bool, level: Any, forward: bool, config: Any) -> Any:
    return dataclasses.replace(config, precision="tf32", tight=tight, resident=resident)


@INTERPRETER
@pytest.mark.parametrize(("name", "rows"), few([("TreeFC", 2), ("ChildSumTreeLSTM", 2), ("linear", 1)], 1))
def test_wide_levels_in_the_interpreter(name: str, rows: int) -> None:
    """Levels of some vertices, or one in a launch of their own, weights in the order of its ring."""
    make, graphs = CASES[name]
    F, params = make(256)
    x = inputs_of(name, graphs, 256)

    def wide(level: Any, narrow: Any) -> tuple[Any, int]:
        return dataclasses.replace(narrow, rows=64, resident=False, dataflow=False, wide=True), rows

    with jax.default_matmul_precision("highest"):
        want = values(F, params, graphs, x, "scan")
    assert_near(values(make(256)[0], params, graphs, x, laid_out(wide=wide, interpret=True)), want, 1e-5)


@INTERPRETER
@pytest.mark.parametrize("name", few(["ChildSumTreeLSTM", "layer norm"], 1))
def test_spread_rows_in_the_interpreter(name: str) -> None:
    """The rows of all graphs as the share of the only group."""
    make, graphs = CASES[name]
    F, params = make(48)
    x = inputs_of(name, graphs)

    def narrow(level: Any, forward: bool, config: Any) -> Any:
        return dataclasses.replace(config, spread=True, dataflow=False)

    with jax.default_matmul_precision("highest"):
        want = values(F, params, graphs, x, "scan")
    assert_near(values(make(48)[0], params, graphs, x, laid_out(narrow, interpret=True)), want, 1e-5)


def test_which_levels_are_wide() -> None:
    """From the leaves' parents on, these at least; a level that is wide again above a narrow one is not."""
    graphs = cavs.from_parents([[4, 4, 5, 5, 6, 6, -1]] * 5 + [[1, 2, -1]] * 3)
    sched = cavs.schedule(graphs, scripts=True)
    assert sched.widths[1:].tolist() == [13, 8]
    for rows, want in ((14, 1), (9, 1), (8, 2), (1, 2)):
        assert int(wide_levels.count_wide_levels(sched.part_start, rows)) == want
    chains = cavs.schedule(cavs.from_lengths([3] * 8 + [9] * 2), scripts=True)
    assert int(wide_levels.count_wide_levels(chains.part_start, 5)) == 2


COMPLETE = cavs.from_parents([[-1, *(i // 2 for i in range(126))]] * 256)  # binary trees of 64 leaves


@pytest.mark.parametrize(
    ("target", "graphs", "policy", "engine", "reason"),
    [
        (Target.here(), 4, "batching", "native", None),
        (Target.here(), 4, "serial", "scan", "native is not for this schedule: the schedule runs vertex by vertex"),
        (H200, 4, "batching", "persistent", None),
        (H200, 9000, "batching", "scan", "persistent is not for this schedule: its levels have so many vertices"),
    ],
)
def test_explain_names_the_engine_for_the_schedule(
    monkeypatch: pytest.MonkeyPatch, target: Target, graphs: int, policy: str, engine: str, reason: str | None
) -> None:
    monkeypatch.setattr(Target, "here", staticmethod(lambda: target))
    if target == H200:
        monkeypatch.setattr(persistent, "unsupported", lambda target: None)
    program = vp.LSTM(2048, 8)
    sched = cavs.schedule(cavs.from_lengths([8] * graphs), policy=policy, scripts=target == H200)
    shapes = jax.eval_shape(program.init, jax.random.key(0)), jax.ShapeDtypeStruct((8,), jnp.float32)
    text = cavs.explain(program.vertex_function(), *shapes, sched=sched)
    assert f"Selected engine: {engine}" in text
    assert text.count("is not for this schedule") == (reason is not None) and (reason or "") in text


@pytest.mark.parametrize(
    ("program", "graphs", "wide"),
    [
        (vp.TreeFC(512), COMPLETE, True),
        (vp.TreeFC(512), cavs.from_parents([[2, 2, 4, 4, -1]] * 64), False),  # too few
        (vp.TreeFC(512), cavs.from_parents([[1, -1]]), False),
        (vp.TreeFC(48), COMPLETE, False),  # too short a sum
        (vp.LSTM(512, 8), cavs.from_lengths([2] * 9000), False),  # chains
    ],
)
def test_wide_levels_are_worth_a_launch(program: Any, graphs: cavs.Graphs, wide: bool) -> None:
    shape = cavs.schedule(graphs, scripts=True).shape
    with jax.default_matmul_precision("tensorfloat32"):
        shapes = jax.eval_shape(program.init, jax.random.key(0))
        inputs = jax.ShapeDtypeStruct((program.hidden if isinstance(program, vp.TreeFC) else 8,), jnp.float32)
        plan = plans.plan_of(program.vertex_function(), shapes, inputs)
        some = isinstance(program, vp.TreeFC) and program.hidden == 512
        assert ("run as tiled products" in cavs.explain(plan.function, shapes, inputs)) == some
        for forward in (True, False):
            made = lower.recurrence_of(plan, None, forward)
            found, rows = wide_levels.launch_configs(made, chip.LaunchOptions(H200), shape)
            want = ([True, False] if forward else [False, True]) if wide else [False]
            assert [config.wide for config in found] == want
            assert shape.inner[0] / 64 < rows <= shape.inner[0] / 4 if wide else rows == 0


@functools.cache
def shape_of(name: str, copies: int) -> Any:
    return cavs.schedule(joined([CASES[name][1]] * copies), scripts=True).shape


@pytest.mark.parametrize(
    ("name", "precision"), few(itertools.product(CASES, ["tensorfloat32", "BF16_BF16_F32", "highest"]), 20)
)
def test_every_batch_has_layouts(name: str, precision: str) -> None:
    """From one small graph on, as a GPU would be asked for them."""
    make, graphs = CASES[name]
    with jax.default_matmul_precision(precision):
        F, params = make(256)
        plan = plan_of(F, params, inputs_of(name, graphs, 256))
        for copies in (1, 5, 700):
            shape = shape_of(name, copies)
            for forward in (True, False):
                for kind, part in plan.inner.items():
                    if part.recurrent.eqns:
                        made = lower.recurrence_of(plan, kind, forward)
                        assert wide_levels.launch_configs(made, chip.LaunchOptions(H200), shape)[0]


def test_where_products_may_wait_for_numbers() -> None:
    """Where they alone read what CTAs make for each other, in float32 or in bf16: `LaunchConfig.dataflow`."""
    for name, precision, flows in (
        *(("BinaryTreeLSTM", None, True), ("reset before the product", "highest", True), ("ChildSumTreeLSTM", None, True)),
        *(("layer norm", None, False), ("BinaryTreeLSTM", "BF16_BF16_F32", True)),
    ):
        make, graphs = CASES[name]
        with jax.default_matmul_precision(precision):
            F, params = make(128)
            plan = plan_of(F, params, inputs_of(name, graphs, 128))
            made = lower.recurrence_of(plan, None, True)
            assert made.program.flows == flows, name
            found = chip.candidates(made.program, made.precision, H200)
        assert any(config.dataflow for config in found) == flows
