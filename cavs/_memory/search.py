"""The ways to compute a batch within a memory budget: the fastest one that is predicted to fit, and the smallest one."""

import dataclasses
import math
from typing import NamedTuple, Protocol

import jax
import numpy as np

from cavs._engines.choose import EngineError
from cavs._graphs.graphs import Graphs
from cavs._memory.buffers import Peak
from cavs._schedule.tasks import LAZY_WINDOW

# The time of a task that does not depend on its size, in rows that could be computed meanwhile: an estimate.
_ROWS_PER_TASK = {"cpu": 16, "gpu": 256}
_AGAIN = {"fast": 1.0, "least": 1.1, "window": 1.35}  # work of a keeping, relative to the fastest: an estimate
WINDOWS = {"fast": LAZY_WINDOW, "least": LAZY_WINDOW, "window": 256}  # rows, as in `cavs.schedule(window=)`
_SHARE = {"fast": 1.0, "least": 0.6, "window": 0.3}  # no keeping needs less of the memory of the fastest
_LESS = 0.98  # a keeping is worth its time if it needs at most this fraction of the memory of the fastest one
_PADDING = 0.8  # parts may have less padding than a larger part
# A choice is traced if this fraction of its estimated peak (`_bound`) fits the budget: the first one, or after one that did not
# fit, the second one. A trace takes long, so later choices must be likelier to fit.
_SURE = (0.85, 0.95)
KEEPINGS = tuple(_AGAIN)
SEGMENTS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
SMALLEST_SEGMENT = 64  # vertices: with fewer, the loop over segments takes more time than it saves memory
LEVELS_OF_SEGMENT = 4
# The time of segments: the forward runs twice, and on a GPU on engine `scan` rather than a faster one (chains of 5,000 steps).
_IN_SEGMENTS = {"cpu": 1.7, "gpu": 20}


class Choice(NamedTuple):
    """One way to compute a batch.

    Attributes:
        parts: the number of parts.
        keep: what the backward of F keeps of the forward.
        segments: the number of segments of levels in which a part runs.
    """

    parts: int
    keep: str
    segments: int = 1


FASTEST = Choice(1, "fast")


class Candidate(NamedTuple):
    """A choice, its predicted time in rows, and its predicted peak of memory."""

    choice: Choice
    time: float
    peak: Peak


class Work(Protocol):
    """A computation that must fit into a budget."""

    def size(self, choice: Choice) -> tuple[int, int]:
        """The rows and the tasks of all parts of a batch. Schedules it, and traces nothing."""
        ...

    def peak(self, choice: Choice) -> Peak:
        """The predicted peak of memory."""
        ...


