"""Positions of loaders: of iterators, which loops continue, and on several devices. Restored loaders yield the same bits."""

import copy
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cavs
from cavs._feed import sampler
from cavs._feed.plan import Epoch, Planned

GRAPHS = cavs.from_lengths(range(1, 21), input_id=np.arange(210) % 5)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "CHUNK", 16)


def endless() -> Iterator[list[int]]:
    """Batches of one and of two graphs, which run in another order than they come, and need new shapes now and then."""
    for i in itertools.count():
        yield [i % 20, (i * 7 + 1) % 20] if i % 3 else [i % 20]


class Again:
    """An iterable that begins anew in each epoch, and does not tell its length."""

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(endless(), 40)


def received(loader: Any, dispatches: int | None = None) -> list[bytes]:
    """The bits of the batches of a loop over a loader, or of its first dispatches."""
    found = []
    for batches in itertools.islice(loader, dispatches):
        tree, stacked = getattr(batches, "tree", batches), getattr(batches, "count", None) is not None
        data = np.asarray(tree.data)
        found += [row.tobytes() for row in (data[: len(batches)] if stacked else data[None])]
    return found


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_loop_continues_an_iterator(steps: int, ahead: int) -> None:
    new = lambda: cavs.data.Loader(GRAPHS, endless(), steps=steps, ahead=ahead)  # noqa: E731
    whole, loader, found, positions = received(new(), 60), new(), [], []
    for _ in range(6):
        found += received(loader, 5)
        positions.append((len(found), loader.state()))
    assert found == whole[: len(found)] and loader.seen == len(found) and loader.epoch == 5
    for done, position in positions:
        again = new()
        again.restore(position)
        rest = received(again, 6)
        assert rest == whole[done : done + len(rest)]
    with pytest.raises(ValueError, match="got a position after 5|got a position after 15.* Write Loader.* with a new iterator"):
        loader.restore(positions[0][1])
        received(loader, 1)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("steps", [1, 3])
def test_an_iterable_begins_anew_in_each_epoch(steps: int, ahead: int) -> None:
    loader = cavs.data.Loader(GRAPHS, Again(), steps=steps, ahead=ahead)
    whole = received(loader)
    assert len(whole) == 40 and received(loader) == whole
    for stop in (1, 3, 7):
        first, second = (cavs.data.Loader(GRAPHS, Again(), steps=steps, ahead=ahead) for _ in range(2))
        received(first)
        seen = received(first, stop)
        second.restore(first.state())
        assert seen + received(second) == whole == received(second) and second.epoch == 3


def test_an_iterator_that_has_ended_is_not_yielded_again() -> None:
    new = lambda: cavs.data.Loader(GRAPHS, itertools.islice(endless(), 20), steps=1)  # noqa: E731
    loader, again = new(), new()
    assert len(received(loader)) == 20 and not received(loader)
    again.restore(loader.state())
    assert not received(again) and again.seen == 20


def test_a_position_of_several_devices_is_one_of_one_device() -> None:
    """There, batches of a stack that is not full run one by one: a position may lie within a dispatch of one device."""
    planned = Planned([], {}, [], np.array([0, 1, 0, 0, 1, 0, 2, 0, 0, 2, 0]))
    one, several = (Epoch.of(0, planned, 4, partial) for partial in (True, False))
    order = np.concatenate(one.order).tolist()
    assert order == np.concatenate(several.order).tolist() and len(one.order) < len(several.order)
    for ends in (np.cumsum([len(some) for some in epoch.order]).tolist() for epoch in (one, several)):
        for done in [0, *ends]:
            assert np.concatenate([*one.after(done).order, []]).tolist() == order[done:]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("how", [{"steps": 2, "ahead": 1}, {"seed": None, "parts": 3, "steps": 1, "last": "drop"}], ids=str)
def test_a_copy_continues_where_its_loader_is(copied: Any, how: dict[str, Any]) -> None:
    loader, whole = (cavs.data.Loader(GRAPHS, 3, **how) for _ in range(2))
    assert received(copied(loader)) == received(loader) == received(whole)
    batches = next(iter(loader))
    other = copied(loader)
    assert other.state() == loader.state() and (done := other.batch) > 0
    assert received(other) == received(whole)[done:]
    assert received([copied(batches)]) == received([batches])


class Named(cavs.data.Loader):
    """A loader of a user."""

    def __init__(self, name: str, graphs: cavs.Graphs):
        self.before = [name]
        super().__init__(graphs, 3, steps=1)
        self.after = name


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_subclass_has_its_attributes(copied: Any) -> None:
    """It called `__init__` with the arguments of a `Loader`."""
    loader = Named("train", GRAPHS)
    next(iter(loader))
    other = copied(copied(loader))
    assert (type(other), other.before, other.after) == (Named, ["train"], "train")
    assert other.state() == loader.state() and received(other) == received(Named("all", GRAPHS))[1:]
