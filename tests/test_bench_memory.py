"""Suite `memory` of the benchmarks: measurements in processes of their own, and the tables made from them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from bench import memory, memory_report, memory_steps, models, store

TINY = memory.Size(graphs=8, hidden=8, points=2, steps=1, quarters=(16,), echo="small", samples=8)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A program under two budgets, a quarter, a program over arrays, whole steps, and a measurement that fails."""
    folder = tmp_path_factory.mktemp("results")
    wanted = memory.tasks("cpu", TINY, ("budgets", "quarter"), ("tree_fc",))
    wanted = [task for task in wanted if task["engine"] == "scan"]
    wanted += memory.tasks("cpu", TINY, ("plans",), ("mlp",))
    step = {"part": "steps", "case": "mixer", "samples": 16, "hidden": 16, "steps": 1}
    wanted += [
        step | {"variant": v, "capped": "400KiB" in v} for v in ("jax.grad", "jax.checkpoint", "parts 400KiB", "recompute min")
    ]
    wanted.append(wanted[0] | {"engine": "none such"})
    return folder, memory.run("cpu", wanted, folder, tell=lambda text: None)


def test_the_suite_has_every_program_engine_and_model():
    wanted = memory.tasks("gpu", memory.SIZES["gpu", False])
    assert len([t for t in wanted if t["part"] == "budgets"]) == 2 * len(memory.PROGRAMS)
    assert [t["program"] for t in wanted if t["part"] == "plans"] == [*memory.PLANS]
    assert {*memory.PLANS} == {*models.ARRAYS} | {*list(memory_steps.PROGRAMS)[-4:]}
    assert {(t["case"], t["variant"]) for t in wanted if t["part"] == "echo"} == {
        *((case, variant) for case in models.CASES for variant in memory.VARIANTS),
        *(("nmt", variant) for variant in memory.TORCH),
    }
    keys = [memory.key(task) for task in wanted]
    assert len(set(keys)) == len(keys) and sum(t.get("capped", False) for t in wanted) == 6


@pytest.mark.slow
def test_budgets_are_kept_and_change_no_gradient(measured):
    _, (curve, *_) = measured
    points = curve["points"]
    assert len(points) == 2 and points[0]["parts"] == 1 and points[-1]["parts"] > 1
    assert all(p["temp"] <= p["budget"] and 1 <= p["compilations"] <= 5 for p in points)
    assert memory_report.falls(points)
    assert all(p["difference"] < 1e-5 and p["ms"] > 0 for p in points)


@pytest.mark.slow
def test_a_quarter_of_the_memory_in_parts(measured):
    _, (_, quarter, *_) = measured
    assert quarter["parts"][0] == 1 < quarter["parts"][1] and quarter["temp"][1] <= 0.255 * quarter["temp"][0]
    assert quarter["time"] > 0 and len(quarter["ms"]) == 2


@pytest.mark.slow
def test_other_programs_keep_their_budgets(measured):
    _, (_, _, arrays, *_) = measured
    assert len(arrays["points"]) == 6 and arrays["refused"]
    assert all(p["temp"] <= p["budget"] and 1 <= p["compilations"] <= 5 for p in arrays["points"])
    assert arrays["points"][0]["parts"] == 1 < arrays["points"][3]["parts"]


@pytest.mark.slow
def test_a_step_is_compiled_in_one_process_and_runs_in_another(measured):
    _, (*_, plain, by_hand, parts, least, _) = measured
    assert least["temp"] <= plain["temp"] and parts["temp"] <= parts["budget"] < plain["temp"] and parts["parts"] > 1
    assert all(r["loss"] > 0 and r["ms"] > 0 and r["total"] == r["temp"] + r["arrays"] for r in (plain, by_hand, parts, least))
    assert plain["loss"] == pytest.approx(least["loss"], rel=1e-5) == pytest.approx(by_hand["loss"], rel=1e-5)