@dataclasses.dataclass(eq=False)
class Search:
    """The candidates for one batch, each predicted when it is first asked for."""

    work: Work
    choices: list[Choice]
    found: dict[Choice, Candidate] = dataclasses.field(default_factory=dict)
    times: dict[Choice, float] = dataclasses.field(default_factory=dict)

    def time(self, choice: Choice) -> float:
        """The predicted time, in rows."""
        if choice not in self.times:
            rows, tasks = self.work.size(choice)
            backend = jax.default_backend()
            latency = _ROWS_PER_TASK.get(backend, _ROWS_PER_TASK["gpu"])
            again = 1 if choice.segments == 1 else _IN_SEGMENTS.get(backend, _IN_SEGMENTS["gpu"])
            self.times[choice] = again * (rows * _AGAIN[choice.keep] + tasks * latency)
        return self.times[choice]

    def slowdown(self, chosen: Candidate) -> float:
        """The predicted time of a candidate, relative to the fastest."""
        return chosen.time / min(map(self.time, self.choices))

    def candidate(self, choice: Choice) -> Candidate:
        """The prediction for one choice.

        Raises:
            EngineError: the engine that the loss asks for cannot run it.
        """
        if choice not in self.found:
            self.found[choice] = Candidate(choice, self.time(choice), self.work.peak(choice))
        return self.found[choice]

    def _tried(self, choice: Choice) -> Candidate | None:
        """The prediction for one choice. `None`, and it is removed, if the engine that the loss asks for cannot run it.

        Raises:
            EngineError: it was the last choice.
        """
        try:
            return self.candidate(choice)
        except EngineError:
            self.choices.remove(choice)
            if not self.choices:
                raise
            return None

    def chosen(self, budget: int | str | None) -> Candidate | None:
        """The candidate for a budget as `bytes_of` returns it; `None` if nothing fits."""
        if budget == "min":
            return self.smallest()
        return self.fastest(math.inf if budget is None else float(budget))

    def fastest(self, budget: float) -> Candidate | None:
        """The fastest candidate whose predicted peak is at most `budget`; `None` if there is none."""
        if (first := self._tried(min(self.choices, key=self.time))) is None:
            return self.fastest(budget)
        if first.peak.bytes <= budget:
            return first
        self._tried(max(self.choices, key=lambda choice: (choice.parts, -self.time(choice))))
        known, misses = set(self.found), 0
        for choice in sorted(self.choices, key=self.time):
            sure = _SURE[min(misses, len(_SURE) - 1)]
            if choice in self.found or sure * self._bound(choice) <= budget:
                if (found := self._tried(choice)) and found.peak.bytes <= budget and self._saves(found):
                    return found
                misses += choice not in known
        return least if (least := self.smallest()).peak.bytes <= budget else None

    def smallest(self) -> Candidate:
        """The candidate with the smallest predicted peak."""
        self._tried(self.choices[0])  # tiny batches need the least as they are
        for most in sorted({choice.parts for choice in self.choices}, reverse=True):
            if any([self._tried(choice) for choice in list(self.choices) if choice.parts == most]):
                break
        return min(self.found.values(), key=lambda c: (c.peak.bytes, c.time))

    def frontier(self) -> list[tuple[int, float, Choice]]:
        """(predicted peak in bytes, relative time, choice) of the best candidates, the fastest first."""
        best: list[tuple[int, float, Choice]] = []
        for choice in sorted(self.choices, key=self.time):
            found = self._tried(choice)
            if found and (not best or found.peak.bytes < best[-1][0]) and self._saves(found):
                best.append((found.peak.bytes, self.slowdown(found), choice))
        return best

    def _saves(self, found: Candidate) -> bool:
        """Whether a keeping saves memory: on engine `persistent`, cut cotangents may lie where kept values would."""
        fast = self.found.get(found.choice._replace(keep="fast"), found)  # one that has not been tried was likely not to fit
        return fast is found or found.peak.bytes <= _LESS * fast.peak.bytes

    def _bound(self, choice: Choice) -> float:
        """About the least that a candidate can need, by those that are known.

        Memory is a part that does not depend on the parts (gradients, for instance), and another that is divided by their
        number: a line over 1 / parts. A keeping saves a share of that; the share is smaller if parts are smaller.
        """
        fast = {c.choice.parts: c.peak.bytes for c in self.found.values() if c.choice[1:] == ("fast", 1)}
        if len(fast) < 2 or choice.segments > 1:
            return max((self._half(choice, known) for known in self.found.values()), default=0.0)
        shares = [
            c.peak.bytes / _between(fast, c.choice.parts)
            for c in self.found.values()
            if c.choice[1:] == choice[1:] and c.choice.parts <= choice.parts
        ]
        share = max(shares, default=self._share(choice, fast))
        return share * _between(fast, choice.parts)

    def _share(self, choice: Choice, fast: dict[int, int]) -> float:
        """A guess for a keeping that has no prediction yet. If another one saves little, so does this one."""
        others = [
            c.peak.bytes / _between(fast, c.choice.parts) / _SHARE[c.choice.keep]
            for c in self.found.values()
            if c.choice.segments == 1 and 1 < c.choice.parts <= choice.parts
        ]
        return min(1.0, max([1.0, *others]) * _SHARE[choice.keep])

    def _half(self, choice: Choice, known: Candidate) -> float:
        """Half of a batch needs half of the memory, or more."""
        share = min(1.0, _SHARE[choice.keep] / _SHARE[known.choice.keep])
        known_size, size = (c.parts * c.segments for c in (known.choice, choice))
        return _PADDING * share * known.peak.bytes * min(1.0, known_size / size)


def _between(known: dict[int, int], parts: int) -> float:
    """Reads a line over 1 / parts through two known peaks: those next to `parts`."""
    below, above = (
        max((n for n in known if n <= parts), default=min(known)),
        min((n for n in known if n >= parts), default=max(known)),
    )
    if below == above:
        return known[below]
    share = (1 / parts - 1 / above) / (1 / below - 1 / above)
    return known[above] + share * (known[below] - known[above])


def choices_for(graphs: int, vertices: int) -> list[Choice]:
    """The choices for a batch. A window saves nothing in parts that have few more rows."""
    return [
        Choice(n, keep)
        for n in numbers_of_parts(graphs)
        for keep in KEEPINGS
        if WINDOWS[keep] == LAZY_WINDOW or n == 1 or vertices > 2 * n * WINDOWS[keep]
    ]


def with_segments(choices: list[Choice], graphs: Graphs) -> list[Choice]:
    """Adds the choices in which large graphs of many levels run in segments."""
    vertices, levels = int(np.diff(graphs.vertex_offsets).max(initial=0)), int(graphs.height.max(initial=0))
    counts = [n for n in SEGMENTS if SMALLEST_SEGMENT * n <= vertices and LEVELS_OF_SEGMENT * n <= levels]
    return choices + [c._replace(segments=n) for c in choices if c.keep == "fast" for n in counts]


def in_segments(choice: Choice) -> str:
    """The segments of a choice as text, if there are several."""
    return f" in {choice.segments} segments of levels" if choice.segments > 1 else ""


def numbers_of_parts(count: int) -> list[int]:
    """The numbers of parts to try for this many graphs: the divisors nearest the powers of two."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    return sorted({min(divisors, key=lambda n, p=p: abs(math.log2(n) - p)) for p in range(count.bit_length() + 1)})
