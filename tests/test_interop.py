"""Other systems: their cells as F, their weights, their edge arrays; weights and compiled forwards as files."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from tests.helpers import GRAPHS, E, H, assert_close, chain

CHAINS = cavs.from_lengths([4, 1, 2])
SCHED = cavs.schedule(CHAINS)
X = np.random.default_rng(0).standard_normal((24, E))


def recurrence(step: Any, start: Any, x: Any) -> Any:
    """y of every position of CHAINS, by `step(carry, x) -> (carry, y)` alone."""
    first = np.isin(np.arange(CHAINS.num_vertices), CHAINS.vertex_offsets)

    def one(carry: Any, position: Any) -> Any:
        x, is_first = position
        return step(jax.tree.map(lambda a, b: jnp.where(is_first, a, b), start, carry), x)

    return jax.lax.scan(one, start, (x, first))[1]


def check(function: cavs.VertexFunction, params: Any, step: Any, start: Any) -> None:
    """`run` and its gradients are those of the cell on its own, `step(params, carry, x)`."""

    def both(params: Any, x: Any, run: Any) -> Any:
        pushes = run(params, x)
        return sum((y**2).sum() for y in jax.tree.leaves(pushes)), pushes

    grad, x = jax.jit(jax.grad(both, argnums=(0, 1), has_aux=True), static_argnums=2), jnp.asarray(X[:7])
    got = grad(params, x, lambda p, x: cavs.run(function, p, SCHED, x))
    want = grad(params, x, lambda p, x: recurrence(lambda carry, x: step(p, carry, x), start, x))
    assert_close(got[1], want[1], 1e-12)
    assert_close(got[0], want[0], 1e-10)


# ---- cells ----


def test_equinox_cells() -> None:
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    cell = eqx.nn.LSTMCell(E, H, dtype=jnp.float64, key=jax.random.key(0))
    start = (jnp.zeros(H), jnp.zeros(H))
    step = lambda cell, carry, x: 2 * (cell(x, carry),)  # noqa: E731
    check(cavs.from_cell(step, start), cell, step, start)


def test_equinox_modules_with_functions_among_their_leaves() -> None:
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    module = eqx.nn.MLP(E + H, H, 4, 1, dtype=jnp.float64, key=jax.random.key(0))
    params, static = eqx.partition(module, eqx.is_array)

    def mlp_rnn(params: Any, v: cavs.Vertex) -> None:
        h = eqx.combine(params, static)(jnp.concatenate([v.gather(0), v.pull()]))
        v.scatter(h)
        v.push(h)

    got = cavs.run(cavs.VertexFunction(mlp_rnn, state=(H,), arity=1), params, SCHED, X[:7])
    want = recurrence(lambda h, x: 2 * (module(jnp.concatenate([h, x])),), jnp.zeros(H), X[:7])
    assert_close(got, want, 1e-12)


def test_nnx_cells() -> None:
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    cell = nnx.LSTMCell(E, H, dtype=jnp.float64, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    start = cell.initialize_carry((E,), nnx.Rngs(0))
    # The module itself as params; and its state.
    step = lambda cell, carry, x: cell(carry, x)  # noqa: E731
    check(cavs.from_cell(step, start), cell, step, start)
    graph, state = nnx.split(cell)
    function = cavs.from_cell(lambda state, carry, x: nnx.merge(graph, state)(carry, x), start)
    got = cavs.run(function, state, SCHED, X[:7])
    assert_close(got, recurrence(lambda carry, x: cell(carry, x), start, X[:7]), 1e-12)


def test_linen_cells() -> None:
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    cell = linen.GRUCell(H, dtype=jnp.float64, param_dtype=jnp.float64)
    start = cell.initialize_carry(jax.random.key(0), (E,))
    params = cell.init(jax.random.key(1), start, jnp.asarray(X[0]))
    check(cavs.from_cell(cell.apply, start), params, cell.apply, start)


def plain(params: Any, carry: Any, x: Any) -> Any:
    """A cell as Haiku's transformed ones: functions of params."""
    h = jnp.tanh(carry["h"] @ params["u"] + x @ params["w"])
    return {"h": h, "n": carry["n"] + 1}, (h, carry["n"] * h[:2])


