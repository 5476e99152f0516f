"""Odd and wrong arguments of evaluations, keepers, logs, checkpoints and plans: used as meant, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs

GRAPHS = cavs.from_lengths([1, 2, 3, 4] * 2, label=np.arange(20) % 3)
FEW = {"epochs": 1}
HUGE = np.full((4, 3), 2**40 + 1)  # which JAX reads as 1
X = np.arange(24, dtype=np.float32).reshape(8, 3)


def loader(**how: Any) -> cavs.data.Loader:
    return cavs.data.Loader(GRAPHS, 4, steps=1, **how)


def metrics(params: Any, sched: Any) -> dict[str, Any]:
    return {"sum": params * cavs.data.total(sched.label)}


def product(params: Any, x: Any) -> jax.Array:
    return cavs.data.total(params * x)


def used_up() -> jax.Array:
    """Returns a state that a step has overwritten."""
    step = cavs.data.step(lambda state, sched: (state + 1, state))
    (batch, *_), state = list(loader()), jnp.ones(3)
    first, _ = step(state, batch)
    step(first, batch)
    return first


def width(params: Any, sched: Any) -> jax.Array:
    return jnp.ones((len(sched.roots), len(sched.roots)))


EVALUATED: dict[str, tuple[Callable[[], Any], str]] = {
    "no batches": (
        lambda: cavs.data.evaluate(metrics, 1.0, cavs.data.Loader(GRAPHS, [])),
        "evaluate: loader: got a loader without batches",
    ),
    "no predictions": (
        lambda: cavs.data.predict(metrics, 1.0, cavs.data.Loader(GRAPHS, [])),
        "predict: loader: got a loader without batches",
    ),
    "traced": (
        lambda: jax.grad(lambda p: cavs.data.evaluate(metrics, p, loader())["sum"])(1.0),
        "evaluate: params: got arrays that are traced",
    ),
    "huge": (lambda: cavs.data.evaluate(metrics, np.array([2**40]), loader()), "evaluate: params: got a leaf of dtype int64"),
    "used up": (
        lambda: cavs.data.predict(metrics, used_up(), loader()),
        "predict: params: got arrays whose memory an earlier step has reused",
    ),
    "other widths": (
        lambda: cavs.data.predict(width, 1.0, cavs.data.Loader(GRAPHS, [[0, 1, 2], [3]]), rows="graphs"),
        r"predict: fun: got rows of shape \(1,\) of one batch, and of \(3,\) of another",
    ),
    "no classes": (
        lambda: cavs.data.softmax_loss(X, np.ones((3, 0), np.float32), np.ones(0, np.float32), np.zeros(8, np.int32)),
        r"softmax_loss: w: got shape \(3, 0\), without classes",
    ),
    "keys": (lambda: cavs.data.mean(jax.random.key(0)), "mean: x: got an array of key<fry>; expected numbers"),
    "a step": (
        lambda: cavs.data.step(lambda state, x: (state, product(state, x)))(1.0, HUGE),
        "step: batches: got a leaf of dtype int64 with values from 1099511627777",
    ),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_what_would_be_wrong_or_lost_is_refused(name: str) -> None:
    call, text = EVALUATED[name]
    with jax.enable_x64(False), pytest.raises((TypeError, ValueError), match=text):
        call()


def test_a_step_takes_numbers_of_numpy() -> None:
    step = cavs.data.step(lambda state, sched: (state, state), unroll=np.int64(2), tune=np.float32(0))
    assert step(1.0, next(iter(cavs.data.Loader(GRAPHS, 4, steps=2))))[1].tolist() == [1, 1]


def test_the_state_of_a_mesh_is_evaluated_and_trained_on_one_device() -> None:
    """JAX refused arrays of a mesh with explicit axes, as `jax.make_mesh` makes it, beside batches of none."""
    mesh = jax.make_mesh((1,), ("data",))
    step = cavs.data.step(lambda state, sched: (state + cavs.data.total(sched.label), {"sum": state}))
    (batch, *_), start = list(cavs.data.Loader(GRAPHS, 4, mesh=mesh)), jnp.float32(1)
    state, _ = step(start, batch)
    for steps in (1, 2):
        batches = cavs.data.Loader(GRAPHS, 4, shuffle=False, steps=steps)
        assert cavs.data.evaluate(metrics, state, batches) == {
            "sum": float(state) * cavs.data.evaluate(metrics, 1.0, batches)["sum"]
        }
        labels = cavs.data.predict(lambda params, sched: params * sched.label, state, batches)
        np.testing.assert_array_equal(labels, float(state) * GRAPHS.label)
        assert step(state, next(iter(batches)))[1]["sum"].ravel()[0] == state


# ---- keepers, logs and checkpoints ----


def test_a_keeper_takes_paths_and_numbers_of_numpy(tmp_path: Path) -> None:
    """A `pathlib.Path` among `files` was an error of JSON, and so would be the second run."""
    (tmp_path / "data").write_text("1")
    limits = {"epochs": np.int64(1), "patience": np.int32(3)}
    for _ in range(2):
        with cavs.data.Keeper(tmp_path / "run", loader(), float, files=iter([tmp_path / "data"]), **limits) as keeper:
            keeper.restore(1.0)
    assert [*cavs.data.read_run(tmp_path / "run")["files"]] == [str(tmp_path / "data")]


def test_the_history_is_json_if_a_score_is_nan(tmp_path: Path) -> None:
    with cavs.data.Keeper(tmp_path, loader(), lambda sums: float("nan"), **FEW) as keeper:
        keeper.score(keeper.restore(1.0), {"loss": float("inf")})
        with pytest.warns(UserWarning, match="restore_best: .* got only scores that are NaN, .* not the best"):
            keeper.restore_best(1.0)
    (record,) = json.loads((tmp_path / "history.json").read_text(), parse_constant=pytest.fail)
    assert record["score"] is None and record["held_out"] == {"loss": None}


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"files": [3]}, "Keeper: files: got a int; expected the path of a file"),
        ({"files": None}, "Keeper: files: got None; expected a list of paths"),
        ({"loader": cavs.data.Loader(GRAPHS, [])}, "Keeper: loader: got a loader without batches"),
    ],
)
def test_wrong_arguments_of_a_keeper_are_named(tmp_path: Path, how: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        cavs.data.Keeper(tmp_path, **{"loader": loader(), "score": float} | FEW | how)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"every": "10"}, "Log: every: got '10'; expected seconds >= 0"),
        ({"every": -1}, "Log: every: got -1"),
        ({"step": 1.5}, "Log: step: got 1.5; expected an int"),
        ({"metrics": "loss"}, "Log: metrics: got a str; expected a function of 1 argument"),
    ],
)
def test_wrong_arguments_of_a_log_are_named_before_the_loop(how: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        cavs.data.Log(loader(), print, **how)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_of_a_log_names_its_file() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        cavs.data.json_lines("/dev/full")({"loss": 1.0})


@pytest.mark.parametrize("leaf", ["b", "float32", jnp.float32, [None, 1][:0].append])
def test_a_leaf_of_a_checkpoint_that_is_no_number_is_named(tmp_path: Path, leaf: Any) -> None:
    """JAX takes the text "b" for the dtype of bytes."""
    with pytest.raises(TypeError, match=r"save_checkpoint: state: got a \w+ at \['a'\]; expected arrays and numbers"):
        cavs.io.save_checkpoint({"a": leaf}, tmp_path / "a.npz")


def test_masked_arrays_are_refused_by_name(tmp_path: Path) -> None:
    """Files had the values below the mask."""
    masked, path = {"a": np.ma.array([1.0, 2.0], mask=[0, 1], dtype=np.float32)}, tmp_path / "a"
    text = r"got an array with masked values at \[?'a'\]?; expected all values. Write rows.filled\(0\)."
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    with pytest.raises(TypeError, match="save_params: params: " + text):
        cavs.io.save_params(masked, path)
    with pytest.raises(TypeError, match="save_checkpoint: state: " + text):
        cavs.io.save_checkpoint(masked, path)
    assert not path.exists()
    with pytest.raises(TypeError, match="run: params: " + text):
        cavs.run(cavs.VertexFunction(lambda params, v: v.push(params["a"]), state=(2,)), masked, cavs.schedule(GRAPHS))
    for mesh in (None, jax.make_mesh((1,), ("data",))):
        batches = next(iter(cavs.data.Loader(GRAPHS, 4, mesh=mesh)))
        with pytest.raises(TypeError, match="step: state: " + text):
            cavs.data.step(lambda state, sched: (state, {}))(masked, batches)
    plain = {"a": np.ma.array(np.ones(2, np.float32))}
    cavs.io.save_params(plain, path)
    assert cavs.io.load_params(path)["a"].tolist() == [1, 1]


def test_a_checkpoint_names_the_dtype_of_another_byte_order(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"save_checkpoint: state: got an array of >f4 at \['a'\]; expected arrays and numbers"):
        cavs.io.save_checkpoint({"a": np.ones(2, ">f4")}, tmp_path / "a.npz")


def test_a_state_that_a_step_has_overwritten_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save_checkpoint: state: got arrays whose memory an earlier step has reused"):
        cavs.io.save_checkpoint(used_up(), tmp_path / "a.npz")


@pytest.mark.parametrize("function", [cavs.data.read_run, lambda folder: cavs.data.restore_best(folder, 1.0)])
def test_a_folder_of_a_run_is_a_path(function: Any) -> None:
    with pytest.raises(TypeError, match="folder: got a int; expected the path of a folder"):
        function(3)


# ---- plans ----


def test_a_plan_takes_graphs_whose_labels_are_not_in_schedules() -> None:
    graphs = GRAPHS.replace(label=np.linspace(0, 1, 20))
    collate = lambda sample: sample.sched.pad(sample.graphs.label).astype(np.float32)  # noqa: E731
    plan = cavs.memory.plan(product, 2.0, graphs, collate=collate, parts=np.int64(2))
    assert plan.parts == 2 and abs(plan.loss(2.0, plan.batch(graphs)) - 20) < 1e-5


def test_a_plan_takes_any_number_of_parts_that_divides_the_batch() -> None:
    x = np.ones((12, 2), np.float32)
    plan = cavs.memory.plan(product, 1.0, x, parts=3)
    assert plan.parts == 3 and plan.loss(1.0, plan.batch(x)) == 24


PLANS: dict[str, tuple[Callable[[], Any], str]] = {
    "True parts": (lambda: cavs.memory.plan(product, 1.0, X, parts=True), "plan: parts: got True for 8 samples"),
    "True segments": (lambda: cavs.memory.plan(product, 1.0, X, segments=True), "plan: segments: got True"),
    "params": (lambda: cavs.memory.plan(product, {"w": "weights"}, X), "plan: params: got a str; expected an array of numbers"),
    "huge": (lambda: cavs.memory.plan(product, 1.0, HUGE, parts=2).batch(HUGE), "plan: batch: got a leaf of dtype int64"),
    "huge rows": (
        lambda: cavs.memory.plan(product, 1.0, GRAPHS, parts=2, collate=lambda sample: HUGE),
        "plan: collate: got a leaf of dtype int64",
    ),
    "graphs": (lambda: cavs.memory.plan(product, 1.0, X, parts=2).batch(GRAPHS), "got graphs for a plan of arrays"),
    "arrays": (
        lambda: cavs.memory.plan(lambda p, sched: p * cavs.data.total(sched.label >= 0), 1.0, GRAPHS, parts=2).batch(X),
        "plan.batch: graphs: got a ndarray; expected cavs.Graphs",
    ),
    "a schedule": (
        lambda: cavs.memory.plan(product, 1.0, cavs.schedule(GRAPHS)),
        "plan: batch: got a Schedule; expected cavs.Graphs, or a pytree of arrays",
    ),
    "a path": (lambda: cavs.memory.plan(product, 1.0, X, parts=2).save(None), "BatchPlan.save: path: got a NoneType"),
    "loads": (lambda: cavs.memory.load(3, product, 1.0, X), "load: path: got a int; expected the path of a file"),
    "sub_batched": (lambda: cavs.memory.sub_batched(product)(1.0, [HUGE]), "sub_batched: stacks: got dtype int64"),
    "no stack": (lambda: cavs.memory.sub_batched(product)(1.0, []), "sub_batched: stacks: got an empty list; expected a list"),
    "no arrays": (lambda: cavs.memory.sub_batched(product)(1.0, [()]), "expected one number of sub-batches in all arrays"),
    "recompute": (lambda: cavs.memory.recompute(product)(1.0, HUGE), r"product \(recompute\): got an argument of dtype int64"),
    "its plan": (lambda: cavs.memory.recompute(product, plan=3), "recompute: plan: got a int; expected the path of a file"),
    "argnums": (lambda: cavs.memory.recompute(product).plan(1.0, X, argnums="0"), "argnums: got '0' with 2 positional"),
    "measure": (lambda: cavs.memory.fewest_parts("loss", 8, 30), "fewest_parts: measure: got a str; expected a function of 1"),
    "of none": (lambda: cavs.memory.fewest_parts(lambda parts: 1, 0, 30), "fewest_parts: batch: got 0; expected an int >= 1"),
    "budget": (lambda: cavs.memory.fewest_parts(lambda parts: 1, 8, "x"), "fewest_parts: budget: got 'x'; expected bytes"),
    "deal": (lambda: cavs.memory.deal(GRAPHS, True), "deal: count: got True for 8 graphs; expected a divisor"),
}


@pytest.mark.parametrize("name", PLANS)
def test_wrong_arguments_of_plans_are_named(name: str) -> None:
    call, text = PLANS[name]
    with jax.enable_x64(False), pytest.raises((TypeError, ValueError), match=text):
        call()


@pytest.mark.parametrize("budget", [30, np.int64(30), "30B"])
def test_a_budget_of_parts_is_read_like_any_other(budget: Any) -> None:
    """Numbers of NumPy and texts meant parts of one graph."""
    assert cavs.memory.fewest_parts(lambda parts: 100 // parts, 8, budget) == (4, 25)
    assert cavs.memory.deal(GRAPHS, np.int64(2)).shape == (2, 4)
    assert jax.grad(cavs.memory.recompute(lambda n, x: n * x, static_argnums=np.int64(0)), 1)(3, 1.0) == 3


WRONG = [("parts", x) for x in ("2", 3, 0, -2, 2.0, True, [2])] + [("budget", "x"), ("names", 3), ("samples", "8")]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "plan.json"
    cavs.memory.plan(product, 1.0, X, parts=2).save(path)
    assert cavs.memory.load(path, product, 1.0, X).parts == 2
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ValueError, match="load: path: got .*plan.json; expected a file that BatchPlan.save wrote"):
        cavs.memory.load(path, product, 1.0, X)


@pytest.mark.parametrize(
    "change", [{"regions": 3}, {"regions": {}}, {"regions": {"": 1}}, {"regions": {"": {}}}, {"chunks": "a"}]
)
def test_a_file_that_is_no_plan_of_a_function_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "plan.json"
    cavs.memory.recompute(product).plan(1.0, X).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="recompute: plan: got .*; expected (a file that Plan.save wrote|one that recompute)"):
        jax.grad(cavs.memory.recompute(product, plan=path))(1.0, X)
