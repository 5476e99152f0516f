"""`_feed.thread.prefetch`: order, depth, what is prepared when, exceptions, and a thread that ends with its consumer."""

import contextlib
import gc
import itertools
import threading
import time

import jax
import numpy as np
import pytest

from cavs._feed import thread
from cavs._feed.thread import prefetch


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "cavs-prefetch"]


def left() -> list[threading.Thread]:
    if threads():
        gc.unfreeze()  # what other files left is frozen (`conftest.py`)
        gc.collect()  # iterators that nothing refers to
    return threads()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    assert not left()
    yield
    assert not left()


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


@pytest.mark.parametrize("depth", [1, 3])
def test_never_more_than_depth_ahead(depth):
    begun, prepared = [], []
    items = (begun.append(i) or i for i in itertools.count())
    with contextlib.closing(prefetch(items, lambda i: prepared.append(i) or i, depth)) as it:
        for taken in range(1, 6):
            assert next(it) == taken - 1
            wait_until(lambda: len(begun) == len(prepared) + depth)
            time.sleep(0.01)
            assert len(begun) == len(prepared) + depth and len(prepared) in (taken, taken + 1)


def test_items_are_computed_while_the_consumer_works():
    here = threading.Event()
    items = (i for i in range(2) if i != 1 or here.set() is None)
    with contextlib.closing(prefetch(items, lambda i: i)) as it:
        assert next(it) == 0
        assert here.wait(10)  # item 1 is computed though nobody asked for it


def test_an_item_is_prepared_before_the_one_before_it_is_used(monkeypatch):
    monkeypatch.setattr(thread, "PATIENCE", 10)
    prepared = []
    with contextlib.closing(prefetch(range(4), lambda i: prepared.append((i, threading.get_ident())) or i)) as it:
        for i in range(3):
            assert next(it) == i
            assert prepared[-1] == (i + 1, threading.get_ident())


def test_an_item_may_depend_on_what_is_done_with_the_one_before():
    done = threading.Event()
    items = (i for i in range(2) if i == 0 or done.wait(60))
    with contextlib.closing(prefetch(items, lambda i: i)) as it:
        assert next(it) == 0
        done.set()
        assert next(it) == 1


class Broken(Exception):
    pass


def test_an_exception_of_the_items_comes_at_its_place():
    def items():
        yield 0
        raise Broken("no more")

    it = prefetch(items(), lambda i: i)
    assert next(it) == 0
    with pytest.raises(Broken, match="no more"):
        next(it)
    with pytest.raises(StopIteration):
        next(it)


def test_an_exception_of_prepare_comes_at_its_place():
    def prepare(i):
        if i == 2:
            raise Broken("not this one")
        return i

    computed = []
    it = prefetch((computed.append(i) or i for i in range(3)), prepare, depth=3)
    assert next(it) == 0
    wait_until(lambda: len(computed) == 3)
    assert next(it) == 1
    with pytest.raises(Broken, match="not this one"):
        next(it)


def test_stop_iteration_in_prepare_does_not_end_the_items_silently():
    with pytest.raises(RuntimeError):
        list(prefetch(range(3), lambda i: next(iter(()))))


def test_close_ends_the_thread_at_once():
    it = prefetch(itertools.count(), lambda i: i)
    assert next(it) == 0 and len(threads()) == 1
    it.close()
    assert not threads()
    assert list(it) == []


def test_waiting_costs_no_processor_time():
    with contextlib.closing(prefetch(itertools.count(), lambda i: i)) as it:
        next(it)
        time.sleep(0.05)
        start = time.process_time()
        time.sleep(0.3)  # the thread waits for room
        assert time.process_time() - start < 0.1


def test_closing_waits_for_the_item_in_hand():
    entered, leave, left = threading.Event(), threading.Event(), []

    def items():
        yield 0
        entered.set()
        leave.wait(10)
        left.append(1)
        yield 1

    it = prefetch(items(), lambda i: i)
    next(it)
    assert entered.wait(10)
    threading.Timer(0.05, leave.set).start()
    it.close()
    assert left == [1]


def test_device_arrays_arrive_ready():
    batches = [np.full((3,), i, np.int32) for i in range(5)]
    for i, x in enumerate(prefetch(batches, jax.device_put)):
        assert isinstance(x, jax.Array)
        np.testing.assert_array_equal(x, batches[i])
