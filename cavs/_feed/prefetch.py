"""`prefetch`: the next batches are scheduled and sent to the device while this one runs (VPPS's asynchrony)."""

import os
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")


def prefetch(items: Iterable[Item], prepare: Callable[[Item], Prepared], depth: int = 2) -> Generator[Prepared, None, None]:
    """`prepare(item)` for each item, in order, run on a background thread at most `depth` items ahead.

    ```python
    def prepare(rows):
        batch = graphs[rows]
        sched = cavs.schedule(batch)
        return jax.device_put((sched, sched.pad(batch.input_id), sched.pad(batch.label, -1)))

    for sched, words, labels in cavs.data.prefetch(batches, prepare):
        params, opt_state, loss = step(params, opt_state, sched, words, labels)
    ```

    The thread starts with the first `next` and ends with the items, with the first exception, or once the consumer stops:
    `break` out of the loop where the loop is the iterator's only owner, otherwise `.close()` or
    `with contextlib.closing(...)`. Closing waits for the item in hand. Both `items` and `prepare` run on the thread, so
    JAX settings made by a `with` around the loop (`jax.default_device`, ...) do not reach them: name the device in
    `device_put`.

    **Arguments:** `items`, any iterable, may be endless; `prepare`, a function of one item; `depth`, at least 1, how many
    prepared items may wait (their memory is held).

    **Raises:** what `items` or `prepare` raised, at the place of that item and after all items before it; `TypeError` or
    `ValueError` at the call for a `prepare` or `depth` that is none; `RuntimeError` in a process forked from the one that
    began.
    """
    if not callable(prepare):
        raise TypeError(f"prefetch: prepare is a {type(prepare).__name__}, wanted a function of one item.")
    if not isinstance(depth, int) or depth < 1:
        raise ValueError(f"prefetch: depth is {depth!r}, wanted an int >= 1: how many prepared items may wait.")
    return _consume(iter(items), prepare, depth)


def refuse_inherited(what: str, made_in: int) -> None:
    """**Raises:** `RuntimeError` where the process `made_in` began an iterator and a fork of it goes on: threads and other
    processes answer the first alone."""
    if os.getpid() != made_in:
        raise RuntimeError(
            f"{what}: process {made_in} began this iterator, and process {os.getpid()}, forked from it, goes on with it; "
            f"wanted an iterator of its own. Call cavs.data.{what} after the fork."
        )


def _consume(items: Iterator[Any], prepare: Callable[[Any], Any], depth: int) -> Generator[Any, None, None]:
    made_in = os.getpid()
    ready: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    # Taken by the thread before it starts on an item, given back when the consumer takes one: never more than `depth`
    # items in hand or waiting, and nobody polls.
    room = threading.Semaphore(depth)
    stop = threading.Event()
    # A daemon, so that a consumer that dies holding the iterator does not keep the interpreter alive.
    thread = threading.Thread(target=_produce, args=(items, prepare, ready, room, stop), name="cavs-prefetch", daemon=True)
    thread.start()
    # An iterator that lives as long as the interpreter is closed when modules are empty already, and daemons do not run.
    ending, this_thread = sys.is_finalizing, threading.get_ident
    try:
        while True:
            what, value = ready.get()
            if what == "end":
                return
            if what == "error":
                raise value
            room.release()
            yield value
            refuse_inherited("prefetch", made_in)
            del value  # not held while waiting for the next one
    finally:
        if not ending() and os.getpid() == made_in:  # a fork has no such thread, and its locks may be held for ever
            stop.set()
            room.release()
            if thread.ident != this_thread():  # the garbage collector may close us from any thread
                thread.join()


def _produce(
    items: Iterator[Any],
    prepare: Callable[[Any], Any],
    ready: "queue.SimpleQueue[tuple[str, Any]]",
    room: threading.Semaphore,
    stop: threading.Event,
) -> None:
    try:
        while True:
            room.acquire()
            if stop.is_set():
                return
            try:
                item = next(items)
            except StopIteration:
                ready.put(("end", None))
                return
            ready.put(("item", prepare(item)))
    except BaseException as error:  # whatever it is: the consumer raises it
        ready.put(("error", error))
