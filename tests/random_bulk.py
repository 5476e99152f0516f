"""Runs random cases in fresh processes, a few seeds each, so that a case that ends its process or hangs fails alone."""

import json
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CHUNK = 10  # seeds of a process, which then frees what it has compiled
START = '{"seed": '  # of a line with a result


def results(
    command: Sequence[str], seeds: Sequence[int], processes: int, limit: float, seconds: float
) -> Iterator[dict[str, Any]]:
    """Yields a result for each seed, in any order.

    Args:
        command: is given seeds as its last arguments, and prints a line of JSON for each, in order.
        seeds: the seeds.
        processes: how many run at a time.
        limit: the seconds after which a seed without a result counts as crashed.
        seconds: the seconds after which no other seed is begun.
    """
    found: queue.Queue[dict[str, Any] | None] = queue.Queue()
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(processes) as pool:
        chunks = [list(seeds[i : i + CHUNK]) for i in range(0, len(seeds), CHUNK)]
        futures = [pool.submit(_chunk, command, chunk, limit, end, found.put) for chunk in chunks]
        for future in futures:
            future.add_done_callback(lambda _: found.put(None))
        for _ in futures:
            while (line := found.get()) is not None:
                yield line
        for future in futures:
            future.result()


def _chunk(command: Sequence[str], left: list[int], limit: float, end: float, report: Callable[[Any], None]) -> None:
    """Runs seeds in one process, and in another one after each seed that ended it."""
    while left and time.monotonic() < end:
        with tempfile.TemporaryFile("w+") as errors:
            with subprocess.Popen([*command, *map(str, left)], stdout=subprocess.PIPE, stderr=errors, text=True) as process:
                begin = time.monotonic()
                while left and time.monotonic() < end and (line := _line(process, limit)) is not None:
                    if line.startswith(START):
                        report(json.loads(line))
                        left.pop(0)
                        begin = time.monotonic()
                seconds = time.monotonic() - begin
                process.kill()
            if left and time.monotonic() < end:
                errors.seek(max(0, errors.seek(0, 2) - 1500))
                ended = f"the process ended: {_name(process.returncode)}"
                what = f"no result within {limit:.0f} s" if seconds >= limit else ended
                line = {"seed": left.pop(0), "status": "crashed", "engine": "", "how": "", "what": what}
                report(line | {"text": errors.read(), "seconds": round(seconds, 2)})


def _line(process: subprocess.Popen[str], limit: float) -> str | None:
    """The next line that a process prints; `None` if it ends, or prints none in time and is killed."""
    timer = threading.Timer(limit, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        return process.stdout.readline() or None
    finally:
        timer.cancel()


def _name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"status {code}"
