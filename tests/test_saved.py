"""What outlives a process: weights as safetensors, and compiled forwards that run without their source."""

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
from tests.programs import E, H
from tests.truth import assert_close


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


# ---- compiled forwards ----


def counting(params: Any, carry: Any, x: Any) -> Any:
    """A plain cell that counts, and pushes both of its states."""
    h = jnp.tanh(carry["h"] @ params["u"] + x @ params["w"])
    return {"h": h, "n": carry["n"] + 1}, (h, carry["n"])


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
    function = cavs.from_cell(counting, {"h": jnp.zeros(H), "n": jnp.zeros(())})
    rng = np.random.default_rng(1)
    cell = {"u": 0.3 * rng.standard_normal((H, H)), "w": rng.standard_normal((E, H))}
    params = {"cell": cell, "out": np.ones((H, 2))}

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
    x = rng.standard_normal((sum(lengths), E))
    np.savez(tmp_path / "batch.npz", lengths=lengths, x=x, out=params["out"], **cell)
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
    schedule = cavs.schedule(cavs.from_lengths([4, 1, 2]))
    with pytest.raises(ValueError, match="examples is empty, wanted pairs"):
        cavs.export_forward(lambda p, s, x: x, {}, [])
    with pytest.raises(TypeError, match=re.escape("examples[0] is a Schedule, wanted a pair (sched, inputs)")):
        cavs.export_forward(lambda p, s, x: x, {}, [schedule])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="data is no exported forward"):
        cavs.load_forward(b"something else")
