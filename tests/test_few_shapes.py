"""A few shapes chosen in advance hold every batch of a data set, and their schedules are valid."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import cavs
from cavs._feed import shapes as shapes_of_loaders
from cavs._schedule.batches import StackScheduler
from cavs._schedule.shape import Shape
from cavs._schedule.shape_choice import bound, counts_of, few_shapes, fits, sums, thresholds
from tests.odd_graphs import BATCHES, joined, random_binary_tree
from tests.schedule_checks import check, dags, options_for


def fixed(graphs: cavs.Graphs, batches: list[np.ndarray], sample: int | None = None):
    """The schedules of batches, whose shapes are chosen from the first `sample` of them."""
    options = options_for(graphs, scripts=True)
    names, counts = counts_of(graphs, options.kinds)
    bounds = [bound(counts, len(batches[0]))]
    shapes = [shape for (shape,) in few_shapes([(graphs, options)], [batches[:sample]], 2, bounds)]
    inside = fits(shapes, sums(counts, batches))
    assert inside[:, -1].all() and shapes[0].kinds == names
    scheduler, chosen = StackScheduler(graphs, options), [shapes[i] for i in inside.argmax(1)]
    return [cavs.Schedule(scheduler.stack([some], s)[0], s) for some, s in zip(batches, chosen, strict=True)], shapes


@settings(deadline=None, max_examples=60)
@given(dags(), st.integers(0, 9))
def test_all_batches_of_random_dags_fit(graphs: cavs.Graphs, seed: int) -> None:
    rng, size = np.random.default_rng(seed), max(1, len(graphs) - 1)
    batches = [rng.permutation(len(graphs))[:size] for _ in range(4)]
    found, shapes = fixed(graphs, batches, sample=1)
    assert len(shapes) <= 2
    for index, sched in zip(batches, found, strict=True):
        assert sched.shape in shapes
        check(graphs[index], sched)


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_the_schedules_of_odd_graphs_are_valid(name: str) -> None:
    graphs = BATCHES[name]
    batches = [np.array([i]) for i in range(len(graphs))]
    found, _ = fixed(graphs, batches)
    for index, sched in zip(batches, found, strict=True):
        check(graphs[index], sched)


def test_large_graphs() -> None:
    graphs = joined([random_binary_tree(n, seed=n) for n in (400, 300, 200, 500)])
    batches = [np.array([i, j]) for i in range(4) for j in range(4) if i != j]
    found, _ = fixed(graphs, batches)
    for index, sched in zip(batches, found, strict=True):
        check(graphs[index], sched)


def test_thresholds_pad_little() -> None:
    rng = np.random.default_rng(0)
    totals = rng.integers(1, 1000, 5000)
    assert thresholds(totals, 1, 1000) == [1000]
    assert thresholds(np.full(9, 40), 3, 900) == [40, 900]
    found = thresholds(totals, 4, 2000)
    assert len(found) == 4 and found[-1] == 2000 and found[-2] >= 990
    padded = np.array(found)[np.searchsorted(found, totals)].mean()
    assert padded <= 1.03 * np.mean([x for x in (333.3, 666.7, 1000)]), found
    few = rng.integers(990, 1000, 500)  # a second shape would save nothing
    assert thresholds(few, 3, 2000) == [few.max(), 2000]


@pytest.mark.parametrize(("unavailable", "large", "count"), [(None, False, 1), (None, True, 2), ("no compiler", False, 2)])
def test_one_more_shape_must_save_more_if_epochs_are_short(
    unavailable: str | None, large: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that is compiled while another one trains takes the cores from it."""
    monkeypatch.setattr(shapes_of_loaders, "native_unavailable", lambda: unavailable)
    monkeypatch.setattr(shapes_of_loaders, "SHORT_EPOCH", 1000 if large else 500_000)
    rng = np.random.default_rng(0)
    graphs = cavs.from_lengths(np.minimum(rng.lognormal(2.3, 0.8, 800).astype(int) + 1, 140))
    loader = cavs.data.Loader(graphs, 20, last="drop", steps=1)
    assert len({sched.shape for sched in loader}) == count


def test_a_batch_that_does_not_fit_is_refused() -> None:
    graphs = cavs.from_lengths([3, 400])
    options = options_for(graphs)
    ((shape,),) = few_shapes([(graphs, options)], [[np.array([0])]], 1)
    assert isinstance(shape, Shape)
    with pytest.raises(ValueError, match=r"the graphs \[1\] do not fit the shape Shape"):
        StackScheduler(graphs, options).stack([np.array([0]), np.array([1])], shape)
