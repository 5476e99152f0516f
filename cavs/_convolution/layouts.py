"""The layouts that are worth trying for one convolution, or for its gradient with respect to the filters."""

import dataclasses
import itertools

from cavs.kernels import ConvolutionLayout, ConvolutionSizes, Distances, Target, gradient_fits, too_large

STAGE_BYTES = 16 * 1024  # of a chunk of left operands in shared memory


def of_convolution(sizes: ConvolutionSizes, target: Target) -> dict[str, ConvolutionLayout]:
    """Returns layouts for a convolution by name. All are as exact as float32 (see `convolve`). `sizes.m` is ignored."""
    found = {}
    for m, shares, transformers in ((4, (4, 8, 16), (3, 2)), (2, (8,), (3,))):
        s = dataclasses.replace(sizes, m=m)
        for share, count in itertools.product(shares, transformers):
            if (share == shares[0] or share < s.groups) and not too_large(s):
                found[f"F({m}x{m},3x3), M={share}, T={count}"] = layout(s, min(share, s.groups), target, count)
    return found


def of_filters(sizes: ConvolutionSizes, target: Target) -> dict[str, ConvolutionLayout]:
    """Returns layouts for the gradient with respect to the filters by name."""
    found = {}
    for m, rows, transformers in ((4, 128, 3), (4, 256, 3), (4, 512, 3), (4, 256, 2), (2, 256, 3)):
        # Some groups are multiplied at a time, so that there is a product for each multiprocessor.
        products = (m + 2) ** 2 * -(-sizes.inputs // 128) * sizes.blocks
        share = min(-(-target.multiprocessors // products), -(-dataclasses.replace(sizes, m=m).tiles // rows))
        given = dataclasses.replace(layout(dataclasses.replace(sizes, m=m), share, target, transformers), rows=rows)
        if gradient_fits(sizes, given):
            found[f"F({m}x{m},3x3), {rows} tiles, T={transformers}"] = given
    return found


def layout(s: ConvolutionSizes, share: int, target: Target, transformers: int = 3) -> ConvolutionLayout:
    """Returns the layout in which `share` groups multiply one block of a filter matrix one after another (M in MegaKernels).

    Of a thread block, `transformers` warpgroups transform.
    """
    stages = target.shared_memory // (STAGE_BYTES + 3 * 64 * s.columns)
    return ConvolutionLayout(
        m=s.m,
        parts=3,
        columns=s.columns,
        distances=Distances(share, share, 1),
        input_tiles=4,
        output_tiles=4,
        stages=min(8, stages),
        apart=True,
        transformers=transformers,
        blocks=target.multiprocessors,
    )
