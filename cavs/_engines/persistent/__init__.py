"""Engine `persistent`: runs levels in one launch that keeps weights on the chip of a GPU (VPPS)."""
