"""How the persistent kernels lie on the chip: packed weights, scripts, the choice of a layout and of an engine."""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from bench import tune as bench
from cavs import vertex_programs as vp
from cavs._engines import choose
from cavs._engines.engine import Job
from cavs._engines.persistent import chip, lower
from cavs._engines.persistent.engine import Persistent
from cavs._engines.scan.engine import Scan
from cavs._run import plans
from cavs._run.tune import key_of
from cavs.kernels import H200, Target, persistent
from cavs.kernels._layout import tuned
from cavs.kernels._layout.config import PARTS, LaunchConfig
from cavs.kernels._layout.layout import layout_of
from cavs.kernels._layout.pack import PackedWeight
from cavs.kernels.precision import PRECISIONS
from tests.lower_for_hopper import compile_for_hopper
from tests.markdown import blocks
from tests.odd_graphs import chain, joined, random_binary_tree
from tests.packing import pack_weights


def plan_of(hidden: int) -> Any:
    program = vp.LSTM(hidden, 16)
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32), jax.eval_shape(program.init, jax.random.key(0)))
    return plans.plan_of(program.vertex_function(), params, jax.ShapeDtypeStruct((16,), jnp.float32))


@pytest.mark.parametrize("hidden", [64, 256, 512, 1024, 2048])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_layouts_fit_the_chip(hidden: int, precision: str) -> None:
    for forward in (True, False):
        level = lower.recurrence_of(plan_of(hidden), None, forward).program
        found = chip.candidates(level, precision, H200)
        assert found
        for config in found:
            ctas = hidden // config.hb
            assert config.groups * ctas <= H200.multiprocessors  # all at once: they wait for each other
            assert layout_of(level, config).shared_memory(config) <= H200.shared_memory
            assert not config.tight or precision == "tf32"
        assert any(config.resident for config in found) == (hidden < 2048)
        assert not all(config.resident for config in found)


@pytest.mark.parametrize("hidden", [256, 512, 1024, 2048])
def test_the_cost_model_chooses_no_layout_that_spills(monkeypatch: pytest.MonkeyPatch, hidden: int) -> None:
    monkeypatch.setattr(tuned, "nearest", lambda device: {})
    sched = cavs.schedule(joined([chain(3)] * 256), scripts=True)
    for forward in (True, False):
        direction = lower.recurrence_of(plan_of(hidden), None, forward)
        config = chip.configure(direction, chip.LaunchOptions(H200), sched.shape)
        assert not chip.is_crowded(direction.program, config)


def test_batches_of_the_same_graphs_share_a_record() -> None:
    """A schedule pads 64 chains of 63 inner vertices, and 64 trees of 4,032 in all, by a little more or less."""
    powers = lambda rows: [int(key.split()[-1]) for key in tuned.keys([(8, 8)], True, "tf32", rows)]  # noqa: E731
    assert powers(63) == [64, 32] and powers(64) == [64] and powers(126) == [128, 64]
    assert powers(150) == [128, 256] and powers(182) == [256, 128] and powers(0.6) == powers(1) == [1]


