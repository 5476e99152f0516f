"""Parameters of `torch.nn.LSTM`, `GRU` and `RNN`, converted to and from those of vertex programs. PyTorch is not imported.

PyTorch stores, for layer k and each direction (suffix "_reverse" for the second), with G gates of H units:

    weight_ih_lk (G H, E)   weight_hh_lk (G H, H)   bias_ih_lk, bias_hh_lk (G H,)

with the gates i, f, g, o of an LSTM and r, z, n of a GRU (torch.nn.LSTM, torch.nn.GRU, section Variables). The vertex
programs store the transposes, order the gates of an LSTM i, f, o, g, and have one bias, the sum of the two. Only the second
bias of a GRU's n is separate, because the reset gate multiplies it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cavs._graphs.checks import check_type
from cavs._graphs.pytree import PyTree

_GATES = (4, 3, 1)  # of an LSTM, a GRU and an ElmanRNN
_NAME = re.compile(r"(weight_ih|weight_hh|weight_hr|bias_ih|bias_hh)_l(\d+)(_reverse)?")


def params_from_torch(state_dict: Mapping[str, Any], prefix: str = "") -> list[Any]:
    """Converts the state dict of a `torch.nn.LSTM`, `GRU` or `RNN` (tanh) to parameters of `LSTM`, `GRU` or `ElmanRNN`.

    The shapes determine which of the three it is. `hidden` is the first axis of `u`, `inputs` the first axis of `w`.

    Args:
        state_dict: tensors or arrays by name.
        prefix: the path of the module in a larger model, such as `"encoder.lstm."`. Other names are ignored.

    Returns:
        A list with the parameters of each layer, NumPy arrays of the same dtypes: those of `MultiLayerLSTM`; `params[0]` are
        those of `LSTM`, `GRU` or `ElmanRNN`. A bidirectional layer is `{"forward": ..., "backward": ...}`, as in `BiLSTM`.

    Raises:
        ValueError: a layer is missing or incomplete, the shapes are not those of such a module, or it has projections
            (`proj_size`).
    """
    check_type("params_from_torch: state_dict", state_dict, Mapping, "tensors by name. Write module.state_dict()")
    layers: dict[tuple[int, bool], dict[str, np.ndarray]] = {}
    for name, tensor in state_dict.items():
        match = _NAME.fullmatch(name[len(prefix) :]) if name.startswith(prefix) else None
        if match:
            layers.setdefault((int(match[2]), bool(match[3])), {})[match[1]] = _array(tensor)
    if (0, False) not in layers:
        names = [name for name in state_dict if "weight_ih_l0" in name]
        hint = f" Write prefix={names[0].removesuffix('weight_ih_l0')!r}." if names else ""
        raise ValueError(
            f"params_from_torch: state_dict: got names {sorted(state_dict)[:8]} without {prefix + 'weight_ih_l0'!r}; expected "
            f"the state dict of a torch.nn.LSTM, GRU or RNN.{hint}"
        )
    bidirectional = any(backward for _, backward in layers)
    out: list[Any] = []
    for k in range(1 + max(k for k, _ in layers)):
        layer = {"forward": _from_torch(f"{prefix}*_l{k}", layers.get((k, False), {}))}
        if bidirectional:
            layer["backward"] = _from_torch(f"{prefix}*_l{k}_reverse", layers.get((k, True), {}))
        out.append(layer if bidirectional else layer["forward"])
    return out


def params_to_torch(params: PyTree, prefix: str = "") -> dict[str, np.ndarray]:
    """Converts parameters of a vertex program to the state dict of the equivalent `torch.nn.LSTM`, `GRU` or `RNN`.

    The bias becomes `bias_ih`. `bias_hh` is zero, except for the part of a GRU that the reset gate multiplies. In PyTorch write
    `module.load_state_dict({name: torch.from_numpy(x) for name, x in cavs.interop.params_to_torch(params).items()})`.

    Args:
        params: the parameters of an `LSTM`, `GRU` or `ElmanRNN`; a list of them, one per layer; or a list of
            `{"forward": ..., "backward": ...}`.
        prefix: a prefix of every name.

    Returns:
        NumPy arrays by PyTorch's names.

    Raises:
        ValueError: the parameters belong to another program.
    """
    out = {}
    for k, layer in enumerate(params if isinstance(params, Sequence) else [params]):
        directions = layer if isinstance(layer, Mapping) and "forward" in layer else {"forward": layer}
        for suffix, direction in (("", "forward"), ("_reverse", "backward")):
            if direction in directions:
                out |= {f"{prefix}{name}_l{k}{suffix}": x for name, x in _to_torch(f"layer {k}", directions[direction]).items()}
    return out


def _array(x: Any) -> np.ndarray:
    # A tensor that requires a gradient cannot be converted to an array.
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)


def _from_torch(names: str, p: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if "weight_hr" in p:
        raise ValueError(f"params_from_torch: {names}: got weight_hr (proj_size > 0); expected a module without projections.")
    if not {"weight_ih", "weight_hh"} <= {*p} or ("bias_ih" in p) != ("bias_hh" in p):
        raise ValueError(
            f"params_from_torch: {names}: got {sorted(p)}; expected weight_ih, weight_hh, and both biases or none."
        )
    rows, hidden = p["weight_hh"].shape if p["weight_hh"].ndim == 2 else (0, 0)
    gates = rows // max(hidden, 1)
    bias = [p.get(name, np.zeros(rows, p["weight_hh"].dtype)) for name in ("bias_ih", "bias_hh")]
    fits = gates in _GATES and rows == gates * hidden and p["weight_ih"].ndim == 2 and len(p["weight_ih"]) == rows
    if not fits or any(b.shape != (rows,) for b in bias):
        shapes = {name: x.shape for name, x in p.items()}
        raise ValueError(f"params_from_torch: {names}: got shapes {shapes}; expected those of a torch.nn.LSTM, GRU or RNN.")
    w, u, b = p["weight_ih"].T, p["weight_hh"].T, bias[0] + bias[1]
    if gates == 4:
        w, u, b = (_swap_last_two(x, hidden) for x in (w, u, b))
    if gates == 3:
        b = np.concatenate([b[: 2 * hidden], bias[0][2 * hidden :]])
        return {"w": w, "u": u, "b": b, "d": bias[1][2 * hidden :]}
    return {"w": w, "u": u, "b": b}


def _to_torch(where: str, p: PyTree) -> dict[str, np.ndarray]:
    expected = {"w", "u", "b"}
    if not isinstance(p, Mapping) or not expected <= {*p} <= expected | {"d"}:
        got = sorted(p) if isinstance(p, Mapping) else type(p).__name__
        raise ValueError(
            f"params_to_torch: params: got {got} in {where}; expected the parameters of an LSTM, a GRU or an ElmanRNN."
        )
    w, u, b = (_array(p[name]) for name in ("w", "u", "b"))
    hidden, columns = u.shape if u.ndim == 2 else (0, 0)
    gates = columns // max(hidden, 1)
    fits = gates in _GATES and columns == gates * hidden and b.shape == w.shape[1:] == (columns,)
    if not fits or (gates == 3) != ("d" in p) or np.shape(p.get("d", np.zeros(hidden))) != (hidden,):
        shapes = {name: np.shape(x) for name, x in p.items()}
        raise ValueError(
            f"params_to_torch: params: got shapes {shapes} in {where}; expected those of an LSTM, a GRU or an ElmanRNN."
        )
    bias_hh = np.zeros_like(b)
    if gates == 4:
        w, u, b = (_swap_last_two(x, hidden) for x in (w, u, b))
    if gates == 3:
        bias_hh[2 * hidden :] = _array(p["d"])
    out = {"weight_ih": w.T, "weight_hh": u.T, "bias_ih": b, "bias_hh": bias_hh}
    return {name: np.ascontiguousarray(x) for name, x in out.items()}


def _swap_last_two(x: np.ndarray, hidden: int) -> np.ndarray:
    """Reorders the gates i, f, o, g to i, f, g, o, or back."""
    i, f, o, g = np.split(x, [hidden, 2 * hidden, 3 * hidden], -1)
    return np.concatenate([i, f, g, o], -1)
