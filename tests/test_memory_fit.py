"""A plan that fits when it is compiled: `cavs._memory.fit`, with plans whose compiled bytes are known."""

from collections.abc import Callable

import numpy as np
import pytest

from cavs._memory.bytes import BudgetError
from cavs._memory.fit import Verified, smaller_plan

PEAKS = [1000, 700, 500, 350, 250, 180, 120, 80, 50, 40, 30]  # predicted bytes, the fastest plan first


def fitted(compiled: Callable[[int], float], first: int, budget: int) -> tuple[int, list[int]]:
    """The predicted peak of the plan that is found, and those of the plans that were compiled."""
    tried = []

    def verify(peak: int) -> Verified:
        tried.append(peak)
        return Verified(peak, int(compiled(peak)), None)

    def plan(most: int | None) -> tuple[int, int] | None:
        found = min(PEAKS) if most is None else next((p for p in PEAKS if p <= most), None)
        return None if found is None else (found, found)

    return smaller_plan(first, Verified(first, int(compiled(first)), None), budget, verify, plan), tried


def test_the_next_plan_is_chosen_by_the_error_of_the_prediction():
    assert fitted(lambda peak: 1.2 * peak, 500, 500) == (350, [350])


def test_one_large_error_does_not_lead_to_the_smallest_plan():
    assert fitted(lambda peak: peak + (300 if peak == 500 else 0), 500, 520) == (350, [350])


def test_a_workspace_of_most_plans():
    """Between 32 and 200 bytes of budget, plans of more than 60 bytes have a workspace of 200."""
    found, tried = fitted(lambda peak: peak + 200 * (peak > 60), 180, 190)
    assert found == 50 and tried == [120, 80, 30, 40, 50]


def test_the_smallest_plan_does_not_fit():
    with pytest.raises(BudgetError, match="got 40 B; for the smallest plan, XLA needs 60 B, where 30 B were predicted"):
        fitted(lambda peak: 2 * peak, 80, 40)
    with pytest.raises(BudgetError, match="got 40 B; for the smallest plan, XLA needs 60 B, where 30 B were predicted"):
        fitted(lambda peak: 2 * peak, 30, 40)


def test_what_is_found_fits_if_the_smallest_plan_does():
    rng = np.random.default_rng(0)
    for _ in range(300):
        used = dict(zip(PEAKS, (rng.uniform(0.5, 3, len(PEAKS)) * PEAKS).astype(int), strict=True))
        budget, first = int(rng.uniform(used[30], 1000)), int(rng.choice(PEAKS))
        if used[first] > budget:
            found, tried = fitted(used.__getitem__, first, budget)
            assert used[found] <= budget and len(tried) <= 5
