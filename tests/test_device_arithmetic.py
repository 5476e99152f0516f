"""Where the device's own code puts weights, and finds them and the rows they are multiplied with: its arithmetic, on numbers.

`_mosaic.weights`, `_mosaic.operands` and `_mosaic.reads` emit MLIR; here what they emit is given Python's numbers instead.
"""

import itertools
import re
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cavs import vertex_programs as vp
from cavs._engines.persistent import lower

if jax.__version_info__ < (0, 11):
    pytest.skip("the kernels need jax 0.11", allow_module_level=True)

from cavs._run.plans import plan_of
from cavs.kernels._layout.config import LaunchConfig
from cavs.kernels._layout.layout import layout_of
from cavs.kernels._mosaic import held, operands, reads, weights as _mosaic_weights
from cavs.kernels.precision import PRECISIONS
from tests.device_numbers import WORD, bits, compute_numbers
from tests.packing import pack_weights
from tests.slow import few


def to_tf32(x: Any) -> int:
    """To nearest, ties away from zero."""
    return (bits(x) + 0x1000) & 0xFFFFE000


class Memory:
    """Shared memory, by address; and the instructions that the emitters write in PTX."""

    def __init__(self) -> None:
        self.words: dict[int, int] = {}

    def ptx(self, text: str, results: Any, *args: Any) -> Any:
        if text.startswith("cvt.rna.tf32"):
            return to_tf32(args[0])
        if text.startswith(("cvt.rn.bf16x2", "cvt.rn.f16x2")):
            half = PRECISIONS["bf16" if "bf16" in text else "f16"].dtype
            high, low = (int(np.asarray(x, np.float32).astype(half).view(np.uint16)) for x in args)
            return high << 16 | low
        offset = int(re.findall(r"\[\$\d+\+(\d+)\]", text)[0])
        assert text.startswith(("ld.shared", "ld.global.nc"))
        return [self.words[args[0] + offset + 4 * n] for n in range(len(results))]


