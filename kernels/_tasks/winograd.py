"""Winograd's algorithm F(m x m, 3 x 3) for convolutions with filters of 3 x 3 and stride 1 (Lavin and Gray 2016).

An output tile of m x m pixels is A^T [(G g G^T) * (B^T d B)] A, where d is the input tile of (m + 2) x (m + 2) pixels and g the
filter. The elementwise products of all tiles and channels are (m + 2)^2 matrix products.
"""

import dataclasses
import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias

import numpy as np

Padding: TypeAlias = tuple[tuple[int, int], tuple[int, int]]  # zeros ((above, below), (left, right))

CHUNK = 32  # how many elements a product sums at a time
COLUMNS = 64  # the output channels of a product: more would not leave registers for the small terms' own sums
FILTER_ROWS = 16  # the input channels of a FILTER task

# Where the polynomials of the algorithm are evaluated, besides at infinity. They decide the rounding errors.
POINTS = {2: (0, 1, -1), 4: (0, Fraction(3, 4), Fraction(-3, 4), Fraction(3, 2), Fraction(-3, 2))}


@functools.lru_cache
def matrices(m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns A^T of shape (m, m + 2), G of shape (m + 2, 3) and B^T of shape (m + 2, m + 2) as float64, by Toom and Cook."""
    points = [Fraction(p) for p in POINTS[m]]
    size = m + 2
    a, g = ([[p**i for i in range(width)] for p in points] + [[Fraction(0)] * (width - 1) + [Fraction(1)]] for width in (m, 3))
    # B^T interpolates: its rows are the coefficients of the Lagrange polynomials, which G divides by their values.
    rows = []
    for n, p in enumerate(points):
        poly = _product([q for q in points if q != p])
        scale = Fraction(1)
        for q in points:
            scale *= p - q if q != p else 1
        g[n] = [x / scale for x in g[n]]
        rows.append(poly + [Fraction(0)] * (size - len(poly)))
    rows.append(_product(points))
    return np.array(a, np.float64).T, np.array(g, np.float64), np.array(rows, np.float64)


def _product(roots: list[Fraction]) -> list[Fraction]:
    """The coefficients of the polynomial with these roots, the constant one first."""
    poly = [Fraction(1)]
    for root in roots:
        poly = [b - root * a for a, b in zip(poly + [Fraction(0)], [Fraction(0)] + poly, strict=True)]
    return poly


@dataclasses.dataclass(frozen=True)
class ConvolutionSizes:
    """The sizes of one convolution, in NHWC.

    Attributes:
        images: N.
        height: H, of the input.
        width: W, of the input.
        inputs: C, the channels of the input.
        outputs: K, the channels of the output.
        padding: Zeros ((above, below), (left, right)).
        m: The side of an output tile: 2 or 4.
        rows: The tiles of a group.
        columns: The output channels of a product.
        multiple: What C is rounded up to a multiple of.
    """

    images: int
    height: int
    width: int
    inputs: int
    outputs: int
    padding: Padding
    m: int
    rows: int = 128
    columns: int = COLUMNS
    multiple: int = CHUNK

    @classmethod
    def of(cls, shape: Sequence[int], outputs: int, padding: Padding, m: int, columns: int = COLUMNS) -> "ConvolutionSizes":
        """The sizes for images of a shape (N, H, W, C)."""
        images, height, width, inputs = shape
        return cls(images, height, width, inputs, outputs, padding, m, columns=columns)

    @property
    def positions(self) -> int:
        """The number of matrix products, (m + 2)^2."""
        return (self.m + 2) ** 2

    @property
    def out_height(self) -> int:
        """The height of the output."""
        return self.height + sum(self.padding[0]) - 2

    @property
    def out_width(self) -> int:
        """The width of the output."""
        return self.width + sum(self.padding[1]) - 2

    @property
    def tiles_down(self) -> int:
        """The output tiles below each other in an image."""
        return -(-self.out_height // self.m)

    @property
    def tiles_across(self) -> int:
        """The output tiles beside each other in an image."""
        return -(-self.out_width // self.m)

    @property
    def tiles(self) -> int:
        """All output tiles."""
        return self.images * self.tiles_down * self.tiles_across

    @property
    def groups(self) -> int:
        """The groups of tiles."""
        return -(-self.tiles // self.rows)

    @property
    def padded_inputs(self) -> int:
        """C, rounded up."""
        return -(-self.inputs // self.multiple) * self.multiple

    @property
    def blocks(self) -> int:
        """The blocks of output channels."""
        return -(-self.outputs // self.columns)

    @property
    def padded_outputs(self) -> int:
        """K, rounded up to whole blocks."""
        return self.blocks * self.columns
