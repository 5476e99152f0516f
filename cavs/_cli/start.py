"""How the program was started, and how it ends if it is interrupted before the training loop takes over."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


def program() -> str:
    """The words with which the user started this program, for commands that messages suggest: `cavs`, `uv run cavs`, ..."""
    import shutil
    from pathlib import Path

    name = Path(sys.argv[0])
    if name.name == "__main__.py" or name.name == "cli.py":
        python = Path(sys.executable)
        return f"{python.name if shutil.which(python.name) == str(python) else python} -m cavs"
    if name.name != "cavs":
        return "cavs"  # called from another program
    if "UV_RUN_RECURSION_DEPTH" in os.environ or "UV" in os.environ:
        return "uv run cavs"
    return "cavs" if shutil.which("cavs") else str(name)


@contextlib.contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """A context in which Ctrl-C ends the program at once with code 130, also while modules are imported or code is compiled.

    A `KeyboardInterrupt` raised there may be swallowed by a callback or leave a library half imported. The training loop has
    its own handler, which saves first.
    """
    ours = threading.current_thread() is threading.main_thread()  # elsewhere Python allows no handlers
    before = signal.signal(signal.SIGINT, _exit) if ours else None
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def _exit(signum: int, frame: FrameType | None) -> None:
    with contextlib.suppress(Exception):  # the signal may have come in the middle of a `print`
        sys.stdout.flush()
    os.write(2, b"\ncavs: interrupted\n")
    os._exit(128 + signum)
