"""`Background`: programs that a thread compiles, while the caller does something else."""

import atexit
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

# Called with (k, n) when the thread begins with the k-th of n programs, and with `None` when it has done all.
Watch: TypeAlias = Callable[[tuple[int, int] | None], None]


class Background:
    """Compilations on a thread, one after another. While XLA compiles a program, the next one is traced and lowered."""

    def __init__(self) -> None:
        # Locked until the program is compiled. Not `threading.Event`s: if Ctrl-C interrupts one, its lock may stay locked.
        self._compiling: dict[Hashable, threading.Lock] = {}
        self._stop = False

    def __contains__(self, key: Hashable) -> bool:
        return key in self._compiling

    def start(self, work: dict[Hashable, Callable[[], Callable[[], Any]]], watch: Watch, count: int) -> None:
        """Starts the thread, which ends after the last of `work`.

        Args:
            work: for each program, by its name, a function that lowers it and returns the one that compiles it.
            watch: see `Watch`.
            count: the number of programs, those included that exist already.
        """
        locks = {key: threading.Lock() for key in work}
        for lock in locks.values():
            lock.acquire()
        self._compiling |= locks

        def done(number: int, key: Hashable) -> None:
            if number == count:
                watch(None)
            locks[key].release()

        def compiled(compile_it: Callable[[], Any], number: int, key: Hashable) -> None:
            try:
                if not self._stop:
                    compile_it()
            except Exception:  # the call of the program raises the error, too
                pass
            finally:
                done(number, key)

        def run() -> None:
            before: threading.Thread | None = None
            for number, (key, lower) in enumerate(work.items(), count - len(work) + 1):
                try:
                    compile_it = None if self._stop else lower()
                except Exception:  # as above
                    compile_it = None
                if before is not None:
                    before.join()
                if compile_it is None:
                    done(number, key)
                    continue
                watch((number, count))
                before = threading.Thread(target=compiled, args=(compile_it, number, key), name="cavs-xla", daemon=True)
                before.start()
            if before is not None:
                before.join()

        thread = threading.Thread(target=run, name="cavs-compile", daemon=True)

        def end() -> None:  # an interpreter that ends in the middle of a compilation may crash
            self._stop = True
            thread.join()

        atexit.register(end)
        watch((count - len(work) + 1, count))
        thread.start()

    def wait(self, key: Hashable) -> None:
        """Waits for a compilation that was started."""
        if key in self._compiling:
            with self._compiling[key]:
                pass

    def wait_for_all(self) -> None:
        """Waits for all compilations that were started."""
        for key in [*self._compiling]:
            self.wait(key)
