"""Recognises that the memory of the host or of the device is exhausted."""

import jax

OUT_OF_MEMORY = (MemoryError, jax.errors.JaxRuntimeError)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there is not enough memory."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
