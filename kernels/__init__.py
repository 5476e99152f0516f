"""The persistent kernels. What `cavs` uses of them is named here, and `cavs` imports nothing else of this folder."""

from cavs.kernels import persistent as persistent
from cavs.kernels._layout import tuned as tuned
from cavs.kernels._layout.layout import (
    PARTS as PARTS,
    SHARED_MEMORY as SHARED_MEMORY,
    Config as Config,
    Layout as Layout,
    layout_of as layout_of,
)
from cavs.kernels._program.fit import REDUCTIONS as REDUCTIONS, is_product as is_product
from cavs.kernels._program.halves import add_halves as add_halves
from cavs.kernels._program.padding import (
    constant_in_memory as constant_in_memory,
    rows_from_memory as rows_from_memory,
    rows_in_memory as rows_in_memory,
    weight_in_memory as weight_in_memory,
)
from cavs.kernels._program.phases import cut as cut
from cavs.kernels._program.specs import (
    FACTOR as FACTOR,
    HALVES as HALVES,
    Constant as Constant,
    Level as Level,
    Place as Place,
    ProductSpec as ProductSpec,
    Rows as Rows,
    Sum as Sum,
    Unfit as Unfit,
    is_var as is_var,
    num_blocks as num_blocks,
    stored_dtype as stored_dtype,
)
from cavs.kernels.persistent import checked as checked
from cavs.kernels.rows import COLUMNS as COLUMNS, segment_rows as segment_rows
from cavs.kernels.turns import begin_p as begin_p, end_p as end_p
