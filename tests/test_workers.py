"""Workers create the same schedules, pass on errors, and end with their graphs and their caller."""

import copy
import dataclasses
import gc
import itertools
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest

import cavs
from cavs._feed import messages, schedules as schedules_file, workers as workers_file
from cavs._feed.prefetch import prefetch
from cavs._feed.schedules import schedules
from cavs._graphs.deferred import DeferredGraphs
from tests.odd_graphs import BATCHES, chain, joined, random_binary_tree


def elsewhere(graphs: cavs.Graphs) -> list:
    return workers_file._idle.get(graphs, [])


def assert_same(one: tuple[cavs.Graphs, cavs.Schedule], other: tuple[cavs.Graphs, cavs.Schedule]) -> None:
    for field in dataclasses.fields(cavs.Graphs):
        np.testing.assert_array_equal(getattr(one[0], field.name), getattr(other[0], field.name))
    assert one[1].shape == other[1].shape
    np.testing.assert_array_equal(one[1].data, other[1].data)


@pytest.mark.parametrize("name", ["binary", "kinds", "dags"])
def test_a_process_makes_the_same_schedules(name: str) -> None:
    graphs = BATCHES.get(name) or joined([random_binary_tree(n, seed=n) for n in (1, 40, 7, 90, 2)])
    order = np.random.default_rng(0).integers(0, len(graphs), (600, 3))
    known: list = []
    known_there: list = []
    graphs = dataclasses.replace(graphs, label=np.arange(graphs.num_vertices, dtype=np.int32))
    here = schedules(graphs, order, shapes=known, fields=("label",))
    there = schedules(graphs, order, shapes=known_there, fields=("label",), workers=1)
    for one, other in zip(here, there, strict=True):
        assert_same(one, other)
    assert known == known_there
    (worker,) = elsewhere(graphs)
    next(schedules(graphs, order, workers=1))  # and no more
    for found in schedules(graphs, [[0]], workers=1, exact=True):
        assert_same(found, (graphs[:1], cavs.schedule(graphs[:1], exact=True)))
    assert elsewhere(graphs) == [worker]  # the same process served all three


