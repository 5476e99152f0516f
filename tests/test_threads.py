"""The thread of a loader: errors of `collate`, interrupts, forks, the end of a script, and the same batches as without it."""

import _weakrefset
import gc
import itertools
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import cavs
from cavs._feed import settings, thread as threads_of
from cavs._feed.thread import prefetch
from cavs.kernels import H200, Target
from tests.odd_graphs import joined, random_binary_tree

GRAPHS = joined([random_binary_tree(1 + n % 7, seed=n) for n in range(30)])
GRAPHS = cavs.Graphs.build(
    np.diff(GRAPHS.vertex_offsets), np.diff(GRAPHS.child_offsets), GRAPHS.children, input_id=np.arange(GRAPHS.num_vertices)
)


def threads() -> list[threading.Thread]:
    gc.collect()
    return [thread for thread in threading.enumerate() if thread.name == "cavs-prefetch"]


def bits(loader: Any, dispatches: int | None = None) -> list[Any]:
    """The arrays of the batches of a loop, or of its first dispatches."""
    return [[np.asarray(x) for x in jax.tree.leaves(some)] for some in itertools.islice(loader, dispatches)]


def assert_same(one: list[Any], other: list[Any]) -> None:
    for some, others in zip(one, other, strict=True):
        for x, y in zip(some, others, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("ahead", [1, 2, 9])
@pytest.mark.parametrize("options", [{"steps": 1}, {"steps": 3, "last": "drop"}, {"parts": 2, "last": "drop"}], ids=str)
def test_batches_are_those_of_a_loop_without_a_thread(options: dict[str, Any], ahead: int) -> None:
    here, there = (cavs.data.Loader(GRAPHS, 4, ahead=n, **options) for n in (0, ahead))
    for _ in range(3):
        assert_same(bits(here), bits(there))
        assert here.state() == there.state()
    bits(here, 2)
    bits(there, 2)
    assert here.state() == there.state()
    again = cavs.data.Loader(GRAPHS, 4, ahead=ahead, **options)
    again.restore(there.state())
    assert_same(bits(again), bits(cavs_rest(here)))


def cavs_rest(loader: cavs.data.Loader) -> cavs.data.Loader:
    """The same loader, which continues where its last loop was left, not with the next epoch."""
    loader.restore(loader.state())
    return loader


class Broken(Exception):
    pass


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_an_error_of_collate_comes_at_its_place(ahead: int, steps: int) -> None:
    calls: list[int] = []

    def collate(sample: cavs.data.Sample) -> Any:
        calls.append(len(calls))
        if len(calls) == 6:
            raise Broken("batch 5")
        return sample.sched

    batches = [[i, i + 1] for i in range(20)]
    loader = cavs.data.Loader(GRAPHS, batches, shapes=1, collate=collate, ahead=ahead, steps=steps)
    received = 0
    with pytest.raises(Broken, match="batch 5") as caught:
        for some in loader:
            received += len(some) if steps > 1 else 1
    assert received == loader.batch == (5 if steps == 1 else 4)
    assert "collate" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    del caught
    assert not threads()
    before = len(calls)
    assert len(bits(loader)) == 20 // steps and loader.epoch == 2  # the next epoch, all of it
    begun = (ahead + 1) * steps if ahead else 0  # of the epoch after it: `ahead` dispatches wait, beside the one that is sent
    assert 20 <= len(calls) - before <= 20 + begun


def test_a_loader_that_is_deleted_ends_its_thread() -> None:
    loader = cavs.data.Loader(GRAPHS, 4, ahead=2, steps=1)
    loop = iter(loader)
    next(loop)
    assert len(threads()) == 1
    del loop, loader
    assert not threads()


def test_garbage_in_a_cycle_ends_its_thread() -> None:
    loader = cavs.data.Loader(GRAPHS, 4, ahead=2, steps=1)
    loop = iter(loader)
    next(loop)
    cycle: list[Any] = [loop, loader]
    cycle.append(cycle)
    del loop, loader, cycle
    assert not threads()


def test_loaders_on_several_threads_do_not_disturb_each_other() -> None:
    want, found = bits(cavs.data.Loader(GRAPHS, 4, steps=1)), queue.SimpleQueue()

    def loop() -> None:
        found.put(bits(cavs.data.Loader(GRAPHS, 4, ahead=2, steps=1)))

    running = [threading.Thread(target=loop) for _ in range(6)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
        assert_same(found.get(), want)


def in_a_fork(work: Callable[[], object]) -> object:
    """What `work` returns in a fork of this process, or the text of what it raises."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's, as it has threads; the fork uses NumPy alone
        child = os.fork()
    if not child:
        try:
            try:
                answer = work()
            except BaseException as error:
                answer = repr(error)
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        assert select.select([reading], [], [], 60)[0], "the fork does not answer"
        with os.fdopen(reading, "rb") as pipe:
            return pickle.load(pipe)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_does_not_wait_for_our_thread() -> None:
    ours = prefetch(range(9), lambda x: x)
    next(ours)
    message = str(in_a_fork(lambda: next(ours)))
    assert f"prefetch: got an iterator of process {os.getpid()}" in message
    assert "Iterate over the loader after the fork" in message
    assert in_a_fork(ours.close) is None
    assert list(ours) == [*range(1, 9)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_fork_iterates_over_a_loader_of_its_parent(ahead: int) -> None:
    """Also if the parent's thread has prepared the next epoch, or holds a lock while it plans."""
    loader = cavs.data.Loader(GRAPHS, 4, ahead=ahead, steps=1)
    bits(loader)
    want = [x[0].tolist() for x in bits(cavs_rest(loader), 3)]
    loader.restore({**loader.state(), "batch": 0})

    def work() -> object:
        loader._ahead = 0  # JAX does not send anything in a fork
        return [x[0].tolist() for x in bits(loader, 3)]

    assert in_a_fork(work) == want
    assert [x[0].tolist() for x in bits(loader, 3)] == want


def test_ctrl_c_leaves_no_lock_locked() -> None:
    """Python's semaphores and events are not safe: an interrupt between two of their lines leaves their lock locked."""
    items, entered = prefetch(itertools.count(), lambda x: x), set()
    next(items)
    sys.setprofile(lambda frame, event, arg: entered.add(frame.f_code.co_filename))
    try:
        assert [next(items) for _ in range(5)] == [1, 2, 3, 4, 5]
    finally:
        sys.setprofile(None)
    items.close()
    assert entered and threading.__file__ not in entered


@pytest.mark.parametrize("ahead", [0, 2])
def test_ctrl_c_is_not_lost_where_memory_is_freed(ahead: int) -> None:
    """Python prints and forgets an exception in a callback of a reference, so none runs Python code."""
    loader = cavs.data.Loader(GRAPHS, 4, ahead=ahead, steps=1)
    for _ in loader:
        pass
    entered: set[str] = set()
    sys.setprofile(lambda frame, event, arg: entered.add(frame.f_code.co_filename))
    try:
        for _ in loader:
            pass
    finally:
        sys.setprofile(None)
    assert threads_of.__file__ in entered and not entered & {weakref.__file__, _weakrefset.__file__}


SCRIPT = """
import gc, itertools, sys, cavs
gc.disable()  # JAX has a callback written in Python there, which can lose Ctrl-C
graphs = cavs.from_lengths([5, 6, 7])
loader = cavs.data.Loader(graphs, ([i % 3] for i in itertools.count()) if sys.argv[2] == "iterator" else 1, ahead=2, steps=1)
loop = iter(loader)
next(loop)
print("begun", flush=True)
if sys.argv[1] == "endless":
    while True:
        for _ in loop: pass
        loop = iter(loader)
"""  # no `if __name__ == "__main__"`; leaves with batches under way


@pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
@pytest.mark.parametrize(("how", "batches"), [("leaves", "iterator"), ("endless", "size")])
def test_a_script_ends_at_once(how: str, batches: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, path, how, batches]
    with subprocess.Popen(command, stdout=-1, stderr=-1, env=environment, text=True) as script:
        assert script.stdout and script.stderr and script.stdout.readline() == "begun\n"
        if interrupted := how == "endless":
            time.sleep(0.1)
            script.send_signal(signal.SIGINT)
        try:
            text = script.communicate(timeout=60)[1]
        finally:
            script.kill()  # one that hangs fails the test, and does not hang it
    assert ("KeyboardInterrupt" in text) == interrupted and text.count("Traceback") == interrupted, text


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (3, 3), (64, 16)])
def test_as_many_threads_schedule_for_a_gpu_as_the_process_has_cores(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "usable_cores", lambda: cores)
    like = settings.Settings(None, None, None, "", "", 1, None, None, None, None, H200)
    assert settings.threads_of(like) == threads
    assert settings.threads_of(like._replace(target=Target("cpu"))) == 1
