"""Types in the signatures of the vertex programs."""

from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array | np.ndarray
Integers: TypeAlias = Array | Sequence[int]
