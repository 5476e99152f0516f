"""Graceful stopping: SIGINT (Ctrl-C) and SIGTERM ask the training loop to stop after the current step."""

import os
import signal
import threading
from types import FrameType
from typing import Any


class Stop:
    """A context manager that records the first signal in `signum`. A second signal interrupts at once.

    Python allows signal handlers only in the main thread. In any other thread `Stop` never stops anything.
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

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
        # Not `print`: a handler may run in the middle of a `print`.
        os.write(2, b"\nStopping after this step. Press Ctrl-C again to stop at once, without saving.\n")
