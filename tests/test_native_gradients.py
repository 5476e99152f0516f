"""Engine `native`: products over all vertices, against NumPy, for every library that this processor runs."""

import ctypes
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cavs._engines.native import gradients as native_gradients
from cavs._stages.operands import LazyProduct, Operand, split_rows
from cavs.kernels import native_unavailable
from cavs.kernels._cpu import library
from cavs.kernels._cpu.build import VARIANTS

pytestmark = pytest.mark.skipif(bool(native_unavailable()), reason=str(native_unavailable()))
RNG = np.random.default_rng(0)
SIZES = (1, 1, 1, 1), (0, 2, 5, 3), (17, 2, 5, 3), (193, 1, 12, 32), (500, 2, 77, 51), (900, 2, 16, 100), (1600, 2, 410, 9)


def _libraries() -> list[str]:
    folder, flags = Path(library.__file__).parent, library._processor_flags()
    names = {n for variants in VARIANTS.values() for n in variants if library._FLAGS[n] <= flags}
    return sorted(n for n in names if (folder / f"levels-{n}.so").exists())


def floats(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def rows_of(x: Operand, count: int) -> np.ndarray:
    source, start = np.concatenate([np.asarray(y, np.float64) for y in x.sources], 1), int(x.start)
    source = source.reshape(x.fold * len(source), -1)
    rows = source if x.index is None else source[np.asarray(x.index)]
    return rows[start : start + count].reshape(count, x.width)


def want(products: list[LazyProduct]) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for p in products:
        y = rows_of(p.right, int(p.rows))
        ct = y.sum(0) if p.left is None else rows_of(p.left, int(p.rows)).T @ y
        found[p.static] = found.get(p.static, 0) + ct
    return found


def gathered(n: int, parts: int, width: int, start: int) -> Operand:
    return Operand(floats(2 * n + 3, width), jnp.asarray(RNG.integers(0, 2 * n + 3, (n + start + 2, parts)), jnp.int32), start)


def some(rows: int, parts: int, width: int, out: int) -> list[LazyProduct]:
    """Products over `rows` rows: of gathered rows, of all rows in the other order, and sums; two of one static value."""
    most = rows + 2
    right = Operand(floats(rows + 7, out), None, 3)
    left = gathered(most, parts, width, 1)
    plain = Operand(floats(most, parts * width), None, 0)
    n = jnp.int32(rows)
    both = [LazyProduct(0, left, right, n), LazyProduct(0, plain, right, n)]
    beside = right._replace(beside=(floats(rows + 7, out), floats(rows + 7, out), floats(rows + 7, out)))
    folded = cut(beside, 2)
    assert beside.width == 2 * folded.width == 4 * out
    others = [
        LazyProduct(3, left, beside, n),
        LazyProduct(4, folded, plain, n),
        LazyProduct(5, None, folded, n),
    ]
    return [both[0], LazyProduct(1, right, left, n), LazyProduct(2, None, right, n), both[1], *others]


@pytest.mark.parametrize("name", _libraries())
@pytest.mark.parametrize(("rows", "parts", "width", "out"), SIZES)
def test_products_are_those_of_numpy(
    name: str, rows: int, parts: int, width: int, out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ctypes.CDLL(str(Path(library.__file__).parent / f"levels-{name}.so"))
    jax.ffi.register_ffi_target(f"{name}_gradients", jax.ffi.pycapsule(own.cavs_gradients), platform="cpu")
    monkeypatch.setattr(native_gradients, "NATIVE_GRADIENTS", f"{name}_gradients")
    products = some(rows, parts, width, out)
    got = native_gradients.gradients(products)
    for i, ct in want(products).items():
        np.testing.assert_allclose(got[i], ct, rtol=0, atol=1e-5 * max(1, np.abs(ct).max()) + 1e-6 * rows)


def cut(x: Operand, each: int) -> Operand:
    found = split_rows(x, each)
    assert found is not None
    return found


def test_rows_are_split_in_rows() -> None:
    plain, pair, wide = Operand(floats(9, 2, 6), None, 2), gathered(8, 2, 6, 1), gathered(8, 1, 12, 1)
    for x in (plain, pair, wide, Operand(floats(9, 12), None, 1)):
        np.testing.assert_array_equal(rows_of(cut(x, 2), 10), rows_of(x, 5).reshape(10, 6))
    np.testing.assert_array_equal(rows_of(cut(pair, 4), 20), rows_of(pair, 5).reshape(20, 3))


def test_a_row_out_of_range_is_an_error() -> None:
    left, right = gathered(9, 2, 5, 0), Operand(floats(9, 3), None, 0)
    assert left.index is not None
    for index in (-1, 10**6):
        wrong = left._replace(index=left.index.at[4, 1].set(index))
        with pytest.raises(Exception, match="a row is out of range"):
            jax.block_until_ready(native_gradients.gradients([LazyProduct(0, wrong, right, jnp.int32(9))]))
        native_gradients.gradients([LazyProduct(0, wrong, right, jnp.int32(4))])  # row 4 is not read
    for start, rows in ((1, 9), (-1, 3), (0, 10)):
        with pytest.raises(Exception, match="rows out of range|few bounds"):
            jax.block_until_ready(
                native_gradients.gradients([LazyProduct(0, left, right._replace(start=start), jnp.int32(rows))])
            )
