"""An LSTM whose state may be reset within a sequence."""

import dataclasses

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs.lstm import LSTM, lstm_state


@dataclasses.dataclass(frozen=True)
class ResetLSTM(LSTM):
    """LSTM with resets: Mnih et al., 2016 (A3C), section 5; Kapturowski et al., 2019 (R2D2), section 2.

    It is the network of recurrent agents whose sequences continue past the end of an episode. It computes `LSTM`, but uses
    zeros for c' and h' at each vertex whose `reset` is set. Such a vertex sees nothing of the earlier positions, and no
    gradient flows back to them. If resets are known when the batch is created, it is faster to cut the chains there:
    `cavs.from_lengths` of the pieces computes the same.

    Vertices pull `{"x": (E,), "reset": ()}`, with `reset` a bool, or a number that is not 0 for a reset, and push h.

    `init` returns the parameters of `LSTM`.

    Attributes:
        hidden: H, the size of the state.
        inputs: E, the size of x.
        dtype: The dtype of the initial parameters.
    """

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """Computes one vertex."""
        keep = v.pull("reset") == 0
        before = jax.tree.map(lambda s: jnp.where(keep, s, 0), v.gather(0))
        state = lstm_state(before["h"] @ params["u"] + (v.pull("x") @ params["w"] + params["b"]), before["c"])
        v.scatter(state)
        v.push(state["h"])
