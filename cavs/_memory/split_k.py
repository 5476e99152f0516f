"""In how many parts XLA for GPUs sums a product of few rows and columns, so that all multiprocessors have work.

Each part is a product over some of the terms, and has a result of its own in memory. XLA's cost model weighs the time of the
product against that of adding up the parts (`SplitkRewriter`; the numbers are those for Hopper).
"""

from cavs._engines import chip
from cavs._function.costs import bytes_of_var
from cavs._function.jaxprs import Eqn
from cavs._memory.fused_products import is_outer, is_sum, sizes_of_product

_TILE = 128  # rows and columns that a multiprocessor computes at a time
_COUNTS = tuple(2**n for n in range(12))
_COST_OF_FLOP, _COST_OF_BYTE, _COST_OF_SUMMED_BYTE, _COST_OF_LAUNCH = 100.0, 0.194136, 193.1384, 4.36e7


def parts_of_product(e: Eqn) -> int:
    """Returns the number of parts of a `dot_general`."""
    b, m, n, k = sizes_of_product(e)
    if len(e.params["dimension_numbers"][0][0]) != 1 or not k or not b or is_sum(e) or is_outer(e):
        return 1
    read, written = sum(map(bytes_of_var, e.invars)), 4 * b * m * n
    tiles = b * -(-m // _TILE) * -(-n // _TILE)
    size = min(m, _TILE) * min(n, _TILE)
    at_once = chip.multiprocessors() * _TILE * _TILE / max(size, 1)

    def cost(parts: int) -> float:
        flops = 2 * size * -(-k // parts) * max(1.0, tiles * parts / at_once)
        product = max(flops * _COST_OF_FLOP, (read + parts * written) * _COST_OF_BYTE)
        return product + (_COST_OF_LAUNCH + (parts + 1) * written * _COST_OF_SUMMED_BYTE if parts > 1 else 0)

    return min(_COUNTS, key=cost)