PLAIN = {"u": 0.3 * np.random.default_rng(1).standard_normal((H, H)), "w": np.random.default_rng(2).standard_normal((E, H))}


def test_plain_cells_start_from_their_carry() -> None:
    start = {"h": jnp.linspace(-1, 1, H), "n": jnp.float64(2)}
    check(cavs.from_cell(plain, start), PLAIN, plain, start)


def test_cells_over_dags() -> None:
    start = {"h": jax.ShapeDtypeStruct((H,), jnp.float64), "n": jax.ShapeDtypeStruct((), jnp.float64)}
    graphs = GRAPHS["shared children"]
    function, x = cavs.from_cell(plain, start, reduce="mean"), X[: graphs.num_vertices]
    got = cavs.run(function, PLAIN, cavs.schedule(graphs), x)
    assert_close(got, cavs.interpret(function, PLAIN, graphs, x), 1e-12)


def test_cells_that_are_none() -> None:
    start = jnp.zeros(H)
    with pytest.raises(TypeError, match="cell is a int, wanted a function cell"):
        cavs.from_cell(3, start)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reduce is 'softmax', wanted 'sum', 'mean', 'max', or None for sequences"):
        cavs.from_cell(plain, start, reduce="softmax")
    with pytest.raises(TypeError, match=f"carry has a leaf {H}; wanted arrays"):
        cavs.from_cell(plain, H)
    with pytest.raises(ValueError, match="carry is empty"):
        cavs.from_cell(plain, ())
    function = cavs.from_cell(lambda cell, carry, x: carry, start)
    with pytest.raises(TypeError, match="wanted \\(carry, y\\). For a cell that returns the carry alone, as Equinox"):
        cavs.run(function, PLAIN, SCHED, X[:7])


# ---- PyTorch ----