@pytest.mark.parametrize(("fields", "files"), [((), True), (("input_id", "label"), False)])
def test_several_processes_make_the_same_schedules(fields: tuple, files: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not files:  # as where memory has no files
        monkeypatch.setattr(workers_file, "file_in_memory", lambda: None)
    monkeypatch.setattr(schedules_file, "VERTICES_PER_PASS", 1 << 13)  # more passes
    rng = np.random.default_rng(0)
    graphs = joined([random_binary_tree(n, seed=n) for n in (1, 40, 7, 90, 2)])
    ids = [rng.integers(0, 9, graphs.num_vertices, np.int32) for _ in range(2)]
    graphs = dataclasses.replace(graphs, input_id=ids[0], label=ids[1], vocab=tuple("abcdefghi"))
    order = [rng.integers(0, len(graphs), n) for n in rng.integers(0, 50, 200)]
    shapes: list = []
    for _ in schedules(graphs, order[::2], shapes=shapes, fields=fields):
        pass
    for known in (tuple(shapes), None):
        here = list(schedules(graphs, order, shapes=known, fields=fields))
        for workers in (2, 3, 1):
            there = list(schedules(graphs, order, shapes=known, fields=fields, workers=workers))  # all are kept
            for one, other in zip(here, there, strict=True):
                assert_same(one, other)
    assert len(elsewhere(graphs)) == 3
    assert sum(sched.data.nbytes for _, sched in here) > 20 * messages._SMALL


@pytest.mark.skipif(not hasattr(select, "poll"), reason="the system cannot tell whether a worker has started")
def test_a_loop_does_not_wait_for_more_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = cavs.from_lengths([3, 4, 5])
    order = [[i % 3] for i in range(100)]
    assert len(list(schedules(graphs, order, workers=1))) == 100
    (first,) = elsewhere(graphs)
    start = workers_file._Worker.__init__

    def stopped(worker: workers_file._Worker, *args: object) -> None:
        start(worker, *args)
        worker._process.send_signal(signal.SIGSTOP)

    with monkeypatch.context() as patch:
        patch.setattr(workers_file._Worker, "__init__", stopped)
        for _ in range(2):  # the second loop starts no more of them
            assert len(list(schedules(graphs, order, workers=2))) == 100
    second = next(worker for worker in elsewhere(graphs) if worker is not first)
    assert len(elsewhere(graphs)) == 2 and first.started and not second.started
    second._process.send_signal(signal.SIGCONT)
    assert select.select([second._out], [], [], 60)[0]
    both = schedules(graphs, order, workers=2)
    next(both)
    assert not elsewhere(graphs)  # both are in use
    assert len(list(both)) == 99 and set(elsewhere(graphs)) == {first, second}


def test_graphs_are_selected_when_they_are_looked_at() -> None:
    graphs = dataclasses.replace(joined([chain(5), chain(7)]), label=np.arange(12, dtype=np.int32))
    looks = (len, repr, copy.copy, copy.deepcopy, pickle.dumps, dataclasses.asdict, lambda g: g[0], lambda g: g.label)
    found = [batch for batch, _ in schedules(graphs, [[1]] * len(looks), fields=("label",), workers=1)]
    for look, batch in zip(looks, found, strict=True):
        assert isinstance(batch, DeferredGraphs) and not isinstance(batch._held, cavs.Graphs)
        look(batch)
        assert isinstance(batch._held, cavs.Graphs)
        assert batch.label is not None and batch.label.tolist() == [5, 6, 7, 8, 9, 10, 11]
        assert batch._source()[0] is graphs
    untouched = [batch for batch, _ in schedules(graphs, [[1]] * 2, fields=("label",), workers=1)]
    for same in (dataclasses.replace(untouched[0], label=None), pickle.loads(pickle.dumps(untouched[1]))):
        assert len(same) == 1 and same._arity == graphs._arity and same.height.tolist() == list(range(7))


def test_processes_end_with_their_graphs() -> None:
    graphs = joined([chain(5)])
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    assert len(list(schedules(graphs, [[0]] * 5, workers=2))) == 5
    processes = [worker._process for worker in elsewhere(graphs)]
    assert len(processes) == 2
    del graphs
    gc.collect()
    assert all(process.poll() is not None for process in processes)
    assert not before or set(os.listdir("/proc/self/fd")) <= before


def test_errors_reach_the_caller_of_a_process() -> None:
    graphs = dataclasses.replace(joined([chain(5)] * 4), vocab=("a",))
    found = schedules(graphs, [[0], [1], [99]], workers=1)
    assert next(found)[1].num_vertices and next(found)[1].num_vertices
    with pytest.raises(IndexError, match="99"):  # after the batches before it
        next(found)
    broken = dataclasses.replace(graphs, height=np.zeros(0, np.int32))
    with pytest.raises(IndexError, match="empty axes") as caught:
        next(schedules(broken, [[0]], workers=1))
    assert "order_of" in "".join(traceback.format_exception(caught.value))  # where it happened
    graphs = dataclasses.replace(graphs)  # without a worker that has started
    found = schedules(graphs, [[0]] * 9000, workers=2)
    next(found)
    team = [r for r in gc.get_objects() if type(r) is workers_file._Worker and r._under_way]
    assert len(team) == 2
    team[1]._process.kill()
    with pytest.raises(RuntimeError, match="the worker ended with status -9"):
        list(found)
    assert elsewhere(graphs) == [team[0]]
    assert len(list(schedules(graphs, [[0]] * 9, workers=2))) == 9  # by it and a new one
    next(found := schedules(graphs, [[0]] * 9000, workers=1))
    found.close()  # type: ignore[attr-defined]
    elsewhere(graphs)[-1]._process.kill()
    with pytest.raises(RuntimeError, match="the worker ended with status -9"):
        next(schedules(graphs, [[0]], workers=1))
    for workers, error in (("yes", TypeError), (2.0, TypeError), (True, TypeError), (-1, ValueError)):
        with pytest.raises(error, match=f"workers: got {workers!r}; expected an int >= 0"):
            schedules(graphs, [], workers=workers)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Write shapes=tuple"):
        schedules(graphs, [], shapes=[], workers=2)
    assert len(list(schedules(graphs, [[0]], shapes=[], workers=1))) == 1


def in_a_fork(work) -> object:
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


def sizes(found) -> list[int]:
    return [sched.num_vertices for _, sched in found]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_uses_its_own_workers() -> None:
    graphs = joined([chain(n) for n in range(1, 101)])
    here, there = [[i] for i in range(100)], [[i] for i in reversed(range(100))]
    assert sizes(schedules(graphs, here, workers=1)) == [*range(1, 101)]
    (worker,) = elsewhere(graphs)
    ours = schedules(graphs, here, workers=1)
    next(ours)

    def work() -> object:
        # Otherwise the worker would live as long as the fork, which holds an end of its pipe.
        assert not elsewhere(graphs) and not worker.alive and worker._in.closed and worker._out.closed
        return sizes(schedules(graphs, there, workers=1)), [r._process.terminate() for r in elsewhere(graphs)]

    assert in_a_fork(work) == ([*range(100, 0, -1)], [None])
    message = in_a_fork(lambda: next(ours))
    assert f"schedules: got an iterator of process {os.getpid()}" in str(message)
    assert "Iterate over the loader after the fork" in str(message)
    assert sizes(ours) == [*range(2, 101)]  # untouched
    assert elsewhere(graphs) == [worker] and worker.alive


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_does_not_wait_for_our_thread() -> None:
    ours = prefetch(range(9), lambda x: x)
    next(ours)
    assert f"prefetch: got an iterator of process {os.getpid()}" in str(in_a_fork(lambda: next(ours)))
    assert in_a_fork(ours.close) is None
    assert list(ours) == [*range(1, 9)]


@pytest.mark.skipif(not hasattr(select, "poll"), reason="the system cannot wait for a pipe")
def test_a_process_that_is_stopped_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = joined([chain(5)])
    monkeypatch.setattr(messages, "TIMEOUT", 0.2)
    for size in (1, 1 << 20):  # while we read; while we write more than a pipe takes
        with monkeypatch.context() as patch:
            patch.setattr(messages, "TIMEOUT", 60)  # it has to start
            assert len(list(schedules(graphs, [[0]], workers=1))) == 1
        (worker,) = elsewhere(graphs)
        wait = worker._process.wait
        # It would have five seconds to end by itself.
        monkeypatch.setattr(worker._process, "wait", lambda _=None, wait=wait, kill=worker._process.kill: (kill(), wait()))
        worker._process.send_signal(signal.SIGSTOP)
        message = "has not answered for 0.2 s .is it stopped.. and was ended. Iterate over the loader again"
        with pytest.raises(RuntimeError, match=message):
            next(schedules(graphs, [np.zeros(size, int)], workers=1))
        assert not worker.alive and worker._process.poll() is not None and not elsewhere(graphs)


def test_a_worker_in_garbage_is_not_used_again() -> None:
    """The garbage collector may close the connection of an abandoned iterator's worker before it ends the iterator."""
    graphs = cavs.from_lengths([3, 4, 5])
    found = schedules(graphs, [[0]] * 9000, workers=1)
    next(found)
    cycle: list[object] = [found]
    cycle.append(cycle)
    del found, cycle
    gc.collect()
    assert not elsewhere(graphs)
    assert len(list(schedules(graphs, [[0]], workers=1))) == 1


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


SCRIPT = """
import sys, cavs
from cavs._feed.prefetch import prefetch
from cavs._feed.schedules import schedules
graphs = cavs.from_lengths([5, 6, 7])
found = schedules(graphs, ([i % 3] for i in range(10**9)), workers=1)
print(int(next(found)[1].num_vertices), flush=True)
if sys.argv[1] == "endless":
    for _ in found: pass
if sys.argv[1] == "prefetch":
    for _ in prefetch(found, lambda x: x): pass
if sys.argv[1] == "prefetch, leaves":
    next(ahead := prefetch(found, lambda x: x))
"""  # no `if __name__ == "__main__"`; leaves with schedules under way


@pytest.mark.skipif(os.name != "posix", reason="signals and process groups as POSIX has them")
@pytest.mark.parametrize("how", ["leaves", "endless", "prefetch", "prefetch, leaves"])
def test_a_script_ends_at_once_and_so_does_its_process(how: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    # The process inherits stderr, so that reading it to its end waits for both.
    with subprocess.Popen([sys.executable, path, how], stdout=-1, stderr=-1, env=environment, text=True) as script:
        assert script.stdout and script.stderr and script.stdout.readline() == "5\n"
        if interrupted := how in ("endless", "prefetch"):
            time.sleep(0.1)
            script.send_signal(signal.SIGINT)
        try:
            text = script.communicate(timeout=60)[1]
        finally:
            script.kill()  # one that hangs fails the test, and does not hang it
    assert ("KeyboardInterrupt" in text) == interrupted and text.count("Traceback") == interrupted, text


def test_loops_on_several_threads_never_take_the_same_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        def __init__(self, graphs: cavs.Graphs):
            self.started, self.users = True, 0

    monkeypatch.setattr(workers_file, "_Worker", Worker)
    graphs, found, interval = chain(3), set(), sys.getswitchinterval()

    def loop() -> None:
        for _ in range(4000):
            idle, team = workers_file._teams(graphs, 1)
            for worker in team:
                worker.users += 1  # type: ignore[attr-defined]
                found.add(worker.users)  # type: ignore[attr-defined]
                worker.users -= 1  # type: ignore[attr-defined]
            found.add(len(team))
            idle += team

    threads = [threading.Thread(target=loop) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == {1}
