"""The persistent kernels. `cavs` imports only the names of this file; README.md follows one level through the folders."""

from cavs.kernels import persistent as persistent
from cavs.kernels._cpu.call import native_call as native_call
from cavs.kernels._cpu.cores import usable_cores as usable_cores
from cavs.kernels._cpu.library import (
    NATIVE_GRADIENTS as NATIVE_GRADIENTS,
    NATIVE_LEVELS as NATIVE_LEVELS,
    native_unavailable as native_unavailable,
)
from cavs.kernels._cpu.operations import NATIVE_OPERATIONS as NATIVE_OPERATIONS
from cavs.kernels._cpu.schedule import (
    BAD_GRAPHS as BAD_GRAPHS,
    BAD_INDEX as BAD_INDEX,
    LAYOUT as LAYOUT,
    NO_ROOM as NO_ROOM,
    TOO_LARGE as TOO_LARGE,
    CutTables as CutTables,
    GraphArrays as GraphArrays,
    schedule_library as schedule_library,
)
from cavs.kernels._layout import tuned as tuned
from cavs.kernels._layout.config import PARTS as PARTS, LaunchConfig as LaunchConfig
from cavs.kernels._layout.layout import layout_of as layout_of
from cavs.kernels._layout.specs import ProductSpec as ProductSpec
from cavs.kernels._program.arrays import Output as Output
from cavs.kernels._program.check import check_accesses as check_accesses
from cavs.kernels._program.comparisons import COMPARISONS as COMPARISONS, computed_once as computed_once
from cavs.kernels._program.fit import (
    ELEMENTWISE as ELEMENTWISE,
    REDUCTIONS as REDUCTIONS,
    Unfit as Unfit,
    contracted_axis as contracted_axis,
    is_product as is_product,
)
from cavs.kernels._program.halves import with_halves as with_halves
from cavs.kernels._program.jaxprs import (
    EDGE as EDGE,
    ROW as ROW,
    STATIC as STATIC,
    Atom as Atom,
    Domain as Domain,
    Domains as Domains,
    Eqn as Eqn,
    Literal as Literal,
    Var as Var,
    aval as aval,
    domain_of as domain_of,
    is_var as is_var,
)
from cavs.kernels._program.names import Index as Index, IndexRole as IndexRole, Tensor as Tensor, TensorRole as TensorRole
from cavs.kernels._program.operations import (
    Across as Across,
    ConstantRead as ConstantRead,
    Equation as Equation,
    LevelProgram as LevelProgram,
    Load as Load,
    ParentSum as ParentSum,
    Phase as Phase,
    RowAddress as RowAddress,
    RowRead as RowRead,
    Source as Source,
)
from cavs.kernels._program.padding import (
    constant_in_memory as constant_in_memory,
    rows_from_memory as rows_from_memory,
    rows_in_memory as rows_in_memory,
    weight_in_memory as weight_in_memory,
)
from cavs.kernels._program.phases import cut as cut
from cavs.kernels._program.text import program_text as program_text
from cavs.kernels._program.widths import (
    num_blocks as num_blocks,
    stored_dtype as stored_dtype,
)
from cavs.kernels._tasks.convolution import convolve as convolve, too_large as too_large
from cavs.kernels._tasks.filters_gradient import (
    filters_gradient as filters_gradient,
    gradient_counts as gradient_counts,
    gradient_fits as gradient_fits,
    gradient_sizes as gradient_sizes,
    halves_of as halves_of,
)
from cavs.kernels._tasks.mapping import Distances as Distances
from cavs.kernels._tasks.roles import ConvolutionLayout as ConvolutionLayout
from cavs.kernels._tasks.winograd import ConvolutionSizes as ConvolutionSizes
from cavs.kernels.persistent import checked as checked
from cavs.kernels.precision import (
    PRECISIONS as PRECISIONS,
    asked_precision as asked_precision,
    of_tf32_bits as of_tf32_bits,
    replacement as replacement,
)
from cavs.kernels.rows import COLUMNS as COLUMNS, segment_rows as segment_rows
from cavs.kernels.target import H200 as H200, Target as Target
from cavs.kernels.turns import begin_p as begin_p, end_p as end_p
