"""Odd but legal loops over `cavs.data.Loader` with `cavs.data.step`, and what is refused because it would be wrong."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs

GRAPHS = cavs.from_parents([[2, 2, 4, 4, -1]] * 10, input_id=np.arange(50) % 7, label=np.arange(50) % 3)


def loader(batches: Any = 2, graphs: cavs.Graphs = GRAPHS, **options: Any) -> cavs.data.Loader:
    return cavs.data.Loader(graphs, batches, **options)


def places(loader: cavs.data.Loader) -> list[tuple[int, int, int]]:
    return [(loader.epoch, loader.batch, loader.seen) for _ in loader]


@pytest.mark.parametrize("ahead", [0, 2])
def test_two_loops_over_one_loader_are_refused(ahead: int) -> None:
    one = loader(steps=1, ahead=ahead)
    with pytest.raises(RuntimeError, match="Loader: got another loop over this loader .* with shapes=loader it has the same"):
        for _ in one:
            places(one)
    with pytest.raises(RuntimeError, match="one at a time, as they share its position"):
        list(zip(one, one, strict=True))
    iter(one)  # does not begin
    assert len(places(one)) == 5


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_position_that_is_restored_within_a_loop_ends_the_loop(ahead: int) -> None:
    one, found = loader(steps=1, ahead=ahead), []
    position = one.state()
    while one.epoch < 2:
        for _ in one:
            found.append((one.epoch, one.batch, one.seen))
            if len(found) == 3:  # such as after a loss that is not finite
                one.restore(position)
    assert found == [(0, i, i) for i in (1, 2, 3, 1, 2, 3, 4, 5)] + [(1, i, 5 + i) for i in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_position_after_the_last_batch(ahead: int) -> None:
    one, two = loader(steps=1, ahead=ahead), loader(steps=1, ahead=ahead)
    for _ in one:
        position = one.state()
    assert (position["epoch"], position["batch"]) == (0, 5)
    two.restore(position)
    assert places(two) == [] and two.epoch == 1 and places(two) == [(1, i, 5 + i) for i in (1, 2, 3, 4, 5)]


def test_at_the_end_of_an_epoch_the_steps_of_a_dispatch_may_change() -> None:
    """A position of another device, whose dispatches are of other lengths."""
    one, two = loader(steps=3), loader()
    next(iter(one))
    within = json.loads(json.dumps(one.state()))
    list(one)
    own = two.steps
    two.restore(one.state())
    assert two.steps == own != 3
    two.restore(within)
    assert two.steps == 3


@pytest.mark.parametrize("options", [{}, {"last": "pad"}, {"last": "drop"}, {"seed": None}, {"group": "random"}, {"ahead": 1}])
def test_batches_larger_than_the_data_set(options: dict) -> None:
    for graphs in (GRAPHS[:1], GRAPHS):
        one = loader(400, graphs, **options)
        for _ in range(2):
            ((sched,),) = (batches.tree if hasattr(batches, "tree") else batches for batches in [[*one]])
            assert cavs.data.step(lambda state, sched: (state, sched.num_vertices))(0, sched)[1].sum() == graphs.num_vertices


def test_no_batches() -> None:
    for given in ([], iter([])):
        one = loader(given)
        assert [*one] == [] and one.epoch == 1 and one.examples() == [] and one.state()["seen"] == 0
        assert "no loop yet" in repr(one)
    with pytest.raises(ValueError, match="Loader.largest: got a loader without batches; expected at least one"):
        loader([]).largest()


def test_fewer_graphs_than_parts() -> None:
    (present,) = loader(8, GRAPHS[:3], parts=8, last="pad", steps=1, collate=lambda sample: sample.present)
    assert present.shape == (8, 1) and present.sum() == 3
    for last in ("short", "drop"):
        with pytest.raises(
            ValueError, match="Loader: graphs: got 3 for 8 parts; expected at least one for each. Write last='pad'"
        ):
            loader(8, GRAPHS[:3], parts=8, last=last)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("tree", [None, (), {"a": None}])
def test_states_metrics_and_batches_without_arrays(tree: Any, steps: int) -> None:
    @cavs.data.step
    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        return state, batch

    state = tree
    for batches in loader(steps=steps, collate=lambda sample: tree):
        state, metrics = step(state, batches)
        assert state == tree == metrics


def test_numbers_of_python_in_single_batches() -> None:
    step, found = cavs.data.step(lambda state, batch: (state + batch[1], batch[1])), []
    state: Any = 0.0
    for batch in loader(4, steps=1, collate=lambda sample: (sample.sched, 0.5 * len(sample.numbers))):
        state, value = step(state, batch)
        found.append(float(value))
    assert found == [2.0, 2.0, 1.0] and float(state) == 5


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_numbers_of_python_in_the_state_take_the_type_of_the_result(steps: int) -> None:
    step = cavs.data.step(
        lambda state, sched: ({"n": (state["n"] + 1) / 2, "half": state["half"] * jnp.float16(0.5)}, state["n"])
    )
    state, found = {"n": 7, "half": 1.0}, []
    for batches in loader(steps=steps):
        state, values = step(state, batches)
        found += np.ravel(values).tolist()
    assert found == [7, 4, 2.5, 1.75, 1.375] and state["half"].dtype == jnp.float16 and float(state["half"]) == 1 / 32


def test_errors_in_a_step() -> None:
    class Wrong(Exception):
        pass

    @cavs.data.step
    def step(state: Any, sched: cavs.Schedule) -> tuple[Any, Any]:
        if sched.shape.graphs == 1:
            raise Wrong
        return state + 1, sched.num_vertices

    one = loader(3, steps=1)
    state, raised = jnp.zeros(()), 0
    for _ in range(2):
        for sched in one:
            try:
                state, _ = step(state, sched)
            except Wrong:
                raised += 1
                assert step.compiling is None
    assert raised == 2 and float(state) == 6  # the state is still valid, and so is the step


def test_arrays_that_a_step_returns_twice() -> None:
    """In the state, or in the state and the metrics: each is overwritten for itself."""

    @cavs.data.step
    def step(state: Any, sched: cavs.Schedule) -> tuple[Any, Any]:
        x = state["a"] + 1
        return {"a": x, "b": x}, x

    for steps in (1, 2):
        state, values = {"a": jnp.zeros(3), "b": jnp.zeros(3)}, []
        for batches in loader(steps=steps):
            state, value = step(state, batches)
            values.append(value)
        assert np.concatenate([np.asarray(v).reshape(-1, 3)[:, 0] for v in values]).tolist() == [1, 2, 3, 4, 5]
        assert jax.tree.map(lambda x: float(x[0]), state) == {"a": 5, "b": 5}