def emit_numbers(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()

    def for_each(first: int, count: int, threads: int, item: Any) -> None:
        for n in range(first, count, threads):
            item(n)

    def store_words(place: int, words: Any, offset: int = 0) -> None:
        memory.words.update({place + offset + 4 * n: bits(word) & WORD for n, word in enumerate(words)})

    arith = SimpleNamespace(cmpf=lambda predicate, a, b: np.isnan(a), CmpFPredicate=SimpleNamespace(UNO=None))
    functions = {"arith": arith, "load_element": lambda ref, *at: ref[at], "to_tf32": lambda values, precision: values}
    functions |= {"ptx": memory.ptx, "for_each": for_each, "store_words": store_words}
    compute_numbers(monkeypatch, (_mosaic_weights, held, operands, reads), **functions)
    return memory


# Units of a CTA, CTAs that divide K, whether three weights lie in two words, precision of products.
LAYOUTS = [(8, 1, False, "tf32"), (16, 1, False, "bf16"), (16, 1, False, "fp32"), (16, 1, True, "tf32")]
LAYOUTS += [(16, 1, False, "f16"), (8, 1, False, "f16")]
LAYOUTS += [(8, 2, False, "tf32"), (16, 2, False, "fp32"), (16, 2, True, "tf32"), (32, 2, True, "tf32")]


def level_of(forward: bool) -> Any:
    """The program of a level of a Tree-LSTM."""
    program = vp.BinaryTreeLSTM(128, 16)
    params = jax.eval_shape(program.init, jax.random.key(0))
    plan = plan_of(program.vertex_function(), params, jax.ShapeDtypeStruct((16,), jnp.float32))
    return lower.recurrence_of(plan, None, forward).program


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(("hb", "split", "tight", "precision"), LAYOUTS)
@pytest.mark.parametrize("forward", few([True, False], 1))
def test_products_find_the_weights_that_were_copied(
    monkeypatch: pytest.MonkeyPatch, forward: bool, hb: int, split: int, tight: bool, precision: str, resident: bool
) -> None:
    """For each CTA, warp, tile, step of K and some lanes: the registers of `mma.sync`'s left operand."""
    level = level_of(forward)
    config = LaunchConfig(hb, 1, 8, 1, precision, resident, tight, split=split)
    layout, memory = layout_of(level, config), emit_numbers(monkeypatch)
    rng, chunk = np.random.default_rng(0), PRECISIONS[precision].chunk
    weights = {p.offset: rng.normal(size=p.variable.aval.shape).astype(np.float32) for p in layout.packed}
    pairs = [(s, w) for s in layout.specs() for w in s.weights]
    assert len(pairs) >= 2
    for cta in (0, 3):
        memory.words.clear()
        packed = pack_weights(layout.packed, [weights[p.offset] for p in layout.packed], level.unit, hb, precision)
        assert packed.shape == (level.unit // hb, layout.words)
        memory.words |= {4 * n: word for n, word in enumerate(np.asarray(packed[cta]).view(np.uint32).tolist())}
        assert max(memory.words) < 4 * layout.words
        for spec, weight in pairs:
            part = next(p for p in layout.packed if p.offset == weight.offset)
            w = weights[weight.offset] if part.axis == 0 else weights[weight.offset].T
            per_warp = spec.chunks // spec.splits
            for warp, lane in itertools.product(range(spec.splits), (6, 29)):
                left: Any = operands.WeightReader(*cast(Any, (0, warp, lane)))
                if resident and not tight and hb % 16 == 0 and PRECISIONS[precision].terms == 1:  # then registers may hold them
                    read = held.read_all(layout.specs(), cast(Any, 0), cast(Any, 128 + 32 * warp + lane))
                    left = held.HeldReader(cast(Any, SimpleNamespace(registers=np.array(read, object))), layout.specs())
                for m, c, step in itertools.product(range(weight.tiles), range(per_warp), range(2)):
                    got = left.read(spec, weight, m, c, step)
                    k = ((cta % split * spec.splits + warp) * per_warp + c) * chunk + lane % 4 * chunk // 4 + step * chunk // 8
                    for n, word in enumerate(got):
                        pair, half = divmod(n, 2)
                        column = 16 * m + 8 * half + lane // 4
                        if column >= part.width:
                            continue
                        block, inside = divmod(column, hb * split)
                        at = block * level.unit + cta // split * split * hb + inside
                        want = w[k + pair * (chunk // 16) : k + (pair + 1) * (chunk // 16), at]
                        if PRECISIONS[precision].dtype is not None:
                            assert word == memory.ptx(f"cvt.rn.{precision}x2.f32", None, want[1], want[0])
                        elif precision == "tf32":
                            tie = bits(want[0]) & 0x3FFF == 0x1000  # what XLA packs rounds to even
                            assert (word ^ to_tf32(want[0]) - 0x2000 * tie) & 0xFFFFE000 == 0
                        else:
                            assert word == bits(want[0])


@pytest.mark.parametrize(("hb", "split", "tight", "precision"), LAYOUTS)
@pytest.mark.parametrize("power", [1.0, 2.0**-20])
def test_a_kernel_packs_the_words_of_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, hb: int, split: int, tight: bool, precision: str, power: float
) -> None:
    """Of weights that tf32 holds, which the two would round to nearest in other ways, times a power of two."""
    level = level_of(forward=False)
    config = LaunchConfig(hb, 1, 8, 1, precision, False, tight, split=split)
    layout, memory, rng = layout_of(level, config), emit_numbers(monkeypatch), np.random.default_rng(0)
    weights = [rng.integers(-1000, 1000, p.variable.aval.shape).astype(np.float32) for p in layout.packed]
    want = np.asarray(pack_weights(layout.packed, [jnp.asarray(w * power) for w in weights], level.unit, hb, precision))
    words, columns, packing = layout.words, hb * split, cast(Any, _mosaic_weights._Packing)
    for cta in (0, 3):
        for part, w in zip(layout.packed, weights, strict=True):
            at = (np.float32(power), cta // split * columns, cta % split * part.k, level.unit, columns, precision)
            packing(part, w, *at, 4 * words * cta, 0, 1).run()
        got = np.array([memory.words[4 * (words * cta + n)] for n in range(words)], np.uint32)
        np.testing.assert_array_equal(got, want[cta].view(np.uint32))


@pytest.mark.parametrize(
    "program", [vp.TreeFC(128), vp.BinaryTreeLSTM(128, 128), vp.LSTM(128, 128)], ids=lambda p: type(p).__name__
)
@pytest.mark.parametrize(
    ("split", "precision", "dtype"),
    [(1, "tf32", "f32"), (2, "tf32", "f32"), (1, "bf16", "f32"), (1, "bf16", "bf16"), (1, "f16", "f16"), (2, "f16", "f16")],
)
def test_products_read_the_rows_of_their_part_of_k(
    monkeypatch: pytest.MonkeyPatch, program: Any, split: int, precision: str, dtype: str
) -> None:
    """Of rows side by side those that a warp reads, and from the number on whose weights it holds; see the test above."""
    params = jax.eval_shape(program.init, jax.random.key(0))
    plan = plan_of(program.vertex_function(), params, jax.ShapeDtypeStruct((128,), jnp.float32))
    level = lower.recurrence_of(plan, None, True).program
    layout = layout_of(level, LaunchConfig(16, 1, 8, 1, precision, True, split=split))
    emit_numbers(monkeypatch)
    size, row, width = 4 if dtype == "f32" else 2, 5, 1024
    specs = layout.specs()
    assert specs
    for spec, peer, warp, quad in itertools.product(specs, range(split), range(4), range(4)):
        if warp >= spec.splits:
            continue
        kind = SimpleNamespace(element_type=dtype, shape=(64, width))
        refs = [SimpleNamespace(type=kind, begin=1 << 20 + n) for n in range(len(spec.sources))]
        reader: Any = object.__new__(reads.Reader)
        reader.specs, reader.sources = [spec], [(refs, [row] * len(refs) * (spec.rows // 8))]
        reader.warp, reader.quad, reader.peer, reader.f32, reader.i32 = warp, quad, peer, "f32", "i32"
        whole = spec.chunk * spec.chunks * split // spec.joined  # of one of the rows that are side by side
        first = (peer * spec.splits + warp) * (spec.chunks // spec.splits) * spec.chunk
        for n, pointer in enumerate(reader.pointers(0, 1)):
            source = n * spec.joined + first // whole
            at = row * width + spec.sources[source].column + first % whole + quad * spec.chunk // 4
            assert pointer.start == refs[source].begin + at * size
            assert pointer.quarter == spec.chunk * size // 4
            assert pointer.kind == ("f32" if dtype == "f32" else "i32")
