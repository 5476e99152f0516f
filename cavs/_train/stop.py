"""Stopping in good order: SIGINT (Ctrl-C) and SIGTERM ask the loop to stop after the step in hand."""

import os
import signal
import threading
from types import FrameType
from typing import Any


class Stop:
    """A context in which the first signal is only remembered, in `signum`; a second one interrupts at once.

    Outside the main thread, where Python allows no handlers, it never stops anything.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signum is not None

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._remember) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: Any) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
        # Not print: a handler may run in the midst of one.
        os.write(2, b"\nstopping after this step; once more to stop at once, without saving\n")
