"""Memory that is used again: never while somebody can see it."""

import jax
import numpy as np
import pytest

import cavs
from cavs._blocks import Blocks

N = 1 << 16


def place(x: np.ndarray) -> int:
    return x.ctypes.data


def test_a_block_is_lent_again_once_no_array_refers_to_it() -> None:
    blocks = Blocks()
    x = blocks.empty((2, N), np.float32)
    assert x.shape == (2, N) and x.dtype == np.float32 and place(x) % 64 == 0
    first, part = place(x), x[1]
    del x
    assert place(blocks.empty((2, N), np.float32)) != first  # a part is looked at still
    rest = part[N // 2 :]
    del part
    assert place(blocks.empty((2 * N,), np.float32)) != first
    del rest
    assert place(blocks.empty((3, N // 2), np.int32)) == first  # 0.4 of 0.5 MB


def test_what_reads_a_block_without_numpy_holds_it() -> None:
    blocks = Blocks()
    x = blocks.empty((N,), np.uint8)
    first, view = place(x), memoryview(x)[10:20]
    del x
    assert place(blocks.empty((N,), np.uint8)) != first
    del view
    x = blocks.empty((N,), np.float32)
    x[:] = 3
    there = jax.device_put(x)  # on a CPU JAX may read it in place
    del x
    blocks.empty((N,), np.float32)[:] = 7
    assert float(there.sum()) == 3 * N


@pytest.mark.parametrize("shape", [(), (0,), (5, 0), (3,)])
def test_small_arrays_are_ordinary_ones(shape: tuple[int, ...]) -> None:
    assert Blocks().empty(shape, np.int32).shape == shape


def test_stacks_are_their_own_for_as_long_as_they_are_held() -> None:
    held = list(cavs.stacked(({"x": np.full(N, n, np.int32)} for n in range(12)), 4))
    again = list(cavs.stacked(({"x": np.full(N, -n, np.int32)} for n in range(12)), 4))
    for sign, stacks in ((1, held), (-1, again)):
        for i, stack in enumerate(stacks):
            np.testing.assert_array_equal(stack["x"][:, 0], sign * np.arange(4 * i, 4 * i + 4))
