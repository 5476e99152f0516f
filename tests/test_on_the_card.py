"""Engine `persistent` on a GPU: values, bits, waits; every test is marked `gpu`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs
from cavs._engines.persistent import wide_levels
from cavs._engines.persistent.chip import candidates
from cavs._function import products
from cavs.kernels import H200, Target, tuned
from cavs.kernels._layout.layout import layout_of
from tests.odd_graphs import chain, joined, random_binary_tree, random_dag
from tests.persistent_programs import CASES, CHAINS, COPIES, assert_near, inputs_of, laid_out, values

TF32 = "TF32_TF32_F32"  # named, so that no product is in float16 instead


def divided(level: Any, config: Any, split: int, dataflow: bool) -> Any:
    """A layout in which so many CTAs of a cluster divide K of every product."""
    if split > 1:
        config = dataclasses.replace(config, hb=16, groups=4, rows=8, warpgroups=2, tight=False, paired=False, registers=False)
    return dataclasses.replace(config, split=split, dataflow=dataflow and level.flows)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("precision", "tolerance"), [("highest", 1e-5), (None, 2e-3), ("BF16_BF16_F32", 2e-2)])
@pytest.mark.parametrize("hidden", [128, 150])
def test_kernels_on_the_card(
    name: str, hidden: int, precision: str | None, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hidden == 128:
        monkeypatch.setattr("cavs._engines.persistent.engine.LATE_ROWS", 0)
    make, graphs = CASES[name]
    F, params = make(hidden)
    x = inputs_of(name, graphs, hidden)
    with jax.default_matmul_precision("highest"):
        want = values(F, params, graphs, x, "scan")
    with jax.default_matmul_precision(precision):
        got, again = (values(F, params, graphs, x, "persistent") for _ in range(2))
    # A layer norm divides by the root of what a product made: that turns a product's error into a larger one.
    assert_near(got, want, tolerance * (10 if name == "layer norm" and precision != "highest" else 1))
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, (got, again)), strict=True))
    if precision != "highest" and hidden == 128:  # the same bits whether CTAs meet or wait for numbers

        def other(level: Any, forward: bool, config: Any) -> Any:
            return dataclasses.replace(config, dataflow=level.flows and not config.dataflow)

        with jax.default_matmul_precision(precision):
            met = values(make(hidden)[0], params, graphs, x, laid_out(other))
        assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, (got, met)), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", COPIES)
def test_copied_states_on_the_card(name: str) -> None:
    make, graphs = COPIES[name]
    F, params = make(128)
    x = inputs_of(name, graphs, 128)
    with jax.default_matmul_precision("highest"):
        got, want = (values(F, params, graphs, x, engine) for engine in ("persistent", "scan"))
    assert_near(got, want, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["scan", "persistent"])
@pytest.mark.parametrize("name", ["BinaryTreeLSTM", "TreeFC", "LSTM", "GRU", "linear"])
def test_products_in_float16_on_the_card(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager and lazy products, as where they are large: as near as in tf32, and twice the same bits."""
    make, graphs = CASES[name]
    hidden = 96  # of no other test: compiled code is kept
    F, params = make(hidden)
    x = inputs_of(name, graphs, hidden)
    with jax.default_matmul_precision("highest"):
        want = values(F, params, graphs, x, "scan")
    made = []
    monkeypatch.setattr(products, "_faster", lambda *sizes: made.append(sizes) or True)
    monkeypatch.setattr(products, "_faster_gradient", lambda *sizes: made.append(sizes) or True)
    got, again = (values(F, params, graphs, x, engine) for _ in range(2))
    assert made
    assert_near(got, want, 2e-3)
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, (got, again)), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["BinaryTreeLSTM", "GRU", "constant states"])
@pytest.mark.parametrize(
    ("dataflow", "split", "precision"),
    [(False, 1, None), (True, 1, None), (True, 1, "BF16_BF16_F32"), (False, 2, None), (True, 2, None)],
)
def test_thousands_of_passes_are_alike_on_the_card(name: str, dataflow: bool, split: int, precision: str | None) -> None:
    """A number that is read too early, or a wait that never ends, would show sooner or later."""
    make, graphs = CASES[name]
    F, params = make(128)
    sched = cavs.schedule(graphs)
    x = jax.tree.map(sched.pad, inputs_of(name, graphs, 128))
    engine = laid_out(lambda level, forward, config: divided(level, config, split, dataflow))

    def gradient(params: Any, x: Any) -> list[Any]:
        def loss(params: Any, x: Any) -> Any:
            pushes = cavs.run(F, params, sched, x, engine=engine)
            return sum((y**2).sum() for y in jax.tree.leaves(pushes))

        return jax.tree.leaves(jax.grad(loss, (0, 1))(params, x))

    def one(before: list[Any], turn: Any) -> tuple[list[Any], Any]:
        now = gradient(*jax.lax.optimization_barrier((params, x, turn))[:2])
        return now, jnp.stack([(a != b).any() for a, b in zip(now, before, strict=True)]).any()

    with jax.default_matmul_precision(precision):
        first, _ = jax.jit(lambda state: jax.lax.scan(one, state, jnp.arange(1)))(gradient(params, x))
        _, differ = jax.jit(lambda state: jax.lax.scan(one, state, jnp.arange(5000)))(first)
    assert np.isfinite(np.concatenate([np.ravel(a) for a in first])).all()
    assert int(differ[1:].sum()) == 0  # the first is held against what another program made


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", None, "BF16_BF16_F32"])
@pytest.mark.parametrize("tight", [False, True])
def test_nan_stays_nan_on_the_card(precision: str | None, tight: bool) -> None:
    """Also the NaN that GPUs make, all ones, in a weight or in a leaf: whoever descends from it is NaN, as with engine scan."""
    make, graphs = CASES["TreeFC"]
    nan = np.array(0x7FFFFFFF, np.int32).view(np.float32)
    x = np.array(inputs_of("TreeFC", graphs, 128))
    for place in ("weight", "leaf"):
        F, params = make(128)
        mine = dict(params)
        rows = x.copy()
        if place == "weight":
            mine["u"] = np.array(params["u"])
            mine["u"][5, 7] = nan
        else:
            rows[:, 3] = nan
        found = []
        one = laid_out(lambda level, forward, config: dataclasses.replace(config, hb=16, tight=tight and precision is None))
        for engine in ("scan", one):
            with jax.default_matmul_precision(precision):
                found.append(np.isnan(np.asarray(cavs.run(F, mine, cavs.schedule(graphs), rows, engine=engine))))
        assert found[0].any() and (found[1] >= found[0]).all(), place


