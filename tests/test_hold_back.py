"""What holds values back changes none of them, and results that are computed once belong to one object."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cavs._jaxpr.hold_back import hold_back, late_zero
from cavs._jaxpr.memo import memoized, results

NUMBERS = {
    "floats": jnp.array([0.0, -0.0, 1.5, -2.0, jnp.nan, jnp.inf, -jnp.inf], jnp.float32),
    "halves": jnp.array([0.0, -0.0, jnp.nan, -jnp.inf], jnp.bfloat16),
    "complex": jnp.array([0, complex(-0.0, jnp.inf), complex(jnp.inf, -1), complex(jnp.nan, jnp.nan)], jnp.complex64),
    "ints": jnp.array([0, 1, -1, 2**31 - 1, -(2**31)], jnp.int32),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_late_zero_is_zero(name: str) -> None:
    zero = jax.jit(late_zero)
    for x in NUMBERS[name]:
        assert zero([x]).dtype == jnp.int32 and zero([x]) == 0 and zero([x, jnp.int32(7)]) == 0


@pytest.mark.parametrize("until", NUMBERS)
@pytest.mark.parametrize("dtype", [jnp.integer, jnp.inexact])
def test_values_that_are_held_back_keep_their_bits(until: str, dtype: type) -> None:
    values = [*NUMBERS.values(), jnp.array([True, False])]
    got = jax.jit(lambda values, until: hold_back(values, [until[:0], until], dtype))(values, NUMBERS[until])
    for a, b in zip(got, values, strict=True):
        assert a.dtype == b.dtype
        finite = ~np.isnan(np.asarray(b, np.complex128))
        assert np.asarray(a)[finite].tobytes() == np.asarray(b)[finite].tobytes()
        np.testing.assert_array_equal(np.isnan(np.asarray(a, np.complex128)), ~finite)


@pytest.mark.parametrize(("dtype", "held"), [(jnp.integer, {"ints"}), (jnp.inexact, {"floats", "halves", "complex"})])
def test_only_values_of_the_dtype_wait(dtype: type, held: set[str]) -> None:
    jaxpr = jax.make_jaxpr(lambda values, until: hold_back(values, [until], dtype))([*NUMBERS.values()], jnp.ones(3)).jaxpr
    waiting = {name for name, v, x in zip(NUMBERS, jaxpr.invars, jaxpr.outvars, strict=False) if v is not x}
    assert waiting == held


def test_results_that_are_computed_once_belong_to_an_object_and_not_to_its_copies() -> None:
    calls = []

    @dataclasses.dataclass(frozen=True, eq=False)
    class Plan:
        size: int

        @memoized
        def times(self, factor: int, more: int = 0) -> int:
            calls.append(factor)
            return self.size * factor + more

    one = Plan(2)
    assert [one.times(3), one.times(3), one.times(3, more=1), one.times(4)] == [6, 6, 7, 8]
    assert calls == [3, 3, 4] and results(Plan.times, one) == [6, 7, 8]
    other = dataclasses.replace(one, size=5)
    assert not results(Plan.times, other) and other.times(3) == 15 and one.times(3) == 6