def torch_weights(kind: str, layers: int, both: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """The state dict of a torch RNN, by names and shapes of its documentation."""
    rng, gates, out = np.random.default_rng(seed), {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], {}
    for k in range(layers):
        for suffix in ("", "_reverse")[: 1 + both]:
            inputs = E if k == 0 else H * (1 + both)
            shapes = {"weight_ih": (gates * H, inputs), "weight_hh": (gates * H, H), "bias_ih": (gates * H,)}
            for name, shape in (shapes | {"bias_hh": (gates * H,)}).items():
                out[f"{name}_l{k}{suffix}"] = rng.standard_normal(shape) / 2
    return out


PROGRAM = {"LSTM": vp.LSTM, "GRU": vp.GRU, "RNN": vp.ElmanRNN}


def ours(kind: str, params: list[Any], graphs: cavs.Graphs, x: Any) -> Any:
    """A stack of our programs with the parameters of `params_from_torch`."""
    for layer in params:
        ways = []
        for name, g in (("forward", graphs), ("backward", graphs.reversed())):
            p = layer.get(name, layer if name == "forward" else None)
            if p is not None:
                program = PROGRAM[kind](*reversed(p["w"].shape[:1] + p["u"].shape[:1]), jnp.float64)
                ways.append(cavs.run(program.vertex_function(), p, cavs.schedule(g), x))
        x = jnp.concatenate(ways, -1)
    return x


@pytest.mark.parametrize(("kind", "layers", "both"), [("LSTM", 2, True), ("GRU", 1, True), ("RNN", 2, False)])
def test_weights_of_torch(kind: str, layers: int, both: bool) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (it is installed by hand)")
    module = getattr(torch.nn, kind)(E, H, layers, bidirectional=both).double()
    weights = torch_weights(kind, layers, both)
    module.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()})
    params = cavs.params_from_torch(module.state_dict())
    x = X[:17]
    want = module(torch.from_numpy(x)[:, None])[0][:, 0].detach().numpy()
    np.testing.assert_allclose(ours(kind, params, chain(17), x), want, rtol=1e-12, atol=1e-12)
    # Out again, and into a module of its own.
    again = getattr(torch.nn, kind)(E, H, layers, bidirectional=both).double()
    again.load_state_dict({name: torch.from_numpy(x) for name, x in cavs.params_to_torch(params).items()})
    np.testing.assert_allclose(again(torch.from_numpy(x)[:, None])[0][:, 0].detach().numpy(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", "ifgo"), ("GRU", "rzn"), ("RNN", "h")])
def test_weights_of_torch_are_its_documented_equations(kind: str, gates: str) -> None:
    weights = torch_weights(kind, 1, False)
    got = ours(kind, cavs.params_from_torch(weights), chain(4), X[:4])
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
    state = cavs.params_to_torch(params, "encoder.") | {"decoder.weight": np.ones(3)}
    assert_close(cavs.params_from_torch(state, "encoder."), params if isinstance(params, list) else [params], 0)


def test_weights_of_torch_that_are_none() -> None:
    weights = torch_weights("LSTM", 1, False)
    with pytest.raises(ValueError, match="no 'weight_ih_l0' among .*a.bias_hh_l0.* Write prefix='a.'"):
        cavs.params_from_torch({f"a.{name}": x for name, x in weights.items()})
    with pytest.raises(ValueError, match="has a weight_hr \\(proj_size > 0\\)"):
        cavs.params_from_torch(weights | {"weight_hr_l0": np.ones((2, H))})
    with pytest.raises(ValueError, match=re.escape("*_l1 has [], wanted weight_ih, weight_hh")):
        cavs.params_from_torch(weights | {"weight_ih_l2": weights["weight_ih_l0"]})
    with pytest.raises(ValueError, match="wanted those of a torch.nn.LSTM, GRU or RNN"):
        cavs.params_from_torch(weights | {"weight_hh_l0": np.ones((2 * H, H))})
    with pytest.raises(ValueError, match=re.escape("layer 0 has ['u', 'w'], wanted the parameters of an LSTM")):
        cavs.params_to_torch(PLAIN)
    with pytest.raises(ValueError, match="layer 0 has shapes"):
        cavs.params_to_torch({"w": np.ones((E, 2 * H)), "u": np.ones((H, 2 * H)), "b": np.ones(2 * H)})


# ---- edge arrays ----


def test_edge_arrays_of_pyg_and_dgl() -> None:
    # Two graphs: 2 -> 0 <- 1, and 3 -> 4 -> 5, 3 -> 5.
    edge_index = np.array([[2, 1, 3, 4, 3], [0, 0, 4, 5, 5]])
    want = cavs.from_edges([3, 3], [[(0, 2), (0, 1)], [(1, 0), (2, 1), (2, 0)]])
    for graphs in (
        cavs.from_edge_index(edge_index, num_nodes=[3, 3]),
        cavs.from_edge_index(edge_index, ptr=np.array([0, 3, 6])),
        cavs.from_edge_index(edge_index, batch=[0, 0, 0, 1, 1, 1]),
        cavs.from_edge_index((edge_index[0], edge_index[1]), num_nodes=np.array([3, 3])),
    ):
        for field in ("vertex_offsets", "child_offsets", "children", "height"):
            np.testing.assert_array_equal(getattr(graphs, field), getattr(want, field))
    one = cavs.from_edge_index(np.zeros((2, 0), int), num_nodes=4, label=[0, 1, 2, 3])
    assert one.num_vertices == 4 and len(one) == 1 and one.label is not None


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, TypeError, "got none of num_nodes, batch and ptr, wanted one of them"),
        ({"num_nodes": 2, "ptr": [0, 2]}, TypeError, "got num_nodes and ptr of"),
        ({"edge_index": np.zeros((3, 2), int), "num_nodes": 2}, ValueError, "has shape (3, 2), wanted (2, E)"),
        ({"edge_index": ([0], [0, 1]), "num_nodes": 2}, ValueError, "has shape [(1,), (2,)], wanted (2, E)"),
        ({"ptr": [1, 2]}, ValueError, "ptr is [1 2], wanted (G + 1,) integers from 0"),
        ({"batch": [0, 2]}, ValueError, "wanted the graph of each vertex, ascending from 0"),
        ({"batch": [1, 1]}, ValueError, "wanted the graph of each vertex, ascending from 0"),
        ({"edge_index": np.array([[0, 1], [1, 0]]), "num_nodes": 2}, ValueError, "cycle"),
        ({"edge_index": np.array([[0], [1]]), "num_nodes": [1, 1]}, ValueError, "from graph 1 to graph 0"),
    ],
)
def test_edge_arrays_that_are_none(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=re.escape(match)):
        cavs.from_edge_index(**{"edge_index": np.array([[0], [1]])} | arguments)


