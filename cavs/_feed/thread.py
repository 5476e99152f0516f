"""`prefetch`: a thread prepares the next items while one is used (VPPS's asynchrony)."""

import atexit
import contextlib
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

# Seconds to wait for the next item before this one is used. An item may depend on what the caller does with the one before.
PATIENCE = 0.01
Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Loop = TypeVar("Loop", bound=Generator[Any, None, None])


def prefetch(items: Iterable[Item], prepare: Callable[[Item], Prepared], depth: int = 2) -> Generator[Prepared, None, None]:
    """Yields `prepare(item)` for each item, in order. A background thread computes the items.

    The caller's thread prepares an item before it yields the one before, unless the item takes longer than `PATIENCE`. So it
    sends a batch to the GPU before it queues the work of the batch before, for which the copy would otherwise wait.

    The thread starts with the first `next`. It ends after the last item, after the first exception, or when the consumer stops:
    after `break`, if the loop has the only reference to the iterator; otherwise after `.close()`, or at the end of `with
    contextlib.closing(...)`. Closing waits for the item that is being computed. JAX settings made by a `with` around the loop
    (`jax.default_device`, ...) do not apply on the thread.

    Raises:
        RuntimeError: in a process that was forked from the one that began to iterate.
        Exception: an exception of `items` or `prepare`, after all items before it.

    `items`: an iterable, which may be infinite. `prepare`: a function of one item. `depth`: the most items that wait on the
    thread, at least 1, beside the one that is prepared before it is yielded. Their memory stays allocated.
    """
    made_in = os.getpid()
    ready: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    # The thread takes an entry before it computes an item, and the consumer returns it: at most `depth` items are computed or
    # wait. A `threading.Semaphore` would be wrong: if Ctrl-C interrupts its methods, its lock may stay locked.
    room: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(depth):
        room.put(None)
    stop: list[bool] = []  # not empty if the thread is to end
    # A daemon thread does not keep the interpreter alive if the consumer fails and keeps the iterator.
    thread = threading.Thread(target=_produce, args=(iter(items), ready, room, stop), name="cavs-prefetch", daemon=True)
    thread.start()
    # Bound here: at the end of the interpreter the iterator is closed after modules were cleared and daemon threads stopped.
    ending, this_thread = sys.is_finalizing, threading.get_ident

    def prepared(entry: tuple[str, Any]) -> tuple[str, Any]:
        kind, value = entry
        if kind != "item":
            return entry
        room.put(None)
        try:
            return kind, prepare(value)
        except Exception as error:  # raised in its turn
            return "error", error

    def early() -> tuple[str, Any] | None:
        try:
            return prepared(ready.get(timeout=PATIENCE))
        except queue.Empty:
            return None

    next_entry: tuple[str, Any] | None = None
    try:
        while True:
            kind, value = next_entry or prepared(ready.get())
            if kind == "end":
                return
            if kind == "error":
                raise value
            next_entry = early()
            yield value
            if os.getpid() != made_in:
                raise RuntimeError(
                    f"prefetch: got an iterator of process {made_in} in process {os.getpid()}, which was forked from it; "
                    "expected an iterator of this process. Iterate over the loader after the fork."
                )
            del value  # not kept while waiting for the next one
    finally:
        if not ending() and os.getpid() == made_in:  # a fork has no such thread, and its locks may never be released
            stop.append(True)
            room.put(None)
            if thread.ident != this_thread():  # the garbage collector may close the generator from any thread
                thread.join()


def _produce(
    items: Iterator[Any],
    ready: "queue.SimpleQueue[tuple[str, Any]]",
    room: "queue.SimpleQueue[None]",
    stop: list[bool],
) -> None:
    try:
        while True:
            room.get()
            if stop:
                return
            ready.put(("item", next(items)))
    except StopIteration:
        ready.put(("end", None))
    except BaseException as error:  # the consumer raises it
        ready.put(("error", error))


class Stream(NamedTuple):
    """Items that a thread prepares, epoch after epoch."""

    epoch: int  # the epoch that it yields next, from its first item on
    items: Generator[Any, None, None]  # yields the items of each epoch, and then `None`
    process: int  # the id of the process that has the thread


def until_end(items: Iterator[Item | None]) -> Iterator[Item]:
    """Yields the items of an epoch, after which `items` yields `None`."""
    while (item := next(items)) is not None:
        yield item
        del item  # not kept while waiting for the next one


# Generators that still exist when Python ends are closed while what they use, such as the device, still exists. This is no
# `WeakSet`, whose callback is written in Python, which loses a Ctrl-C that arrives there.
_open: set["weakref.ref[Generator[Any, None, None]]"] = set()


def closed_at_exit(loop: Loop) -> Loop:
    """Returns `loop`, which is closed when Python ends, if it still exists."""
    _open.add(weakref.ref(loop, _open.discard))
    return loop


@atexit.register
def _close() -> None:
    for reference in _open.copy():
        with contextlib.suppress(ValueError):  # another thread runs it
            if loop := reference():
                loop.close()
