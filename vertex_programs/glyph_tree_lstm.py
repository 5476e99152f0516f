"""A Tree-LSTM whose leaves read pictures, through a convolutional net."""

import dataclasses

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs._initialisers import glorot, one_program
from cavs.vertex_programs.binary_tree_lstm import BinaryTreeLSTM


@dataclasses.dataclass(frozen=True)
class GlyphTreeLSTM(BinaryTreeLSTM):
    """Binary Tree-LSTM over pictures: its leaves read glyphs, such as handwritten digits in a formula.

    A leaf's glyph passes two layers, each a convolution of 3 x 3 (`cavs.conv`), a rectifier, and the means of 2 x 2 pixels. The
    result is x of `BinaryTreeLSTM`. Glyphs of inner vertices are not read. The convolutions of all leaves of a batch run as
    one, and gradients flow through both parts.

    `init` returns the parameters of `BinaryTreeLSTM`, where E = 2 C (S / 4)^2, and:

    - `conv1` (3, 3, 1, C), `conv2` (3, 3, C, 2C)

    Attributes:
        hidden: H, the size of the state.
        inputs: S, the side of a glyph in pixels, a multiple of 4. A vertex pulls (S, S).
        channels: C, of the first convolution.
        dtype: The dtype of the initial parameters.
    """

    channels: int = 8

    def __post_init__(self) -> None:
        if self.inputs < 4 or self.inputs % 4:
            raise ValueError(f"GlyphTreeLSTM: inputs: got {self.inputs}; expected the side of a glyph, a multiple of 4.")
        if not self.leaf_inputs_only:
            raise ValueError("GlyphTreeLSTM: leaf_inputs_only: got False; expected True, as only leaves have glyphs.")

    @one_program
    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Returns the initial parameters; the weights are drawn from `key`."""
        features = 2 * self.channels * (self.inputs // 4) ** 2
        tree, first, second = jax.random.split(key, 3)
        params = BinaryTreeLSTM(self.hidden, features, dtype=self.dtype).init(tree)
        for name, key, c, k in (("conv1", first, 1, self.channels), ("conv2", second, self.channels, 2 * self.channels)):
            params[name] = glorot(key, 9 * c, k, self.dtype).reshape(3, 3, c, k)
        return params

    def read(self, params: dict[str, jax.Array], v: cavs.Vertex) -> jax.Array:
        """Returns what the convolutional net makes of the glyph, (E,)."""
        x = v.pull()[None, :, :, None]
        for name in ("conv1", "conv2"):
            x = jnp.maximum(cavs.conv(x, params[name]), 0)
            n, height, width, channels = x.shape
            x = x.reshape(n, height // 2, 2, width // 2, 2, channels).mean((2, 4))
        return x.reshape(-1)