# ---- weights as files ----


def test_weights_as_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    path = tmp_path / "model.safetensors"
    params = {"layers": vp.MultiLayerLSTM(H, E).init(jax.random.key(0)), "half": {"w": jnp.ones(3, jnp.bfloat16)}}
    params["n"] = jnp.int32(7)
    cavs.save_params(path, params, {"hidden": str(H)})
    assert_close(cavs.load_params(path), params, 0)
    assert_close(cavs.load_params(path, like=jax.eval_shape(lambda: params)), params, 0)
    with safetensors.safe_open(path, "flax") as file:
        assert file.metadata() == {"hidden": "5"} and "layers.1.u" in file.keys()  # noqa: SIM118
    cavs.save_params(path, jnp.arange(3))
    assert_close(cavs.load_params(path), jnp.arange(3), 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors"]


def test_weights_of_modules_as_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    cell = eqx.nn.GRUCell(E, H, key=jax.random.key(0))
    cavs.save_params(tmp_path / "cell", cell)
    assert sorted(cavs.load_params(tmp_path / "cell")) == ["bias", "bias_n", "weight_hh", "weight_ih"]
    assert_close(cavs.load_params(tmp_path / "cell", like=cell), cell, 0)
    with pytest.raises(TypeError, match="at 'activation', wanted arrays alone. Of an Equinox module save equinox.filter"):
        cavs.save_params(tmp_path / "mlp", eqx.nn.MLP(E, H, 4, 1, key=jax.random.key(0)))


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    path = tmp_path / "w"
    cavs.save_params(path, {"a": np.ones(3)})
    for like, match in (
        ({"a": np.ones(2)}, "has float64[3] at 'a', but like has float64[2]"),
        ({"a": np.ones(3), "b": np.ones(2)}, "has nothing at 'b', but like has float64[2]"),
        ({}, "has float64[3] at 'a', but like has nothing"),
    ):
        with pytest.raises(ValueError, match=re.escape(match)):
            cavs.load_params(path, like=like)
    with pytest.raises(TypeError, match=re.escape("at 'key', wanted arrays alone. Save jax.random.key_data(key)")):
        cavs.save_params(path, {"key": jax.random.key(0)})
    with pytest.raises(ValueError, match="two leaves of the name 'a.b'"):
        cavs.save_params(path, {"a.b": 1, "a": {"b": 2}})


# ---- compiled forwards as files ----

SERVE = """
import sys, jax, numpy as np, cavs
jax.config.update("jax_enable_x64", True)
folder = sys.argv[1]
data = np.load(folder + "/batch.npz")
exported = cavs.load_forward(open(folder + "/forward.cavs", "rb").read())
graphs = cavs.from_lengths(data["lengths"])
sched = cavs.schedule(graphs, shapes=list(exported.shapes))
params = {"cell": {name: data[name] for name in ("u", "w")}, "out": data["out"]}
np.save(folder + "/scores.npy", exported(params, sched, {"x": sched.pad(data["x"])})["scores"])
"""


def test_an_exported_forward_runs_without_its_source(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    function = cavs.from_cell(plain, {"h": jnp.zeros(H), "n": jnp.zeros(())})
    params = {"cell": PLAIN, "out": np.ones((H, 2))}

    def forward(params: Any, sched: cavs.Schedule, inputs: Any) -> Any:
        h, _ = cavs.run(function, params["cell"], sched, inputs["x"], at=sched.roots)
        return {"scores": jax.nn.softmax(h @ params["out"])}

    # Two buckets; a batch that was not among the examples takes the first.
    examples = []
    for lengths in ([9, 8, 7], [40, 30, 20]):
        schedule = cavs.schedule(cavs.from_lengths(lengths))
        examples.append((schedule, {"x": np.zeros((schedule.shape.vertices, E))}))
    exported = cavs.export_forward(forward, jax.eval_shape(lambda: params), [*examples, examples[0]])
    assert len(exported.shapes) == 2
    (tmp_path / "forward.cavs").write_bytes(exported.to_bytes())
    lengths = [8, 7, 7]
    x = X[: sum(lengths)]
    np.savez(tmp_path / "batch.npz", lengths=lengths, x=x, out=params["out"], **PLAIN)
    command = [sys.executable, "-c", SERVE, str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    want = forward(params, cavs.schedule(cavs.from_lengths(lengths)), {"x": x})
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), want["scores"], rtol=1e-12, atol=1e-12)

    schedule, inputs = examples[0]
    for given, match in (
        (
            (params, cavs.schedule(cavs.from_lengths([9, 8])), inputs),
            "wanted one of the exported shapes, which are of (graphs, padded vertices) [(3, 32), (3, 104)]",
        ),
        ((params, schedule, {"x": x}), f"inputs has float64[22, {E}] at 'x', wanted float64[32, {E}]. Inputs are padded"),
        ((params["cell"], schedule, inputs), "params has nothing at 'cell.u', wanted"),
        ((params, schedule, inputs | {"y": x}), f"inputs has float64[22, {E}] at 'y', wanted nothing"),
    ):
        with pytest.raises(ValueError, match=re.escape(match)):
            exported(*given)


def test_exports_that_are_none() -> None:
    schedule = SCHED
    with pytest.raises(ValueError, match="examples is empty, wanted pairs"):
        cavs.export_forward(lambda p, s, x: x, {}, [])
    with pytest.raises(TypeError, match=re.escape("examples[0] is a Schedule, wanted a pair (sched, inputs)")):
        cavs.export_forward(lambda p, s, x: x, {}, [schedule])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="data is no exported forward"):
        cavs.load_forward(b"something else")


# ---- optax ----


def test_a_chain_of_optax_trains_any_params() -> None:
    optax = pytest.importorskip("optax", reason="optax is not installed")
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    cell = nnx.GRUCell(E, H, dtype=jnp.float64, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    function = cavs.from_cell(lambda cell, carry, x: cell(carry, x), cell.initialize_carry((E,), nnx.Rngs(0)))
    schedule, x = SCHED, SCHED.pad(X[:7])
    chain_ = optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(1e-4), optax.adam(0.05))
    optimiser = optax.apply_if_finite(chain_, 3)

    @jax.jit
    def step(cell: Any, state: Any) -> Any:
        value, grads = jax.value_and_grad(lambda c: (cavs.run(function, c, schedule, x, at=schedule.roots) - 1).var())(cell)
        updates, state = optimiser.update(grads, state, cell)
        return optax.apply_updates(cell, updates), state, value

    state, losses = optimiser.init(cell), []
    for _ in range(12):
        cell, state, value = step(cell, state)
        losses.append(float(value))
    assert losses[-1] < 0.5 * losses[0]
