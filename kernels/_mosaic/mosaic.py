"""The device operations of the persistent kernels (`_body.device`) in Pallas Mosaic GPU, for Hopper.

Pallas has no gather of rows by index and no tf32 product of a few rows, so these operations use inline Mosaic: loads and stores
by row number for each thread, and `mma.sync` products whose left operand is the weights (M = weight columns, N = 8 rows). The
elementwise equations between them are ordinary Pallas, on arrays of shape (rows, units) with one element per register.

The four warps of a warpgroup divide K of a product. Each warp reads its part of the rows straight from global memory into the
registers of the operand, and writes its partial sums to shared memory. The elements of K may be permuted freely, so that every
read is 16 bytes.
"""

from cavs.kernels._mosaic.barriers import group_barrier as group_barrier, sync as sync
from cavs.kernels._mosaic.exchange import begin_exchange as begin_exchange, end_exchange as end_exchange
from cavs.kernels._mosaic.held import hold_weights as hold_weights
from cavs.kernels._mosaic.loads import load as load, number as number, prefetch as prefetch
from cavs.kernels._mosaic.products import product as product
from cavs.kernels._mosaic.reductions import segments as segments, whole_rows as whole_rows
from cavs.kernels._mosaic.ring import begin_ring as begin_ring
from cavs.kernels._mosaic.rows import product_rows as product_rows, read_product as read_product
from cavs.kernels._mosaic.stores import mark_unwritten as mark_unwritten, store as store
from cavs.kernels._mosaic.weights import copy_weights as copy_weights, pack_weights as pack_weights
from cavs.kernels._mosaic.wide import wide_product as wide_product
