"""`EpochPlans`: the plans of this epoch and the next ones, each made once, whichever thread asks first."""

import os
import threading
from collections.abc import Callable

from cavs._feed.delivery import Epoch


class EpochPlans:
    """Plans by the number of their epoch. Planning may add shapes, so one thread at a time plans."""

    def __init__(self) -> None:
        self._plans: dict[int, Epoch] = {}
        self._lock, self._made_in = threading.Lock(), os.getpid()

    def of(self, number: int, now: int, make: Callable[[], Epoch]) -> Epoch:
        """Returns the plan of an epoch, which `make` creates if there is none. Epochs before `now` are forgotten."""
        if self._made_in != os.getpid():  # a fork does not have the thread that may have held the lock
            self._lock, self._made_in = threading.Lock(), os.getpid()
        with self._lock:
            plan = self._plans.get(number)
            if plan is None:
                plan = make()
                self._plans = {n: p for n, p in self._plans.items() if n >= now} | {number: plan}
            return plan

    def latest(self, number: int) -> Epoch | None:
        """Returns the plan of an epoch; if there is none, that of the epoch before, or `None`."""
        plans = self._plans
        return plans.get(number, next(iter(plans.values()), None))
