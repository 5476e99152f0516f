"""The layouts that are worth trying for one convolution, or for its gradient with respect to the filters."""

import dataclasses

from cavs.kernels import (
    ConvolutionLayout,
    ConvolutionSizes,
    Distances,
    Target,
    gradient_counts,
    gradient_fits,
    gradient_sizes,
    halves_of,
    too_large,
)

STAGE_BYTES = 16 * 1024  # of a chunk of left operands in shared memory


def of_convolution(sizes: ConvolutionSizes, target: Target) -> dict[str, ConvolutionLayout]:
    """Returns layouts for a convolution by name. All are as exact as float32 (see `convolve`). `sizes.m` is ignored."""
    by_name = {}
    for m, share, transformers in ((4, 4, 3), (4, 8, 3), (4, 16, 3), (4, 4, 2), (2, 4, 3)):
        s = dataclasses.replace(sizes, m=m)
        if (share == 4 or share < s.groups) and not too_large(s):
            by_name[f"F({m}x{m},3x3), M={share}, T={transformers}"] = layout(s, min(share, s.groups), target, transformers)
    return by_name


def of_filters(sizes: ConvolutionSizes, target: Target) -> dict[str, ConvolutionLayout]:
    """Returns layouts for the gradient with respect to the filters by name."""
    by_name = {}
    for rows in (256, 512, 1024):
        base = dataclasses.replace(layout(dataclasses.replace(sizes, m=4), 1, target), rows=rows)
        s = gradient_sizes(sizes, base)
        # Some groups are multiplied at a time, so that there is a product for each multiprocessor.
        share = min(s.groups, -(-target.multiprocessors // gradient_counts(s, base).products))
        stages = _stages(target, halves_of(s) * s.columns)
        candidate = dataclasses.replace(base, distances=Distances(share, share, 1), stages=stages)
        if gradient_fits(sizes, candidate):
            by_name[f"F(4x4,3x3), {rows} tiles"] = candidate
    return by_name


def layout(s: ConvolutionSizes, share: int, target: Target, transformers: int = 3) -> ConvolutionLayout:
    """Returns the layout in which `share` groups multiply one block of a filter matrix one after another (M in MegaKernels).

    Of a thread block, `transformers` warpgroups transform.
    """
    return ConvolutionLayout(
        m=s.m,
        parts=3,
        columns=s.columns,
        distances=Distances(share, share, 1),
        input_tiles=4,
        output_tiles=4,
        stages=_stages(target, s.columns),
        apart=True,
        transformers=transformers,
        blocks=target.multiprocessors,
    )


def _stages(target: Target, columns: int) -> int:
    """How many chunks of operands fit in shared memory, whose right operands have three terms and some columns."""
    return min(8, target.shared_memory // (STAGE_BYTES + 3 * 64 * columns))