@pytest.mark.gpu
def test_tight_weights_on_the_card() -> None:
    """Three tf32 numbers in two words: the same bits as one in each."""
    make, graphs = CASES["BinaryTreeLSTM"]
    _, params = make(256)
    x, found = inputs_of("BinaryTreeLSTM", graphs), []
    for tight in (False, True):
        engine = laid_out(lambda level, forward, config, t=tight: dataclasses.replace(config, hb=16, rows=8, tight=t))
        with jax.default_matmul_precision(TF32):
            found.append(values(make(256)[0], params, graphs, x, engine))
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, found), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 32])
def test_paired_sums_on_the_card(rows: int) -> None:
    """Warps that add their sums two by two."""
    make, graphs = CASES["BinaryTreeLSTM"]
    _, params = make(256)
    x = inputs_of("BinaryTreeLSTM", graphs, 256)
    with jax.default_matmul_precision("highest"):
        want = values(make(256)[0], params, graphs, x, "scan")
    fields = {"hb": 16, "rows": rows, "paired": True, "tight": False}
    engine = laid_out(lambda level, forward, config: dataclasses.replace(config, **fields))
    assert_near(values(make(256)[0], params, graphs, x, engine), want, 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["BinaryTreeLSTM", "TreeFC", "GRU", "layer norm"])
