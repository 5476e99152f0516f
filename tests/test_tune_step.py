"""`cavs.data.step` tunes its launches before it is compiled. Programs are traced for an H200; they do not run."""

import json
import re
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import cavs
from cavs import cli, vertex_programs as vp
from cavs._engines.persistent.launch_calls import LaunchRules
from cavs._jaxpr.ruled import rules_in
from cavs._run import tune
from cavs._step.compiled_step import Step
from cavs._step.concurrent_jit import Concurrent
from cavs.kernels import H200, LaunchConfig, Target, persistent, tuned
from cavs.recipes._report import Messages
from tests.odd_graphs import joined, random_binary_tree
from tests.test_tune import HERE, LOWER, hopper as hopper, own

PROGRAM = vp.BinaryTreeLSTM(128, 16)
F, PARAMS = PROGRAM.vertex_function(), PROGRAM.init(jax.random.key(0))
COMPILED = tune.compiled
Used = dict[str, LaunchConfig]  # by direction, the layouts of the launches that were traced last


def batch(leaves: int, graphs: int = 64) -> tuple[cavs.Schedule, np.ndarray]:
    """Trees with so many leaves each."""
    sched = cavs.schedule(joined([random_binary_tree(leaves, seed=n) for n in range(graphs)]), scripts=True)
    return sched, np.ones((sched.shape.vertices, 16), np.float32)


def loss(params: Any, sched: cavs.Schedule, x: Any) -> jax.Array:
    return cavs.run(F, params, sched, x, select=sched.roots).sum()


def train(params: Any, batch: Any) -> tuple[Any, Any]:
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


@pytest.fixture
def used(hopper: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Used]:
    """A step is traced when it is called, and returns zeros. Each layout is faster than the one that was timed before it."""
    if jax.__version_info__ < (0, 11):
        pytest.skip("the kernels need jax 0.11")
    found: Used = {}
    times = iter(1e6 * 0.9**n for n in range(1000))
    monkeypatch.setattr(tune, "by_the_clock", lambda *_: next(times))
    launch = persistent._launch

    def noted(program: Any, config: LaunchConfig, weights: Any, arrays: Any, reverse: bool, *how: Any) -> Any:
        found["backward" if reverse else "forward"] = config
        return launch(program, config, weights, arrays, reverse, *how)

    def call(self: Any, *args: Any) -> Any:
        shapes = self._jitted(args, {}).trace(*args).out_info
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    monkeypatch.setattr(persistent, "_launch", noted)
    monkeypatch.setattr(Concurrent, "__call__", call)
    jax.clear_caches()
    yield found
    jax.clear_caches()


def traced(used: Used, step: Step, batch: Any) -> Used:
    """The layouts with which a step is compiled for a batch. Nothing that was traced before is used again."""
    jax.clear_caches()
    used.clear()
    step(PARAMS, batch)
    return dict(used)


def recorded(used: Used) -> bool:
    """Whether these layouts are those on record for 64 graphs of one size."""
    records = {key.split()[1]: record | {"us": 0} for key, record in own().items()}
    return records == {way: tune.Timed(config, 0).record for way, config in used.items()}


def test_a_step_tunes_each_launch_once(used: Used) -> None:
    some = batch(40)
    before = traced(used, cavs.data.step(train, tune=0), some)
    assert not own()
    step = cavs.data.step(train)
    after = traced(used, step, some)
    assert [launch.forward for launch in step.tuned] == [True, False]
    assert all("us a pass before" in str(launch) for launch in step.tuned)
    assert sorted(key.split()[1] for key in own()) == ["backward", "forward"] and recorded(after)
    assert before.keys() == after.keys() and before != after
    file = tuned.own_file("NVIDIA H200").read_text()
    other = cavs.data.step(train)
    assert traced(used, other, some) == after and not other.tuned  # nor does a later process
    step(PARAMS, some)
    assert len(step.tuned) == 2 and tuned.own_file("NVIDIA H200").read_text() == file