@pytest.mark.slow
def test_tables_follow_from_the_results(measured):
    folder, (*_, failed) = measured
    assert "engine: got 'none such'" in failed["error"]
    written = memory_report.write(folder)
    assert written is not None
    text = written.read_text()
    assert (
        "| tree_fc | scan | 8 x h8 |" in text
        and "| mlp | 8 x h8 |" in text
        and "| mixer | parts 400KiB | 16 |" in text
        and "- tree_fc none such: " in text
    )
    memory_report.write(folder)
    assert written.read_text() == text


def test_a_model_of_echo_with_and_without_recompute(tmp_path, monkeypatch):
    small = {"hidden": 8, "batch": 2, "length": 6, "words": (20, 16)}
    monkeypatch.setitem(models.CASES, "nmt", dataclasses.replace(models.CASES["nmt"], small=small))
    task = {"part": "echo", "case": "nmt", "size": "small", "steps": 1, "capped": False}
    plain, ours = (record_of(memory_steps.compiling(task | {"variant": v}, tmp_path)) for v in ("jax.grad", "recompute hand"))
    assert ours["temp"] < plain["temp"] and ours["predicted"] > 0


def record_of(measurement):
    next(measurement)
    with pytest.raises(StopIteration) as done:
        next(measurement)
    return done.value.value


def test_models_do_not_read_what_follows_a_sequence():
    def drawn(name, **small):
        found = models.CASES[name]
        compiled = jax.jit(found.loss)
        return lambda *args: float(compiled(*args)), *found.init(jax.random.key(0), **found.small | small)

    loss, params, (source, target, lengths, keys) = drawn("transformer", hidden=16, length=8, layers=1, words=20)
    beyond = jnp.arange(8) >= lengths[:, None]
    assert beyond.any()
    other = jnp.where(beyond, (source + 1) % 20, source)
    assert loss(params, (other, target, lengths, keys)) == pytest.approx(
        loss(params, (source, target, lengths, keys)), rel=1e-6
    )
    assert loss(params, ((source + 1) % 20, target, lengths, keys)) != loss(params, (source, target, lengths, keys))

    loss, params, (sound, frames, text, letters) = drawn("deepspeech2", hidden=8, length=24, layers=1, bands=6, letters=4)
    beyond = jnp.arange(4) >= letters[:, None]
    assert beyond.any()
    other = jnp.where(beyond, 1 + text % 28, text)
    assert loss(params, (sound, frames, other, letters)) == pytest.approx(
        loss(params, (sound, frames, text, letters)), rel=1e-6
    )
    assert loss(params, (sound, frames, 1 + text % 28, letters)) != loss(params, (sound, frames, text, letters))


@pytest.mark.parametrize("variant", memory.TORCH[:2])
def test_the_model_in_pytorch_has_the_same_loss(variant, monkeypatch):
    torch_nmt = pytest.importorskip("bench.peers.torch_nmt", reason="PyTorch is not installed")
    small = {"hidden": 8, "batch": 2, "length": 6, "words": (20, 16)}
    monkeypatch.setitem(models.CASES, "nmt", dataclasses.replace(models.CASES["nmt"], small=small))
    made = memory_steps.model("nmt", "small")
    params, step = made.params, jax.jit(jax.value_and_grad(made.plain))
    for _ in range(4):  # the gradients are equal, too
        ours, grads = step(params, made.batch)
        params = jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)
    assert float(ours) == pytest.approx(record_of(torch_nmt.echo("nmt", "small", variant, 1))["loss"], rel=1e-5)


@pytest.mark.slow
def test_committed_tables_are_those_of_the_committed_results(tmp_path):
    for path in store.RESULTS.glob("memory-*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    written = memory_report.write(tmp_path)
    assert written is not None and (store.RESULTS / "MEMORY.md").read_text() == written.read_text(), (
        "run: python -m bench report"
    )
