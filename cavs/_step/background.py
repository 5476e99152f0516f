"""`Background`: programs that threads compile, while the caller does something else."""

import atexit
import contextlib
import queue
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

# Called with (k, n) when XLA begins with the k-th of n programs, and with `None` when it has done all.
Watch: TypeAlias = Callable[[tuple[int, int] | None], None]


class Background:
    """Compilations, one after another. While XLA compiles a program, the next one is traced and lowered."""

    def __init__(self) -> None:
        # Locked until the program is compiled. Not `threading.Event`s: if Ctrl-C interrupts one, its lock may stay locked.
        self._compiling: dict[Hashable, threading.Lock] = {}
        self._stop = False

    def __contains__(self, key: Hashable) -> bool:
        return key in self._compiling

    def start(self, work: dict[Hashable, Callable[[], Callable[[], Any]]], watch: Watch, count: int) -> None:
        """Starts the threads, which end after the last of `work`.

        `work`: for each program, by its name, a function that lowers it and returns the one that compiles it. `watch`: see
        `Watch`. `count`: the number of programs, including those that are compiled already.
        """
        locks = {key: threading.Lock() for key in work}
        for lock in locks.values():
            lock.acquire()
        self._compiling |= locks
        ready: queue.Queue[tuple[int, Hashable, Callable[[], Any] | None]] = queue.Queue(1)

        def lower_all() -> None:
            for number, (key, lower) in enumerate(work.items(), count - len(work) + 1):
                compile_it = None
                with contextlib.suppress(Exception):  # the call of the program raises the error, too
                    compile_it = None if self._stop else lower()
                ready.put((number, key, compile_it))

        def compile_all() -> None:
            for _ in work:
                number, key, compile_it = ready.get()
                with contextlib.suppress(Exception):  # as above
                    if compile_it and not self._stop:
                        watch((number, count))
                        compile_it()
                if number == count:
                    watch(None)
                locks[key].release()

        # Both start now: an interpreter that is about to end starts no threads.
        threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((lower_all, "cavs-compile"), (compile_all, "cavs-xla"))
        ]

        def end() -> None:  # an interpreter that ends in the middle of a compilation may crash
            self._stop = True
            for thread in threads:
                thread.join()

        atexit.register(end)
        watch((count - len(work) + 1, count))
        for thread in threads:
            thread.start()

    def wait(self, key: Hashable) -> None:
        if key in self._compiling:
            with self._compiling[key]:
                pass

    def wait_for_all(self) -> None:
        for key in [*self._compiling]:
            self.wait(key)