def test_launches_of_a_function_that_is_gone_are_not_timed(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a loss that creates F itself: nothing need refer to it after the trace."""
    some = batch(40)
    marks = tune.launches_in(cavs.data.step(train)._program(some).trace(PARAMS, some).jaxpr.jaxpr)
    assert marks and len(tune.tasks_of(marks, some)) == len(marks)
    for mark in marks.values():
        monkeypatch.setattr(mark.job.plan.function, "_original", lambda: None)
    assert not tune.tasks_of(marks, some)


def test_what_the_step_calls_has_the_layouts_on_record(used: Used) -> None:
    """A function that the user has compiled before is traced again."""
    compiled, some = jax.jit(loss), batch(40)
    jax.make_jaxpr(jax.grad(compiled))(PARAMS, *some)
    before = dict(used)
    step = cavs.data.step(lambda params, batch: (jax.grad(compiled)(params, *batch), 0.0))
    step(PARAMS, some)
    assert used != before and recorded(used)


def test_a_step_is_traced_once_if_its_layouts_are_on_record(used: Used) -> None:
    count = []

    def counted(params: Any, batch: Any) -> Any:
        count.append(1)
        return train(params, batch)

    some = batch(40)
    for expected in (2, 1):  # tracing finds the launches; a new layout means tracing again
        count.clear()
        cavs.data.step(counted)(PARAMS, some)
        assert len(count) == expected


def test_on_a_cpu_a_step_is_traced_once_and_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    count = []

    @cavs.data.step
    def step(params: Any, batch: Any) -> Any:
        count.append(1)
        return train(params, batch)

    step(PARAMS, batch(3))
    assert len(count) == 1 and not step.tuned and not list(tmp_path.rglob("layouts*"))


@pytest.mark.slow
def test_a_resumed_run_has_the_layouts_with_which_it_began(used: Used) -> None:
    """Whatever is tuned, or is not for lack of time, and in whatever order the shapes come."""
    shapes = [batch(leaves) for leaves in (20, 60, 150)]
    for first, seconds in ((0, 10.0), (1, 1e-9)):
        tuned.own_file("NVIDIA H200").unlink(missing_ok=True)
        tuned.save(tuned.own_file("NVIDIA H200"), {})  # which reads the file anew
        step = cavs.data.step(train, tune=seconds)
        begun = {first: traced(used, step, shapes[first])}
        step.compile_ahead(PARAMS, shapes[2:])  # cannot be timed, as the first one trains
        step.background.wait_for_all()
        assert len(own()) == 4 and sum("us" in record for record in own().values()) == (2 if seconds > 1 else 0)
        begun |= {n: traced(used, step, some) for n, some in enumerate(shapes) if n != first}
        for n in (2, 1, 0):
            resumed = cavs.data.step(train)
            assert traced(used, resumed, shapes[n]) == begun[n] and not resumed.tuned


def test_of_processes_that_tune_at_the_same_time_the_first_decides(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them then have its layouts, as they will have when they are resumed."""
    some, theirs = batch(40), dict[str, Any]()
    before = traced(used, cavs.data.step(train, tune=0), some)
    path = tuned.own_file("NVIDIA H200")
    few_timed = tune.few_timed

    def meanwhile(tasks: Any, target: Any, seconds: float) -> Any:
        found = few_timed(tasks, target, seconds)
        theirs.update({key: timed[3].record for key, timed in found.items()})  # neither the first nor the fastest
        path.write_text(json.dumps(theirs))
        return found

    monkeypatch.setattr(tune, "few_timed", meanwhile)
    after = traced(used, cavs.data.step(train), some)
    assert own() == theirs and recorded(after) and after != before
    monkeypatch.setattr(tune, "few_timed", few_timed)
    assert traced(used, cavs.data.step(train), some) == after


def test_it_stops_when_the_time_is_up(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a compilation never ends: what is compiled by then is timed, if the layout of today is."""
    never, some = threading.Event(), batch(40)
    step = cavs.data.step(train, tune=0)
    tasks = tune.tasks_of(tune.launches_in(step._program(some).trace(PARAMS, some).jaxpr.jaxpr), some)
    layouts = {key: tune.promising(task, H200)[: tune.FEW] for key, task in tasks.items()}
    first, second = tasks
    monkeypatch.setattr(tune.os, "cpu_count", lambda: 9)

    def compiled(task: Any, config: LaunchConfig) -> Callable[[], LaunchConfig]:
        return lambda: config if ends(task, config) or never.wait() else config

    def ends(task: Any, config: LaunchConfig) -> bool:
        mine = layouts[first if task is tasks[first] else second]
        return config in mine[:2] if task is tasks[first] else config == mine[1]

    monkeypatch.setattr(tune, "lower", compiled)
    monkeypatch.setattr(tune, "compiled", lambda lowered: lowered())
    try:
        found = tune.few_timed(tasks, H200, 2.0)
        assert {key: [timed.config for timed in some] for key, some in found.items()} == {first: layouts[first][:2]}
    finally:
        never.set()


def test_a_home_that_cannot_be_written_is_no_error(used: Used, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    some = batch(40)
    before = traced(used, cavs.data.step(train, tune=0), some)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    step = cavs.data.step(train)
    assert traced(used, step, some) == before and not step.tuned


@pytest.mark.parametrize(("text", "passes"), [("RESOURCE_EXHAUSTED: Out of memory", True), ("INTERNAL: a bug", False)])
def test_only_lack_of_memory_is_passed_over(used: Used, monkeypatch: pytest.MonkeyPatch, text: str, passes: bool) -> None:
    def fails(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(tune, "by_the_clock", fails)
    step, some = cavs.data.step(train), batch(40)
    if passes:
        step(PARAMS, some)
        assert [str(launch) for launch in step.tuned] == ["forward: no layout was timed", "backward: no layout was timed"]
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
            step(PARAMS, some)


def test_processes_that_train_together_do_not_tune(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    step, some = cavs.data.step(train), batch(40)
    step(PARAMS, some)
    assert not own() and not step.tuned
    with pytest.raises(ValueError, match="Step.tune: .*, but 2 processes train together"):
        step.tune(PARAMS, some)


@pytest.mark.parametrize("devices", [None, 1])
def test_the_first_batch_of_a_stack_is_timed(used: Used, devices: int | None) -> None:
    mesh = None if devices is None else Mesh(np.array(jax.devices()[:devices]), ("data",))
    loader = cavs.data.Loader(joined([random_binary_tree(40, seed=n) for n in range(32)]), 8, steps=4, mesh=mesh, seed=None)
    batches = next(iter(loader))

    def fun(params: Any, sched: cavs.Schedule) -> Any:
        return params, cavs.data.total(cavs.run(F, params, sched, jnp.ones((sched.shape.vertices, 16), "float32")).sum())

    step = cavs.data.step(fun)
    ((_, task),) = tune.tasks_of(tune.launches_in(step._program(batches).trace(PARAMS, batches).jaxpr.jaxpr), batches).items()
    data = np.asarray(batches.tree.data)
    assert data.ndim == (2 if mesh is None else 3)
    np.testing.assert_array_equal(task.sched.data, data[(0,) * (data.ndim - 1)])


@pytest.mark.slow
def test_what_is_timed_has_arguments_of_the_shapes_of_the_step(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also integers, keys, and rows of edges. Engine scan runs it here."""

    def fn(p: Any, v: cavs.Vertex) -> None:
        x = v.pull()
        h = jnp.tanh(v.gather_all(lambda s, e: s * e["w"], edges=True) @ p["u"] + x["x"] + p["steps"])
        v.scatter(h * jax.random.bernoulli(x["key"], 0.5, (128,)))
        v.push(h)

    G = cavs.VertexFunction(fn, state=(128,), arity=2)
    sched, _ = batch(40)
    keys = jax.random.split(jax.random.key(0), sched.shape.vertices)
    x = {"x": np.ones((sched.shape.vertices, 128), np.float32), "key": keys}
    edges = {"w": np.ones((sched.shape.all_edges, 128), np.float32)}
    params = {"u": jnp.ones((128, 128), jnp.float32), "steps": np.int32(3)}

    def fun(params: Any, batch: Any) -> Any:
        sched, x, edges = batch
        return params, cavs.run(G, params, sched, x, edges=edges).sum()

    some = sched, x, edges
    jaxpr = cavs.data.step(fun)._program(some).trace(params, some).jaxpr.jaxpr
    (task,) = tune.tasks_of(tune.launches_in(jaxpr), some).values()
    of = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)  # noqa: E731
    assert of((task.params, task.inputs, task.edges)) == of((params, x, edges))
    monkeypatch.setattr(tune, "Persistent", lambda layouts: "scan")
    monkeypatch.setattr(Target, "here", HERE)
    got = COMPILED(LOWER(task, tune.promising(task, H200)[0]))(task.arguments)
    assert np.isfinite(got["u"]).all() and got["steps"] == 0


def test_launches_that_share_the_chip_are_not_timed(used: Used) -> None:
    """Their layouts are for half of it, and records are of launches that have it alone."""
    tagger, sched = vp.BiLSTMTagger(9, 128, 16, 128), cavs.schedule(cavs.from_lengths([20] * 4))
    x = np.ones((sched.shape.vertices, 16), np.float32)
    params = tagger.init(jax.random.key(0))

    def fun(params: Any, batch: Any) -> Any:
        sched, back, x = batch
        return jax.grad(lambda p: tagger.run(p, sched, back, x).sum())(params), 0.0

    step, some = cavs.data.step(fun), (sched, cavs.schedule(cavs.from_lengths([20] * 4).reversed()), x)
    assert len(list(rules_in(step._program(some).trace(params, some).jaxpr.jaxpr, LaunchRules))) == 0
    assert not tune.launches_in(step._program(some).trace(params, some).jaxpr.jaxpr)
    assert tune.launches_in(jax.make_jaxpr(fun)(params, some).jaxpr)
    step(params, some)
    assert not step.tuned and not own()


def test_a_step_searches_all_layouts(used: Used) -> None:
    step, some = cavs.data.step(train, tune=0), batch(40)
    found = step.tune(PARAMS, some)
    assert [launch.forward for launch in found] == [True, False] and recorded(traced(used, step, some))
    for launch in found:
        times = [float(x) for x in re.findall(r"^ +([\d.]+) us  hb", launch.table(), re.M)]
        assert times == sorted(times) and len(times) == len(launch.layouts) > tune.FEW
        assert launch.table().count("(used before)") == launch.table().count("(used from now on)") == 1
    with pytest.raises(ValueError, match="Step.tune: got a step without launches of engine 'persistent'"):
        cavs.data.step(lambda params, batch: (params, 0.0)).tune(PARAMS, some)


@pytest.mark.parametrize("seconds", [True, -1, float("nan"), "10"])
def test_wrong_times_are_refused(seconds: Any) -> None:
    with pytest.raises(ValueError, match="step: tune: got .*; expected seconds >= 0. Write tune=10, or tune=0"):
        cavs.data.step(train, tune=seconds)
    assert cavs.data.step(train, tune=False) is not None


def test_explain_says_where_a_layout_comes_from(used: Used) -> None:
    def origins() -> list[str]:
        text = cavs.explain(F, PARAMS, jax.ShapeDtypeStruct((16,), jnp.float32), sched=some[0])
        return re.findall(r"laid out (.*?)[;.]", text)

    some = batch(40)
    assert origins() == ["by a cost model"] * 2
    cavs.data.step(train, tune=1e-9)(PARAMS, some)
    assert origins() == ["without measurement, in your cache"] * 2
    cavs.data.step(train).tune(PARAMS, some)
    assert origins() == ["by measurement, in your cache"] * 2


def test_cavs_train_prints_what_was_tuned(used: Used, capsys: pytest.CaptureFixture[str]) -> None:
    step, printed = cavs.data.step(train), []
    messages = Messages("cavs", types.SimpleNamespace(step=step), None)
    for _ in range(3):
        messages.tuned()
        printed.append(capsys.readouterr().out)
        step(PARAMS, batch(40))
    assert printed[0] == printed[2] == ""
    assert re.fullmatch("kernels tuned for this GPU, once: forward: .* layouts; backward: .* layouts\n", printed[1])


def test_cavs_tune_prints_all_layouts(used: Used, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--hidden", "128", "--batch", "16"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("forward: ") and "\nbackward: " in out and out.count("(used from now on)") == 2
    assert len(own()) == 2


def test_cavs_tune_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--hidden", "8"]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("cavs tune: it times launches of engine 'persistent', but its kernels need ")
        and error.count("\n") == 1
    )
