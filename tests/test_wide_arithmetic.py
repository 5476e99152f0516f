"""Runs the emitted arithmetic of a wide product on Python numbers (`_mosaic.wide`, `pack_ring`), without a GPU."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cavs import vertex_programs as vp
from cavs._engines.persistent import lower

if jax.__version_info__ < (0, 11):
    pytest.skip("the kernels need jax 0.11", allow_module_level=True)

from cavs._run.plans import plan_of
from cavs.kernels._layout.config import STAGES, LaunchConfig
from cavs.kernels._layout.layout import layout_of
from cavs.kernels._layout.pack import pack_ring
from cavs.kernels._mosaic import ring as _mosaic_ring, wide as _mosaic_wide
from tests.device_numbers import compute_numbers

REGION = 1 << 28  # bytes between the arrays of the memory below
HB, CTA, GROUP, WARP, ROW, LAST, BASE, ROWS = 32, 5, 6, 1, 3, 40, 2, 64


class Memory:
    """Global memory, some arrays of 32-bit words, and the stages in shared memory."""

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays, self.stages = [np.asarray(a).reshape(-1) for a in arrays], np.zeros(1 << 16, np.float32)

    def words(self, address: int, count: int) -> Any:
        array, at = divmod(address, REGION)
        assert at % 16 == 0 or count == 1
        return self.arrays[array][at // 4 : at // 4 + count]

    def ptx(self, text: str, results: Any, *args: Any) -> Any:
        offsets = [int(n or 0) for n in re.findall(r"\[\$\d+(?:\+(\d+))?\]", text)]
        if text.startswith("cp.async.bulk"):
            _, source, size, _ = args
            self.stages[offsets[0] // 4 :][: size // 4] = self.words(source, size // 4)
        elif text.startswith("ld."):
            got = self.words(args[0] + offsets[0], 1 if isinstance(results, str) else len(results)).tolist()
            return got[0] if isinstance(results, str) else got
        else:
            assert text.startswith("mbarrier.arrive.expect_tx")
        return None

    def column(self, at: int) -> Any:
        """8 numbers of K from byte `at`, as a matrix descriptor with a 128-byte swizzle finds them."""
        row, inside = divmod(at, 128)
        pieces = [inside // 16 + n ^ row % 8 for n in range(2)]
        return np.concatenate([self.stages[32 * row + 4 * n : 32 * row + 4 * n + 4] for n in pieces])


def emit_numbers(monkeypatch: pytest.MonkeyPatch, memory: Memory, thread: int) -> None:
    """Runs what `_mosaic.wide` emits for one thread."""
    functions = {"ptx": memory.ptx, "thread_index": lambda: thread, "bitcast": lambda kind, x: x}
    compute_numbers(monkeypatch, (_mosaic_wide, _mosaic_ring), **functions)


def ref(region: int, shape: tuple[int, ...]) -> Any:
    return SimpleNamespace(type=SimpleNamespace(shape=shape), begin=region * REGION)


def multiplied(wide: Any, n: int, pointers: list[Any], memory: Memory, quad: int) -> dict[tuple[int, int], Any]:
    """What one thread's numbers add to its two rows, by weight and operand of the n-th product."""
    spec = wide.specs[n]
    found = {(w, o): np.zeros((2, weight.width)) for w, weight in enumerate(spec.weights) for o in weight.operands}
    for chunk in range(spec.chunks):
        stage = chunk % STAGES
        wide.ring.fill(wide.ring.starts[n] + chunk, stage)
        read = wide._read(spec, pointers, chunk)
        for (w, o), sums in found.items():
            for step, (a, b, c, d) in enumerate(wide._operand(spec.operands[o], read)):
                at = wide._at(stage, spec.weights[w], step)
                k = np.stack([memory.column(at + 128 * column) for column in range(sums.shape[1])])
                sums += np.outer([a, b], k[:, quad]) + np.outer([c, d], k[:, quad + 4])
    return found


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("program", [vp.TreeFC(256), vp.BinaryTreeLSTM(256, 16)], ids=lambda p: type(p).__name__)
def test_wide_products_multiply_what_they_read(monkeypatch: pytest.MonkeyPatch, program: Any, forward: bool) -> None:
    """Two rows, as their four threads read them, times all columns of a CTA, as the ring brings them: all of K, once."""
    params = jax.eval_shape(program.init, jax.random.key(0))
    plan = plan_of(program.vertex_function(), params, jax.ShapeDtypeStruct((getattr(program, "inputs", 256),), jnp.float32))
    level = lower.recurrence_of(plan, None, forward).program
    layout = layout_of(level, LaunchConfig(HB, 1, ROWS, 2, "tf32", False, wide=True))
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=p.variable.aval.shape).astype(np.float32) for p in layout.packed]
    ring = pack_ring(layout.packed, [jnp.asarray(w) for w in weights], level.unit, HB, "fp32")
    phases = [phase.specs for phase in layout.phases if phase.specs]
    assert phases
    for specs in phases:
        shape = ROWS, max(s.column + spec.chunk * spec.chunks for spec in specs for s in spec.sources)
        count = sum(len(spec.sources) for spec in specs)
        sources = [rng.normal(size=shape).astype(np.float32) for _ in range(count)]
        indices = [rng.integers(0, ROWS - BASE, ROWS) for _ in range(count)]
        memory = Memory([ring, *indices, *sources])
        # Every second source is read at the tile's own rows.
        given = [(ref(1 + count + n, shape), ref(1 + n, (ROWS,)) if n % 2 else None, BASE) for n in range(count)]
        found: list[Any] = [None] * len(specs)
        for quad in range(4):
            emit_numbers(monkeypatch, memory, 128 + 32 * WARP + 4 * GROUP + quad)
            shared = ref(0, ())
            wide = _mosaic_wide._Wide(specs, given, ref(0, ring.shape), shared, shared, ROW, LAST, CTA)
            pointers = iter(wide.pointers)
            for n, spec in enumerate(specs):
                more = multiplied(wide, n, [next(pointers) for _ in spec.sources], memory, quad)
                found[n] = {key: x + found[n][key] for key, x in more.items()} if quad else more
        own = np.minimum(ROW + 16 * WARP + GROUP + np.array([0, 8]), LAST)
        rows = iter(x[(index[own] if n % 2 else own) + BASE] for n, (x, index) in enumerate(zip(sources, indices, strict=True)))
        for spec, got in zip(specs, found, strict=True):
            k = spec.chunk * spec.chunks // spec.joined
            parts = [next(rows)[:, source.column : source.column + k] for source in spec.sources]
            x = [np.concatenate(parts[i : i + spec.joined], 1) for i in range(0, len(parts), spec.joined)]
            mine = [(p, w) for p, w in zip(layout.packed, weights, strict=True) if p.offset == spec.ring]
            for (w, o), sums in got.items():
                part, whole = mine[w]
                whole = whole if part.axis == 0 else whole.T
                columns = whole.reshape(len(whole), -1, level.unit)[:, :, CTA * HB : CTA * HB + HB].reshape(len(whole), -1)
                want = sum(x[s] for s in spec.operands[o]) @ columns * (1 + np.log(2) * 2**-11)
                np.testing.assert_allclose(sums, want, rtol=1e-4, atol=1e-4)
