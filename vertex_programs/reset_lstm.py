"""An LSTM whose state may be reset within a sequence."""

import dataclasses

import jax
import jax.numpy as jnp

import cavs
from cavs.vertex_programs.lstm import LSTM, lstm_state


@dataclasses.dataclass(frozen=True)
class ResetLSTM(LSTM):
    """LSTM with resets: Mnih et al., 2016 (A3C), section 5; Kapturowski et al., 2019 (R2D2), section 2: recurrent agents
    whose sequences run over the ends of episodes.

    As `LSTM`, but where a vertex's `reset` holds, c' and h' are zeros: nothing of what came before is seen, and no
    gradient flows back. Where resets are known when the batch is made, cutting the chains there is the same and
    shorter: `cavs.from_lengths` of the pieces.

    **Fields:** `hidden`, H; `inputs`, E; `dtype` of the initial parameters.
    **Parameters:** those of `LSTM`. **Pulls** `{"x": (E,), "reset": ()}`, a bool (or a number, not 0 for a reset).
    **Pushes** h.
    """

    def __call__(self, params: dict[str, jax.Array], v: cavs.Vertex) -> None:
        """The vertex function."""
        keep = v.pull("reset") == 0
        before = jax.tree.map(lambda s: jnp.where(keep, s, 0), v.gather(0))
        state = lstm_state(before["h"] @ params["u"] + (v.pull("x") @ params["w"] + params["b"]), before["c"])
        v.scatter(state)
        v.push(state["h"])