def test_groups_share_the_rows_of_one_large_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cost model decides, also against a record of many graphs; a record of as few graphs decides against it."""
    program = vp.BinaryTreeLSTM(256, 16)
    params = jax.eval_shape(program.init, jax.random.key(0))
    plan = plans.plan_of(program.vertex_function(), params, jax.ShapeDtypeStruct((16,), jnp.float32))

    def choice(graphs: cavs.Graphs, forward: bool) -> LaunchConfig:
        shape = cavs.schedule(graphs, scripts=True).shape
        return chip.configure(lower.recurrence_of(plan, None, forward), chip.LaunchOptions(H200), shape)

    large, small = random_binary_tree(3000, seed=1), random_binary_tree(20, seed=1)
    for forward in (True, False):
        assert choice(large, forward).spread and not choice(large, forward).dataflow
        assert not choice(small, forward).spread
        assert not choice(joined([large] * PARTS), forward).spread
        made, shape = lower.recurrence_of(plan, None, forward), cavs.schedule(large, scripts=True).shape
        [key, *_], [of_many, *_] = chip.tuning_keys(made.program, forward, made.precision, shape)
        asked = chip.candidates(made.program, made.precision, H200)[0]
        record = {f.name: getattr(asked, f.name) for f in dataclasses.fields(asked) if f.name != "precision"}
        for name, follows in ((key, True), (of_many, False)):
            with monkeypatch.context() as patch:
                patch.setattr(tuned, "nearest", lambda device, name=name, record=record: {name: record | {"us": 1.0}})
                assert (choice(large, forward) == asked) == follows


def test_hopper_gpus_use_each_others_records() -> None:
    one, other = tuned.records("NVIDIA H200"), tuned.records("NVIDIA H100 80GB HBM3")
    assert tuned.nearest("NVIDIA H200") == other | one != one
    assert tuned.nearest("NVIDIA H100 80GB HBM3") == one | other != other


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the kernels need jax 0.11")
def test_the_engine_is_chosen_by_what_was_measured() -> None:
    """Resident weights: one launch for everything. Weights that stream: only where levels are narrow."""
    wide, narrow = (cavs.schedule(joined([chain(2)] * n), scripts=True) for n in (20_000, 40))
    for hidden, sched, engine in ((2048, wide, Scan()), (2048, narrow, Persistent()), (512, wide, Persistent())):
        job = Job(plan_of(hidden), sched.shape, (None,), H200)
        assert choose.choose_engine(None, job) == engine
        assert choose.choose_engine("persistent", job) == Persistent()


@pytest.mark.slow
def test_every_layout_on_record_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not among the candidates would be passed over without a word."""
    monkeypatch.setattr(Target, "here", staticmethod(lambda: H200))
    monkeypatch.setattr(persistent, "unsupported", lambda target: None)
    records, taken = tuned.nearest("NVIDIA H200"), set()
    for (cell, hidden), asked in itertools.product(
        {size[:2]: 0 for size in bench.SIZES}, ("tensorfloat32", "TF32_TF32_F32", "BF16_BF16_F32")
    ):
        with jax.default_matmul_precision(asked):
            tasks: list[Any] = []
            jax.eval_shape(lambda c=cell, h=hidden, t=tasks: t.extend(bench.tasks_of(c, h, PARTS)))  # runs no initialiser
            for task in tasks:
                key = key_of(task).rsplit(" ", 1)[0]
                found = chip.candidates(task.recurrence.program, task.recurrence.precision, H200)
                found = found + chip.spread(found)
                mine = {name: record for name, record in records.items() if name.split(",")[0].rsplit(" ", 1)[0] == key}
                for name, record in mine.items():
                    fields = {field: value for field, value in record.items() if field != "us"}
                    assert LaunchConfig(precision=task.recurrence.precision, **fields) in found, name
                taken |= mine.keys()
    assert taken == records.keys() and taken
    assert tuned.records("NVIDIA H100 80GB HBM3").keys() <= taken


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("hb", "blocks"), [(8, 3), (16, 1), (8, 2)])
def test_packed_weights_are_the_fragments_of_mma(precision: str, hb: int, blocks: int) -> None:
    """Each lane's registers hold the rows and K that PTX's m16n8k8 (m16n8k16) says, with K permuted as the rows are read."""
    unit, k = 32, 64
    weight = np.random.default_rng(3).standard_normal((k, blocks * unit)).astype(np.float32)
    width, chunk = blocks * hb, PRECISIONS[precision].chunk
    part = PackedWeight(None, 0, k, width, 0, 1, False)
    words = np.asarray(pack_weights([part], [jnp.asarray(weight)], unit, hb, precision))
    assert words.shape == (unit // hb, part.words(precision))
    for cta in range(unit // hb):
        columns = [b * unit + cta * hb + i for b in range(blocks) for i in range(hb)]
        at = 0
        for tile in range(0, width, 16):
            halves = min(2, (width - tile) // 8)
            for step in range(2 * k // chunk):
                for lane in range(32):
                    for pair in range(2):
                        for half in range(halves):
                            c, s = divmod(step, 2)
                            first = c * chunk + lane % 4 * chunk // 4 + s * chunk // 8 + pair * (chunk // 16)
                            want = weight[first : first + chunk // 16, columns[tile + 8 * half + lane // 4]]
                            if PRECISIONS[precision].dtype is not None:
                                got = words[cta, at : at + 1].view(PRECISIONS[precision].dtype).astype(np.float32)
                            else:
                                got = words[cta, at : at + 1]
                            rtol = {"fp32": 0, "tf32": 2**-11, "f16": 2**-11, "bf16": 2**-8}[precision]
                            np.testing.assert_allclose(got, want, rtol=rtol, atol=2**-25 * (precision == "f16"))
                            at += 1


def test_kernels_compile_for_hopper(tmp_path: Any) -> None:
    """Without a GPU, through ptxas: no registers are spilled to memory; what was kept for the backward comes a level ahead.

    A warp has several sums in flight.
    """
    kernels = compile_for_hopper("tests.compile_for_hopper", str(tmp_path))
    assert len(kernels) == 18 and sum(use["exchanges"] > 0 for use in kernels.values()) == 4, kernels
    assert sum(use["wide"] for use in kernels.values()) == 2, kernels
    for name, use in kernels.items():
        assert use["registers"] <= 255 and use["spilled"] == 0 and use["products"] > 0, (name, use)
        assert use["products"] >= 3 * use["chain"] > 0 or use["wide"], (name, use)  # products that do not wait for each other
        assert use["prefetches"] > 0 or use["wide"] or "backward" not in name, (name, use)
    page = (Path(__file__).parents[1] / "kernels" / "README.md").read_text()
    shown = set(re.findall(r"\b[a-z]+(?:\.\w+)+(?=\s)", re.sub(r"//.*", "", "".join(blocks("asm", page)))))
    made = {instruction for use in kernels.values() if not use["wide"] for instruction in use["instructions"]}
    assert len(shown) > 10 and not shown - made, f"kernels/README.md shows {shown - made}, which no kernel has"