@pytest.mark.parametrize(
    ("split", "dataflow", "paired", "precision", "tolerance"),
    [
        (2, False, False, "highest", 1e-5),
        (2, True, True, "highest", 1e-5),
        (2, False, False, None, 2e-3),
        (2, True, True, None, 2e-3),
        (4, True, False, None, 2e-3),
        (2, False, False, "BF16_BF16_F32", 2e-2),
        (2, True, True, "BF16_BF16_F32", 2e-2),
    ],
)
def test_divided_products_on_the_card(
    name: str, split: int, dataflow: bool, paired: bool, precision: str | None, tolerance: float
) -> None:
    """CTAs that divide K of every product, and send each other their sums."""
    make, graphs = CASES[name]
    _, params = make(256)
    x = inputs_of(name, graphs, 256)
    with jax.default_matmul_precision("highest"):
        want = values(make(256)[0], params, graphs, x, "scan")

    def choose(level: Any, forward: bool, config: Any) -> Any:
        return dataclasses.replace(divided(level, config, split, dataflow), paired=paired)

    with jax.default_matmul_precision(precision):
        got, again = (values(make(256)[0], params, graphs, x, laid_out(choose)) for _ in range(2))
    assert_near(got, want, tolerance * (10 if name == "layer norm" and precision != "highest" else 1))
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, (got, again)), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [256, 1024])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("BinaryTreeLSTM", {"rows": 16, "warpgroups": 2, "in_flight": 12, "paired": True}),
        ("BinaryTreeLSTM", {"rows": 8, "warpgroups": 2, "in_flight": 24, "dataflow": True}),
        ("LSTM", {"rows": 16, "warpgroups": 3, "in_flight": 12, "paired": True}),
        ("LSTM", {"rows": 8, "warpgroups": 2, "in_flight": 24, "dataflow": True}),
        ("TreeFC", {"rows": 16, "warpgroups": 3, "in_flight": 12, "paired": True}),
        ("BinaryTreeLSTM", {"hb": 32, "rows": 8, "warpgroups": 3, "in_flight": 12, "resident": False}),
        ("BinaryTreeLSTM", {"rows": 16, "warpgroups": 3, "in_flight": 12, "resident": False, "split": 1}),
        ("LSTM", {"hb": 32, "rows": 32, "warpgroups": 2, "in_flight": 12, "resident": False}),
        ("TreeFC", {"hb": 32, "rows": 16, "warpgroups": 4, "in_flight": 12, "resident": False}),
    ],
)
def test_divided_products_of_tight_weights_on_the_card(name: str, layout: dict[str, Any], hidden: int) -> None:
    """The layouts that long rows are measured to want, on levels with several tiles a warpgroup. Some weights stream."""
    rng = np.random.default_rng(3)
    sizes = [int(n) for n in rng.integers(1, 40, 150)]
    graphs = joined([chain(n) if name == "LSTM" else random_binary_tree(n, seed=n) for n in sizes])
    make, _ = CASES[name]
    _, params = make(hidden)
    x = inputs_of(name, graphs, hidden)

    def choose(level: Any, forward: bool, config: Any) -> Any:
        groups = 128 * layout.get("hb", 16) // hidden
        wanted = {"hb": 16, "groups": groups, "tight": True, "split": 2, "paired": False, "dataflow": False, "registers": False}
        asked = dataclasses.replace(config, **wanted | layout)
        fits = layout_of(level, asked).shared_memory(asked) <= H200.shared_memory
        assert fits or forward, "backward they all fit"
        return asked if fits else config

    with jax.default_matmul_precision("highest"):
        want = values(make(hidden)[0], params, graphs, x, "scan")
    F, engine = make(hidden)[0], laid_out(choose)
    with jax.default_matmul_precision(TF32):
        got, again = (values(F, params, graphs, x, engine) for _ in range(2))
    assert_near(got, want, 2e-3)
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, (got, again)), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "dataflow"), [(8, True), (16, False)])
@pytest.mark.parametrize("name", ["BinaryTreeLSTM", "LSTM", "ChildSumTreeLSTM", "GRU"])
@pytest.mark.parametrize(("hidden", "precision", "tolerance"), [(512, None, 2e-3), (256, "BF16_BF16_F32", 2e-2)])
def test_weights_in_registers_on_the_card(
    name: str, hidden: int, rows: int, dataflow: bool, precision: str | None, tolerance: float
) -> None:
    """Levels of one and of several tiles a warpgroup. The bits are those with weights in shared memory."""
    sizes = [int(n) for n in np.random.default_rng(3).integers(1, 12, 150)]
    graphs = joined([chain(n) if name in ("LSTM", "GRU") else random_binary_tree(n, seed=n) for n in sizes])
    make, _ = CASES[name]
    _, params = make(hidden)
    x, used = inputs_of(name, graphs, hidden), []

    def choose(level: Any, forward: bool, config: Any, registers: bool) -> Any:
        found = [c for c in candidates(level, config.precision, H200) if c.registers and c.rows == rows]
        found = [c for c in found if c.dataflow == (dataflow and level.flows)]
        used.extend(found)
        return dataclasses.replace(found[0], registers=registers) if found else config

    with jax.default_matmul_precision("highest"):
        want = values(make(hidden)[0], params, graphs, x, "scan")
    with jax.default_matmul_precision(precision):
        got, same = (
            values(make(hidden)[0], params, graphs, x, laid_out(functools.partial(choose, registers=registers)))
            for registers in (True, False)
        )
    if not used:
        pytest.skip("the weights do not fit in registers, or products are not in 16 bits")
    assert_near(got, want, tolerance)
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, (got, same)), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [{"hb": 16, "groups": 8}, {"hb": 32, "groups": 16, "rows": 8, "split": 2}])
@pytest.mark.parametrize("name", CASES)
def test_spread_rows_on_the_card(name: str, layout: dict[str, Any]) -> None:
    """Groups that share the rows of every level: of one graph, of a few, and on levels with fewer rows than groups."""
    make, few = CASES[name]
    if few is CHAINS:
        batches = [chain(7), few]
    elif name in ("BinaryTreeLSTM", "TreeFC"):
        batches = [random_binary_tree(700, seed=3), few]
    else:
        batches = [few]
    wanted = {"spread": True, "dataflow": False, "paired": False, "tight": False, "split": 1, "registers": False}

    def choose(level: Any, forward: bool, config: Any) -> Any:
        asked = dataclasses.replace(config, **wanted | layout)
        return asked if layout_of(level, asked).shared_memory(asked) <= H200.shared_memory else config

    for graphs in batches:
        _, params = make(256)
        x = inputs_of(name, graphs, 256)
        with jax.default_matmul_precision("highest"):
            want = values(make(256)[0], params, graphs, x, "scan")
        F, engine = make(256)[0], laid_out(choose)
        got, again = (values(F, params, graphs, x, engine) for _ in range(2))
        assert_near(got, want, 2e-3 * (10 if name == "layer norm" else 1))
        assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, (got, again)), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "hidden", "hb", "dataflow"),
    [
        *(
            (name, 256, 64, True)
            for name in ("BinaryTreeLSTM", "TreeFC", "NaryTreeLSTM", "ChildSumTreeLSTM", "linear", "DAGNN")
        ),
        *((name, 256, 32, False) for name in ("BinaryTreeLSTM", "reset before the product", "layer norm", "constant states")),
        *(("TreeFC", 512, hb, True) for hb in (256, 128)),
        *(("BinaryTreeLSTM", 1024, hb, False) for hb in (64, 32)),
    ],
)
def test_wide_levels_on_the_card(name: str, hidden: int, hb: int, dataflow: bool) -> None:
    """Levels of many vertices as tiled products in a launch of their own: several tiles, one that is full, one of few rows."""
    make, graphs = CASES[name]
    sizes = [int(n) for n in np.random.default_rng(3).integers(2, 12, 600)]
    if name in ("ChildSumTreeLSTM", "DAGNN", "layer norm", "constant states"):
        graphs = joined([random_dag(n, (1, 2, 3), seed=n) for n in sizes])
    else:
        graphs = joined([chain(n) if graphs is CHAINS else random_binary_tree(n, seed=n) for n in sizes])
    _, params = make(hidden)
    x, ran = inputs_of(name, graphs, hidden), []

    def wide(level: Any, narrow: Any) -> tuple[Any, int]:
        found = next(c for units in (hb, hb // 2, hb // 4) for c in wide_levels.fitting(level, units, H200))
        ran.append(found)
        return dataclasses.replace(found, groups=found.groups if hb in (64, 256) else 3), 40  # one tile each, or more

    def choose(level: Any, forward: bool, config: Any) -> Any:
        return dataclasses.replace(config, dataflow=dataflow and level.flows)

    with jax.default_matmul_precision(TF32):
        got, again = (values(make(hidden)[0], params, graphs, x, laid_out(choose, wide)) for _ in range(2))
    assert len(ran) >= 2
    with jax.default_matmul_precision(TF32):  # the same products, summed in another order
        assert_near(values(make(hidden)[0], params, graphs, x, laid_out(choose)), got, 5e-4)
    if name != "layer norm":  # where a step of relu is, an error of tf32 is a large one
        with jax.default_matmul_precision("highest"):
            assert_near(got, values(make(hidden)[0], params, graphs, x, "scan"), 2e-3)
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, (got, again)), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("dataflow", "split"), [(False, 1), (True, 1), (True, 2)])
def test_a_wait_in_vain_is_reported(dataflow: bool, split: int) -> None:
    """CTAs that wait for ever would hang the card; they give up, and the result is NaN: never a wrong number."""
    F, params = CASES["reset before the product"][0](128)  # a new F: nothing of it is compiled
    x = inputs_of("reset before the product", CHAINS)
    sched = cavs.schedule(CHAINS, scripts=True)
    odd = {"hb": 8, "rows": 16, "groups": 1, "spins": 0, "dataflow": dataflow, "split": split, "registers": False}
    engine = laid_out(lambda level, forward, config: dataclasses.replace(config, **odd))
    h = np.asarray(cavs.run(F, params, sched, x, engine=engine))
    assert np.isnan(h).all()


