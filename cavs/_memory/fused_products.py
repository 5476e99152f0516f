"""The products that XLA for GPUs does not give to a library or to Triton: it fuses them with the equations around them.

A product with a vector becomes a multiplication and a sum (`GpuAlgebraicSimplifier`), and one that sums nothing a
multiplication (`AlgebraicSimplifier`), before any kernel is measured. What they read needs no buffer. Dimensions of one
element are removed before, so they do not count.
"""

import math

from cavs._function.jaxprs import Eqn

_LARGE = 10_000_000  # elements of a matrix and a vector: XLA leaves the product as it is


def sizes_of_product(e: Eqn) -> tuple[int, int, int, int]:
    """Returns how many products of matrices a `dot_general` is, their rows and columns, and how many terms they sum."""
    (contracted, _), (batch, _) = e.params["dimension_numbers"]
    left, right = (x.aval.shape for x in e.invars)
    k, b = math.prod(left[i] for i in contracted), math.prod(left[i] for i in batch)
    m, n = (math.prod(shape) // max(k * b, 1) for shape in (left, right))
    return b, m, n, k


def is_sum(e: Eqn) -> bool:
    """Returns whether XLA for GPUs makes a reduction of a `dot_general`: of two vectors, or of a vector and a small matrix."""
    _, m, n, k = sizes_of_product(e)
    return k > 1 and (m == n == 1 or 1 in (m, n) and (m + n) * k < _LARGE)


def is_outer(e: Eqn) -> bool:
    """Returns whether a `dot_general` sums nothing, so that it is an elementwise multiplication."""
    return sizes_of_product(e)[-1] == 1
