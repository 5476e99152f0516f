"""Parameters of `torch.nn.LSTM`, `GRU` and `RNN` by their names there, to and from those of our programs. Without torch.

torch keeps, for layer k and each direction (suffix "_reverse" for the second), with G gates of H units:

    weight_ih_lk (G H, E)   weight_hh_lk (G H, H)   bias_ih_lk, bias_hh_lk (G H,)

gates i, f, g, o of an LSTM and r, z, n of a GRU (torch.nn.LSTM, torch.nn.GRU, section Variables). Ours are transposed,
an LSTM's gates are i, f, o, g, and the two biases are one, but for a GRU's n, whose second acts within the reset.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_GATES = {"LSTM": 4, "GRU": 3, "ElmanRNN": 1}
_NAME = re.compile(r"(weight_ih|weight_hh|weight_hr|bias_ih|bias_hh)_l(\d+)(_reverse)?")


def params_from_torch(state_dict: Mapping[str, Any], prefix: str = "") -> list[Any]:
    """Parameters of `LSTM`, `GRU` or `ElmanRNN` from the state dict of a `torch.nn.LSTM`, `GRU` or `RNN` (tanh).

    **Arguments:** `state_dict`: names to tensors or arrays; what starts with no `prefix` is ignored. `prefix`: where the
    module lies in a larger model, `"encoder.lstm."`.

    **Returns:** a list with the parameters of each layer, arrays of their dtypes: what `MultiLayerLSTM` takes, `params[0]`
    what `LSTM` or `GRU` takes. With both directions a layer is `{"forward": ..., "backward": ...}`, as in `BiLSTM`.
    `hidden` is `u`'s first axis, `inputs` is `w`'s. Which of the three it is follows from the shapes.

    **Raises:** `ValueError` where no layer or not all of one is there, for shapes that are no such module's, and for
    projections (`proj_size`).
    """
    found: dict[tuple[int, bool], dict[str, np.ndarray]] = {}
    for name, tensor in state_dict.items():
        match = _NAME.fullmatch(name[len(prefix) :]) if name.startswith(prefix) else None
        if match:
            found.setdefault((int(match[2]), bool(match[3])), {})[match[1]] = _array(tensor)
    if (0, False) not in found:
        names = [name for name in state_dict if "weight_ih_l0" in name]
        hint = f" Write prefix={names[0].removesuffix('weight_ih_l0')!r}." if names else ""
        raise ValueError(
            f"params_from_torch: no {prefix + 'weight_ih_l0'!r} among {sorted(state_dict)[:8]}; wanted the state dict of a "
            f"torch.nn.LSTM, GRU or RNN.{hint}"
        )
    layers = 1 + max(k for k, _ in found)
    both = any(backward for _, backward in found)
    out: list[Any] = []
    for k in range(layers):
        ways = [_ours(f"{prefix}*_l{k}{'_reverse' * way}", found.get((k, way), {})) for way in (False, True)[: 1 + both]]
        out.append({"forward": ways[0], "backward": ways[1]} if both else ways[0])
    return out


def params_to_torch(params: Any, prefix: str = "") -> dict[str, np.ndarray]:
    """The state dict of the `torch.nn.LSTM`, `GRU` or `RNN` that computes what our program does: the inverse.

    Our one bias goes to `bias_ih`, `bias_hh` is zero (but a GRU's within the reset). For torch:
    `module.load_state_dict({name: torch.from_numpy(x) for name, x in cavs.interop.params_to_torch(params).items()})`.

    **Arguments:** `params`: of one `LSTM`, `GRU` or `ElmanRNN`, or a list of such, one a layer, or of
    `{"forward": ..., "backward": ...}`. `prefix` is put before each name.

    **Raises:** `ValueError` for parameters of another program.
    """
    out = {}
    for k, layer in enumerate(params if isinstance(params, Sequence) else [params]):
        for suffix, way in (("", layer.get("forward", layer)), ("_reverse", layer.get("backward"))):
            if way is not None:
                out |= {f"{prefix}{name}_l{k}{suffix}": x for name, x in _theirs(f"layer {k}", way).items()}
    return out


def _array(x: Any) -> np.ndarray:
    # A tensor that requires a gradient refuses to become an array.
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)


def _ours(names: str, p: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if "weight_hr" in p:
        raise ValueError(f"params_from_torch: {names} has a weight_hr (proj_size > 0); no vertex program has projections.")
    missing = [name for name in ("weight_ih", "weight_hh") if name not in p]
    if missing or ("bias_ih" in p) != ("bias_hh" in p):
        raise ValueError(f"params_from_torch: {names} has {sorted(p)}, wanted weight_ih, weight_hh, and both biases or none.")
    rows, hidden = p["weight_hh"].shape
    gates = rows // hidden
    bias = [p.get(name, np.zeros(rows, p["weight_hh"].dtype)) for name in ("bias_ih", "bias_hh")]
    fits = gates in _GATES.values() and rows == gates * hidden and len(p["weight_ih"]) == rows
    if not fits or any(b.shape != (rows,) for b in bias):
        shapes = {name: x.shape for name, x in p.items()}
        raise ValueError(f"params_from_torch: {names} has shapes {shapes}, wanted those of a torch.nn.LSTM, GRU or RNN.")
    w, u, b = p["weight_ih"].T, p["weight_hh"].T, bias[0] + bias[1]
    if gates == 4:
        w, u, b = (_swap_last_two(x, hidden) for x in (w, u, b))
    if gates == 3:
        b = np.concatenate([b[: 2 * hidden], bias[0][2 * hidden :]])
        return {"w": w, "u": u, "b": b, "d": bias[1][2 * hidden :]}
    return {"w": w, "u": u, "b": b}


def _theirs(where: str, p: Any) -> dict[str, np.ndarray]:
    wanted = {"w", "u", "b"}
    if not isinstance(p, Mapping) or not wanted <= {*p} <= wanted | {"d"}:
        got = sorted(p) if isinstance(p, Mapping) else type(p).__name__
        raise ValueError(f"params_to_torch: {where} has {got}, wanted the parameters of an LSTM, a GRU or an ElmanRNN.")
    w, u, b = (_array(p[name]) for name in ("w", "u", "b"))
    hidden, columns = u.shape
    gates = columns // hidden
    if gates not in _GATES.values() or (gates == 3) != ("d" in p) or b.shape != (columns,) or w.shape[1:] != (columns,):
        shapes = {name: np.shape(x) for name, x in p.items()}
        raise ValueError(f"params_to_torch: {where} has shapes {shapes}, wanted those of an LSTM, a GRU or an ElmanRNN.")
    second = np.zeros_like(b)
    if gates == 4:
        w, u, b = (_swap_last_two(x, hidden) for x in (w, u, b))
    if gates == 3:
        second[2 * hidden :] = _array(p["d"])
    theirs = {"weight_ih": w.T, "weight_hh": u.T, "bias_ih": b, "bias_hh": second}
    return {name: np.ascontiguousarray(x) for name, x in theirs.items()}


def _swap_last_two(x: np.ndarray, hidden: int) -> np.ndarray:
    """i, f, o, g to i, f, g, o, and back."""
    i, f, o, g = np.split(x, [hidden, 2 * hidden, 3 * hidden], -1)
    return np.concatenate([i, f, g, o], -1)