@pytest.mark.gpu
def test_a_wait_in_vain_of_a_wide_level_is_reported() -> None:
    F, params = CASES["TreeFC"][0](256)
    graphs = joined([random_binary_tree(9, seed=n) for n in range(40)])
    sched = cavs.schedule(graphs, scripts=True)

    def wide(level: Any, narrow: Any) -> tuple[Any, int]:
        return dataclasses.replace(wide_levels.fitting(level, 64, H200)[0], spins=0), 1

    h = np.asarray(cavs.run(F, params, sched, inputs_of("TreeFC", graphs, 256), engine=laid_out(wide=wide)))
    assert np.isnan(h).all()


@pytest.mark.gpu
def test_a_step_tunes_a_new_function_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuned.nearest.cache_clear()
    program = vertex_programs.BinaryTreeLSTM(176, 24)  # a width of which no record is shipped
    F, params = program.vertex_function(), program.init(jax.random.key(0))
    loader = cavs.data.Loader(joined([random_binary_tree(12, seed=n) for n in range(64)]), 32, steps=2, seed=None)

    def loss(params: Any, sched: cavs.Schedule) -> jax.Array:
        x = jnp.ones((sched.shape.vertices, 24), jnp.float32)
        return (cavs.run(F, params, sched, x, select=sched.roots) ** 2).mean()

    def train(params: Any, sched: cavs.Schedule) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(params, sched)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    batches, found = next(iter(loader)), []
    try:
        for seconds, launches in ((0, 0), (60, 2), (60, 0)):
            step = cavs.data.step(train, tune=seconds)
            found.append(step(params, batches))
            assert len(step.tuned) == launches
            own = tuned._read(tuned.own_file(Target.here().device_kind))
            assert len(own) == (2 if seconds else 0) and all(record["us"] > 0 for record in own.values())
    finally:
        tuned.nearest.cache_clear()
    without, after, again = map(jax.tree.leaves, found)
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(after, again, strict=True))
    for a, b in zip(without, after, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-4)
