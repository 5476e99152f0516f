"""A launch of tasks of several kinds, mapped to thread blocks by Algorithm 1 of MegaKernels, with dependency counters."""
