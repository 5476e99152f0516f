"""`cavs.tune`, with a clock of our own: there is no GPU here."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs._engines.persistent import chip
from cavs._run import tune as tuning
from cavs.kernels import H200, Target, persistent, tuned
from tests.odd_graphs import chain, joined, random_binary_tree

HERE, LOWER = Target.here, tuning.lower
Example = tuple[cavs.VertexFunction, Any, cavs.Schedule, np.ndarray]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A Hopper whose user has no records yet, on which each layout takes the microseconds of `slow`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Target, "here", staticmethod(lambda: H200))
    monkeypatch.setattr(persistent, "unsupported", lambda target: None)
    monkeypatch.setattr(tuning, "lower", lambda task, layout: layout)
    monkeypatch.setattr(tuning, "compiled", lambda layout: layout)
    monkeypatch.setattr(tuning, "by_the_clock", lambda layout, params: slow(layout))
    tuned.nearest.cache_clear()
    yield
    tuned.nearest.cache_clear()


def slow(layout: Any) -> float:
    return 100.0 + layout.rows - layout.in_flight


def example() -> Example:
    program = vp.BinaryTreeLSTM(128, 16)
    graphs = joined([random_binary_tree(5, seed=n) for n in range(8)])
    sched = cavs.schedule(graphs, scripts=True)
    return program.vertex_function(), program.init(jax.random.key(0)), sched, sched.pad(np.ones((graphs.num_vertices, 16), "f"))


def own() -> dict[str, Any]:
    """The user's records."""
    return tuned._read(tuned.own_file("NVIDIA H200"))


def configs(of: Example) -> list[Any]:
    made = [task.recurrence for task in tuning.tasks(*of, None, H200)]
    return [chip.configure(one, chip.LaunchOptions(H200), of[2].shape) for one in made]


def test_the_fastest_layout_is_used_from_then_on(hopper: None) -> None:
    of = example()
    before = configs(of)
    text = cavs.tune(*of)
    after = configs(of)
    assert text.startswith("forward: ") and "\nbackward: " in text
    assert all(slow(b) <= slow(a) for a, b in zip(before, after, strict=True)) and before != after
    assert len(own()) == 2
    assert cavs.tune(*of).count("us a pass before") == 2 and configs(of) == after


def test_little_is_not_worth_another_layout(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "by_the_clock", lambda layout, params: 100.0 - layout.in_flight / 100)
    of = example()
    before = configs(of)
    cavs.tune(*of)
    assert configs(of) == before and len(own()) == 2  # on record, so that it is not measured again


def test_records_of_other_versions_are_measured_again(hopper: None) -> None:
    of = example()
    before, tasks = configs(of), list(tuning.tasks(*of, None, H200))
    other = tuning.Timed(before[0], 1.0).record | {"clustered": True}
    tuned.save(tuned.own_file("NVIDIA H200"), {tuning.key_of(task): other for task in tasks})
    assert configs(of) == before and not any(chip.is_settled(task.recurrence, H200, of[2].shape) for task in tasks)
    cavs.tune(*of)
    assert configs(of) != before and not any("clustered" in record for record in own().values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"F": 3}, "F: got a int; expected a cavs.VertexFunction"),
        ({"sched": 3}, "sched: got a int; expected a cavs.Schedule"),
        ({"seconds": "all"}, "seconds: got a str; expected a number"),
        ({"inputs": "rows"}, "inputs: got a str"),
    ],
)
def test_errors(hopper: None, change: dict[str, Any], words: str) -> None:
    given = dict(zip(("F", "params", "sched", "inputs"), example(), strict=True))
    with pytest.raises(TypeError, match=f"tune: {words}"):
        cavs.tune(**(given | change))


def test_it_says_why_it_cannot_run_here() -> None:
    with pytest.raises(ValueError, match="tune: it times launches of engine 'persistent', but its kernels need "):
        cavs.tune(*example())


def test_it_says_why_it_cannot_run_a_batch(hopper: None) -> None:
    F, params, _, x = example()
    leaves = cavs.schedule(joined([random_binary_tree(1, seed=n) for n in range(8)]), scripts=True)
    with pytest.raises(ValueError, match="tune: it times launches of engine 'persistent', but no vertex of the batch has"):
        cavs.tune(F, params, leaves, x[: leaves.shape.vertices])


@pytest.mark.parametrize("forward", [True, False])
def test_passes_take_integers_beside_parameters(hopper: None, monkeypatch: pytest.MonkeyPatch, forward: bool) -> None:
    """What is timed, run by engine scan: each pass changes the parameters, and no integer."""

    def counting(p: Any, v: cavs.Vertex) -> None:
        h = jnp.tanh(v.gather(0) @ p["q"] + v.pull())
        v.scatter(h)
        v.push({"h": h, "n": p["step"] + 1})

    params = {"q": np.eye(128, dtype=np.float32), "step": np.int32(3)}
    graphs = joined([chain(5)] * 8)
    of = (
        cavs.VertexFunction(counting, state=(128,), arity=1),
        params,
        cavs.schedule(graphs, scripts=True),
        jnp.ones((40, 128), jnp.float32),
    )
    task = next(task for task in tuning.tasks(*of, None, H200) if task.recurrence.forward == forward)
    config = chip.candidates(task.recurrence.program, task.recurrence.precision, H200)[0]
    monkeypatch.setattr(tuning, "Persistent", lambda layouts: "scan")
    monkeypatch.setattr(Target, "here", HERE)
    got = LOWER(task, config).compile()(task.arguments)
    assert got["step"] == 3 and np.isfinite(got["q"]).all() and forward == (got["q"] == params["q"]).all()
