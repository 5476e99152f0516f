"""`choose_shapes`: the few padded shapes of a loader, from batches of its first epochs."""

import jax
import numpy as np

from cavs._feed.epochs import dealt_strata, strata_of_batches
from cavs._feed.plan import Shapes, plan_samples
from cavs._feed.sampler import Sampler
from cavs._feed.settings import Settings
from cavs._schedule.few import WORTH_A_SHAPE
from cavs.kernels import native_unavailable

SAMPLE_BATCHES, SAMPLE_EPOCHS = 512, 8  # shapes are chosen from at least so many batches, or from so many epochs
# On a CPU, a program that is compiled while the first one trains takes the cores from it. On EWT (184,000 vertices), the first
# epoch of `cavs train` takes 3.7 s with two programs, and 2.6 s with one, whose batches have a fifth more rows. Engine `native`
# computes no padding in levels: a later epoch, of 1.7 s, takes 2 % longer (two cores, 2026-11-26).
SHORT_EPOCH, WORTH_IN_SHORT_EPOCHS = 500_000, 0.2  # vertices; the fraction of the rows that one more shape must then save


def choose_shapes(shapes: Shapes, sampler: Sampler, settings: Settings, units: int) -> None:
    """Adds the shapes for the batches of all epochs, which must be known.

    Args:
        shapes: where they are added, at most `settings.shapes`.
        sampler: the batches.
        settings: those of the loader.
        units: the devices to which a batch is dealt, or its parts.
    """
    if sampler.size is None:
        _for_given(shapes, sampler, settings, units)
    else:
        _for_drawn(shapes, sampler, sampler.size, settings, units)


def _for_given(shapes: Shapes, sampler: Sampler, settings: Settings, units: int) -> None:
    """Adds the shapes for batches that the user gave: they are the same in all epochs."""
    given = sampler.batches(0)
    sizes = sorted({len(some) for some in given})
    for size in sizes:
        mine, _ = plan_samples([some for some in given if len(some) == size], sampler.sizes, units)
        shapes.add(mine, max(1, settings.shapes // len(sizes)), closed=True)


def _for_drawn(shapes: Shapes, sampler: Sampler, size: int, settings: Settings, units: int) -> None:
    """Adds the shapes for drawn batches: most are for whole batches, and one is for a smaller last batch."""
    all_alike = settings.seed is None
    epochs = 1 if all_alike else min(SAMPLE_EPOCHS, -(-SAMPLE_BATCHES // len(sampler)))
    sample = [some for epoch in range(epochs) for some in sampler.batches(epoch)]
    whole, rest = ([some for some in sample if (len(some) == size) == full] for full in (True, False))
    by_size, *edges = strata_of_batches(sampler.sizes, size)
    for some, most, of in zip((whole, rest), (settings.shapes - bool(rest), 1), edges, strict=True):
        if some:
            mine, _ = plan_samples(some, sampler.sizes, units)
            strata = None
            if settings.group == "balanced":
                strata = by_size, dealt_strata(sampler.sizes[by_size], of, units)
            shapes.add(mine, max(1, most), closed=all_alike, strata=strata, worth=worth_a_shape(sampler.sizes))


def worth_a_shape(sizes: np.ndarray) -> float:
    """The fraction of the rows that one more shape must save, for graphs of these sizes."""
    native = jax.default_backend() == "cpu" and native_unavailable() is None
    return WORTH_IN_SHORT_EPOCHS if native and sizes.sum() < SHORT_EPOCH else WORTH_A_SHAPE
