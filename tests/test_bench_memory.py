"""Suite `memory` of the benchmarks: measurements in processes of their own, and the tables made from them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from bench import budgets, echo, echo_cases, memory, memory_report, plans, store, time_to_loss

TINY = memory.Size(graphs=8, hidden=8, points=2, steps=1, quarters=(16,), echo="small", samples=8)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A program under three budgets, a quarter, and a measurement that fails."""
    folder = tmp_path_factory.mktemp("results")
    wanted = memory.tasks("cpu", TINY, ("budgets", "quarter"), ("tree_fc",))
    wanted = [task for task in wanted if task[1]["engine"] == "scan"]
    wanted += memory.tasks("cpu", TINY, ("plans",), ("mlp",))
    wanted.append(("budgets", wanted[0][1] | {"engine": "none such"}))
    return folder, memory.run("cpu", wanted, folder, tell=lambda text: None)


def test_the_suite_has_every_program_engine_and_model():
    wanted = memory.tasks("gpu", memory.SIZES["gpu", False])
    assert len([t for t in wanted if t[0] == "budgets"]) == 2 * len(memory.PROGRAMS)
    assert [t[1]["program"] for t in wanted if t[0] == "plans"] == [*memory.PLANS]
    assert {*memory.PLANS} == {*plans.ARRAYS} | {*list(budgets.PROGRAMS)[-4:]}
    assert {(t[1]["case"], t[1]["variant"]) for t in wanted if t[0] == "echo"} == {
        *((case, variant) for case in echo_cases.CASES for variant in echo.VARIANTS),
        *(("nmt", variant) for variant in memory.TORCH),
    }


def test_budgets_are_kept_and_change_no_gradient(measured):
    _, (curve, *_) = measured
    points = curve["points"]
    assert len(points) == 2 and points[0]["parts"] == 1 and points[-1]["parts"] > 1
    assert all(p["temp"] <= p["budget"] and 1 <= p["compilations"] <= 5 for p in points)
    assert memory_report.falls(points)
    assert all(p["difference"] < 1e-5 and p["ms"] > 0 for p in points)


def test_a_quarter_of_the_memory_in_parts(measured):
    _, (_, quarter, *_) = measured
    assert quarter["parts"][0] == 1 < quarter["parts"][1] and quarter["temp"][1] <= 0.255 * quarter["temp"][0]
    assert quarter["time"] > 0 and len(quarter["ms"]) == 2


def test_other_programs_keep_their_budgets(measured):
    _, (_, _, arrays, _) = measured
    assert len(arrays["points"]) == 6 and arrays["refused"]
    assert all(p["temp"] <= p["budget"] and 1 <= p["compilations"] <= 5 for p in arrays["points"])
    assert arrays["points"][0]["parts"] == 1 < arrays["points"][3]["parts"]


def test_tables_follow_from_the_results(measured):
    folder, (*_, failed) = measured
    assert "engine: got 'none such'" in failed["error"]
    written = memory_report.write(folder)
    assert written is not None
    text = written.read_text()
    assert "| tree_fc | scan | 8 x h8 |" in text and "| mlp | 8 x h8 |" in text and "- tree_fc none such: " in text
    memory_report.write(folder)
    assert written.read_text() == text


def test_a_model_with_and_without_recompute(monkeypatch):
    small = {"hidden": 8, "batch": 2, "length": 6, "words": (20, 16)}
    monkeypatch.setitem(echo_cases.CASES, "nmt", dataclasses.replace(echo_cases.CASES["nmt"], small=small))
    found = {}
    for variant in ("jax.grad", "recompute min"):
        measurement = echo.echo("nmt", "small", variant, 1)
        next(measurement)
        with pytest.raises(StopIteration) as done:
            next(measurement)
        found[variant] = done.value.value
    assert found["jax.grad"]["loss"] == pytest.approx(found["recompute min"]["loss"], rel=1e-5)
    assert found["recompute min"]["temp"] < found["jax.grad"]["temp"]


def test_translation_is_learned_within_its_memory():
    plain, ours = (time_to_loss.trained(way, time_to_loss.SMALL, 60) for way in time_to_loss.WAYS)
    assert max(plain["loss"], ours["loss"]) <= 2 and ours["batch"] == 2 * plain["batch"] and ours["bytes"] < plain["bytes"]


def test_models_do_not_read_what_follows_a_sequence():
    def drawn(name, **small):
        found = echo_cases.CASES[name]
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
    monkeypatch.setitem(echo_cases.CASES, "nmt", dataclasses.replace(echo_cases.CASES["nmt"], small=small))
    losses = []
    for measurement in (echo.echo("nmt", "small", "jax.grad", 1), torch_nmt.echo("nmt", "small", variant, 1)):
        next(measurement)
        with pytest.raises(StopIteration) as done:
            next(measurement)
        losses.append(done.value.value["loss"])  # after four steps: the gradients are equal, too
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_committed_tables_are_those_of_the_committed_results(tmp_path):
    for path in store.RESULTS.glob("memory-*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    written = memory_report.write(tmp_path)
    assert written is not None and (store.RESULTS / "MEMORY.md").read_text() == written.read_text(), "run: python -m bench report"
