"""Weights of PyTorch's recurrent modules: equal outputs, the documented equations, and the conversion back."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from tests.odd_graphs import chain
from tests.programs import E, H
from tests.truth import assert_close

X = np.random.default_rng(0).standard_normal((17, E))
PROGRAM = {"LSTM": vp.LSTM, "GRU": vp.GRU, "RNN": vp.ElmanRNN}


def torch_weights(kind: str, layers: int, both: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """The state dict of a torch RNN, with the names and shapes of its documentation."""
    rng, gates, out = np.random.default_rng(seed), {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], {}
    for k in range(layers):
        for suffix in ("", "_reverse")[: 1 + both]:
            inputs = E if k == 0 else H * (1 + both)
            shapes = {"weight_ih": (gates * H, inputs), "weight_hh": (gates * H, H), "bias_ih": (gates * H,)}
            for name, shape in (shapes | {"bias_hh": (gates * H,)}).items():
                out[f"{name}_l{k}{suffix}"] = rng.standard_normal(shape) / 2
    return out


def run_stack(kind: str, params: list[Any], graphs: cavs.Graphs, x: Any) -> Any:
    """Runs a stack of vertex programs with the parameters of `params_from_torch`."""
    for layer in params:
        outputs = []
        for name, g in (("forward", graphs), ("backward", graphs.reversed())):
            p = layer.get(name, layer if name == "forward" else None)
            if p is not None:
                program = PROGRAM[kind](*reversed(p["w"].shape[:1] + p["u"].shape[:1]), jnp.float64)
                outputs.append(cavs.run(program.vertex_function(), p, cavs.schedule(g), x))
        x = jnp.concatenate(outputs, -1)
    return x


@pytest.mark.parametrize(("kind", "layers", "both"), [("LSTM", 2, True), ("GRU", 1, True), ("RNN", 2, False)])
def test_weights_of_torch(kind: str, layers: int, both: bool) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (it is installed by hand)")
    module = getattr(torch.nn, kind)(E, H, layers, bidirectional=both).double()
    weights = torch_weights(kind, layers, both)
    module.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()})
    params = cavs.interop.params_from_torch(module.state_dict())
    want = module(torch.from_numpy(X)[:, None])[0][:, 0].detach().numpy()
    np.testing.assert_allclose(run_stack(kind, params, chain(17), X), want, rtol=1e-12, atol=1e-12)
    # Out again, and into a module of its own.
    again = getattr(torch.nn, kind)(E, H, layers, bidirectional=both).double()
    again.load_state_dict({name: torch.from_numpy(x) for name, x in cavs.interop.params_to_torch(params).items()})
    np.testing.assert_allclose(again(torch.from_numpy(X)[:, None])[0][:, 0].detach().numpy(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", "ifgo"), ("GRU", "rzn"), ("RNN", "h")])
def test_weights_of_torch_are_its_documented_equations(kind: str, gates: str) -> None:
    weights = torch_weights(kind, 1, False)
    got = run_stack(kind, cavs.interop.params_from_torch(weights), chain(4), X[:4])
    h = c = np.zeros(H)
    sigmoid = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    for t in range(4):
        a = dict(zip(gates, np.split(weights["weight_ih_l0"] @ X[t] + weights["bias_ih_l0"], len(gates)), strict=True))
        b = dict(zip(gates, np.split(weights["weight_hh_l0"] @ h + weights["bias_hh_l0"], len(gates)), strict=True))
        if kind == "LSTM":
            z = {k: a[k] + b[k] for k in gates}
            c = sigmoid(z["f"]) * c + sigmoid(z["i"]) * np.tanh(z["g"])
            h = sigmoid(z["o"]) * np.tanh(c)
        elif kind == "GRU":
            r, z = sigmoid(a["r"] + b["r"]), sigmoid(a["z"] + b["z"])
            h = (1 - z) * np.tanh(a["n"] + r * b["n"]) + z * h
        else:
            h = np.tanh(a["h"] + b["h"])
        np.testing.assert_allclose(got[t], h, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("program", [vp.GRU(H, E), vp.ElmanRNN(H, E), vp.MultiLayerLSTM(H, E), vp.BiLSTM(H, E, 2)])
def test_params_to_torch_and_back(program: Any) -> None:
    params = jax.tree.map(np.asarray, program.init(jax.random.key(0)))
    state = cavs.interop.params_to_torch(params, "encoder.") | {"decoder.weight": np.ones(3)}
    assert_close(cavs.interop.params_from_torch(state, "encoder."), params if isinstance(params, list) else [params], 0)


def test_invalid_weights_of_torch_are_refused() -> None:
    weights = torch_weights("LSTM", 1, False)
    with pytest.raises(ValueError, match="got names .*a.bias_hh_l0.* without 'weight_ih_l0'.* Write prefix='a.'"):
        cavs.interop.params_from_torch({f"a.{name}": x for name, x in weights.items()})
    with pytest.raises(ValueError, match="got weight_hr \\(proj_size > 0\\)"):
        cavs.interop.params_from_torch(weights | {"weight_hr_l0": np.ones((2, H))})
    with pytest.raises(ValueError, match=re.escape("*_l1: got []; expected weight_ih, weight_hh")):
        cavs.interop.params_from_torch(weights | {"weight_ih_l2": weights["weight_ih_l0"]})
    with pytest.raises(ValueError, match="expected those of a torch.nn.LSTM, GRU or RNN"):
        cavs.interop.params_from_torch(weights | {"weight_hh_l0": np.ones((2 * H, H))})
    with pytest.raises(ValueError, match=re.escape("got ['u', 'w'] in layer 0; expected the parameters of an LSTM")):
        cavs.interop.params_to_torch({"u": np.ones((H, H)), "w": np.ones((E, H))})
    with pytest.raises(ValueError, match="got ndarray in layer 0"):
        cavs.interop.params_to_torch(np.ones(3))
    with pytest.raises(TypeError, match="state_dict: got a list; expected tensors by name. Write module.state_dict()"):
        cavs.interop.params_from_torch([weights])  # type: ignore[arg-type]
    for shape in ((4 * H,), (0, 0)):
        with pytest.raises(ValueError, match="got shapes .*; expected those of a torch.nn.LSTM, GRU or RNN"):
            cavs.interop.params_from_torch(weights | {"weight_hh_l0": np.ones(shape)})
    wrong = {"w": np.ones((E, 2 * H)), "u": np.ones((H, 2 * H)), "b": np.ones(2 * H)}
    gru = jax.tree.map(np.asarray, vp.GRU(H, E).init(jax.random.key(0)))
    for params in (wrong, wrong | {"u": np.ones(H)}, {name: x[..., :0] for name, x in wrong.items()}, gru | {"d": gru["b"]}):
        with pytest.raises(ValueError, match="got shapes .* in layer 0"):
            cavs.interop.params_to_torch(params)
