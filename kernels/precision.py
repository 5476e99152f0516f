"""The precisions of products, as a table: what a launch stores, which instruction multiplies, and who asks for it.

To add a precision, add it to `PRECISIONS`. The choice of layouts, the packing of weights, both backends of the kernels and
engine `persistent` read the table; an instruction that loads or rounds its operands in a new way also needs a line in
`_mosaic/operands.py`.
"""

import dataclasses
import math
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import PrecisionLike


@dataclasses.dataclass(frozen=True)
class Precision:
    """A precision of float32 products.

    Attributes:
        name: Its name in `LaunchConfig` and in the records of `kernels/tuned`.
        kind: The type of the operands of `mma.sync`.
        terms: How many products of that type make one product.
        asked: JAX's precisions and algorithms of `lax.dot_general` that ask for it contain one of these.
        instead_of: The precision that it replaces if the operands of a product are at most `largest`.
        largest: The largest operand. Times `factor` it is half of the range of `dtype`, so that a sum of two rows fits.
        dtype: The dtype of 16 bits in which products read rows and weights. `None` if they read float32.
        factor: What a row is multiplied by in `dtype`.
        upper_half: Whether an element of `dtype` is the upper half of a float32.
        rounded: Whether packed weights are rounded to nearest, because the instruction would truncate them.
        tight: Whether three packed weights can lie in two words (`_layout.pack`).
        wide: Whether wide levels can have a launch of their own (`_mosaic.wide`).
        tuned_as: The precision whose measured layouts it uses, if not its own.
        text: What `cavs.explain` says, if not the name.
    """

    name: str
    kind: str
    terms: int = 1
    asked: tuple[str, ...] = ()
    instead_of: str = ""
    largest: float = math.inf
    dtype: np.dtype | None = None
    factor: float = 1.0
    upper_half: bool = False
    rounded: bool = False
    tight: bool = False
    wide: bool = False
    tuned_as: str = ""
    text: str = ""

    @property
    def chunk(self) -> int:
        """The elements of K that a product reads at a time: 64 bytes of float32, or of 16 bits."""
        return 16 if self.dtype is None else 32

    @property
    def shape(self) -> str:
        """The shape of the `mma.sync` instruction."""
        return "m16n8k8" if self.dtype is None else "m16n8k16"


# The most exact one that is asked for by a product of F holds for all; without any, "tf32", as JAX computes on a GPU.
_ALL = (
    Precision("fp32", "tf32", terms=3, asked=("HIGHEST", "F32_F32_F32")),  # 3xtf32
    Precision("bf16", "bf16", asked=("BF16_BF16",), dtype=np.dtype(jnp.bfloat16), upper_half=True),
    Precision("tf32", "tf32", rounded=True, tight=True, wide=True),
    # As exact as tf32: both have eleven significant bits. Reads half the bytes from L2, and multiplies in half as many steps.
    Precision(
        "f16",
        "f16",
        instead_of="tf32",
        largest=128.0,
        dtype=np.dtype(np.float16),
        factor=256.0,  # float16 keeps its eleven bits from 2^-14 on
        tuned_as="bf16",
        text="float16 (their operands are bounded, and it has as many bits as tf32)",
    ),
)
PRECISIONS = {precision.name: precision for precision in _ALL}


def asked_precision(precisions: Iterable[PrecisionLike]) -> Precision:
    """Returns the precision for products of these `precision` arguments of `lax.dot_general`."""
    names = [str(precision) for precision in precisions]
    matching = (p for p in _ALL if any(mark in name for mark in p.asked for name in names))
    return next(matching, PRECISIONS["tf32"])


def replacement(precision: Precision) -> Precision | None:
    """Returns the precision that is as exact and faster if operands are bounded, or `None`."""
    return next((p for p in _ALL if p.instead_of == precision.name), None)


def of_tf32_bits(precision: PrecisionLike) -> bool:
    """Returns whether `precision` asks a product in float32 for at most the bits of tf32. A named algorithm is respected."""
    asked = precision if isinstance(precision, tuple) else (precision,)
    return all(p in (None, lax.Precision.DEFAULT, lax.Precision.HIGH) for p in asked)


def stored_as(dtype: np.dtype) -> Precision | None:
    """Returns the precision whose rows have this dtype of 16 bits, or `None`."""
    return next((p for p in _ALL if p.dtype == dtype and p.dtype is not None), None)
