"""Saved parameters (safetensors) and exported forward passes, which run without their source."""

import dataclasses
import hashlib
import io
import json
import os
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import vertex_programs as vp
from cavs._interop import exported as _exported
from cavs._schedule.schedule import ExportedSchedule
from tests.programs import E, H
from tests.truth import assert_close


def test_weights_as_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    path = tmp_path / "model.safetensors"
    params = {"layers": vp.MultiLayerLSTM(H, E).init(jax.random.key(0)), "half": {"w": jnp.ones(3, jnp.bfloat16)}}
    params["n"] = jnp.int32(7)
    cavs.io.save_params(params, path, {"hidden": str(H)})
    assert_close(cavs.io.load_params(path), params, 0)
    assert_close(cavs.io.load_params(path, like=jax.eval_shape(lambda: params)), params, 0)
    with safetensors.safe_open(path, "flax") as file:
        assert file.metadata() == {"hidden": "5"} and "layers.1.u" in file.keys()  # noqa: SIM118
    cavs.io.save_params(jnp.arange(3), path)
    assert_close(cavs.io.load_params(path), jnp.arange(3), 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors"]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode  # as umask has it


@pytest.mark.parametrize("dtype", [jnp.float8_e5m2, jnp.float8_e4m3fn, jnp.int4, np.complex128])
def test_weights_that_could_not_be_read_again_are_not_written(dtype: Any, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    name = np.dtype(dtype).name
    with pytest.raises(ValueError, match=f"save_params: params: got {name} at 'a.w'; expected one of .*save_checkpoint"):
        cavs.io.save_params({"a": {"w": np.ones(3).astype(dtype)}}, tmp_path / "w")
    assert not list(tmp_path.iterdir())


def test_weights_do_not_depend_on_how_arrays_lie_in_memory(tmp_path: Path) -> None:
    """As those that `params_from_torch` transposes, or slices of others."""
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    x = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    params = {
        **{"transposed": x.T, "columns": x[:, ::2], "reversed": x[::-1], "diagonal": x.diagonal(), "scalar": x[1, 2]},
        "same": np.broadcast_to(x[0], (9, 6)),
        "torch": cavs.interop.params_from_torch({"weight_ih_l0": x[:3, :2], "weight_hh_l0": x[:3, :1]}),
    }
    cavs.io.save_params(params, tmp_path / "w")
    assert_close(cavs.io.load_params(tmp_path / "w"), jax.tree.map(np.array, params), 0)
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '\S*/no/w'"):
        cavs.io.save_params(params, tmp_path / "no" / "w")


def test_weights_of_modules_as_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    cell = eqx.nn.GRUCell(E, H, key=jax.random.key(0))
    cavs.io.save_params(cell, tmp_path / "cell")
    assert sorted(cavs.io.load_params(tmp_path / "cell")) == ["bias", "bias_n", "weight_hh", "weight_ih"]
    assert_close(cavs.io.load_params(tmp_path / "cell", like=cell), cell, 0)
    with pytest.raises(TypeError, match="at 'activation'; expected only arrays. For an Equinox module write equinox.filter"):
        cavs.io.save_params(eqx.nn.MLP(E, H, 4, 1, key=jax.random.key(0)), tmp_path / "mlp")


@pytest.fixture
def of_32_bits() -> Iterator[None]:
    jax.config.update("jax_enable_x64", False)
    yield
    jax.config.update("jax_enable_x64", True)


def test_weights_of_numpy_load_like_themselves_in_32_bits(tmp_path: Path, of_32_bits: None) -> None:
    params = {"w": np.ones(2), "n": np.arange(3)}
    cavs.io.save_params(params, tmp_path / "a")
    found = cavs.io.load_params(tmp_path / "a", like=params)
    assert found["w"].dtype == np.float32 and found["n"].dtype == np.int32
    with pytest.raises(ValueError, match=re.escape("got float32[2] at 'w'; expected float16[2], as in like")):
        cavs.io.load_params(tmp_path / "a", like=params | {"w": np.ones(2, np.float16)})


@pytest.mark.parametrize("value", [2**40, 2**40 + 1.0, 1e300])
def test_weights_that_32_bits_cannot_hold_are_refused(value: float, tmp_path: Path, of_32_bits: None) -> None:
    """An integer of 64 bits was 0, and a float infinite."""
    cavs.io.save_params({"w": np.array([value]), "small": np.ones(2, jnp.bfloat16)}, tmp_path / "a")
    for like in (None, {"w": np.array([value]), "small": np.ones(2, jnp.bfloat16)}):
        if isinstance(value, float) and value < 1e39:  # which is rounded
            assert cavs.io.load_params(tmp_path / "a", like)["w"] == np.float32(value)
            continue
        with pytest.raises(ValueError, match="load_params: .*: got an array 'w' of dtype .*64 with .* as JAX has 32 bits"):
            cavs.io.load_params(tmp_path / "a", like)


def test_weights_that_differ_from_like_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    path = tmp_path / "w"
    cavs.io.save_params({"a": np.ones(3)}, path)
    for like, match in (
        ({"a": np.ones(2)}, "got float64[3] at 'a'; expected float64[2], as in like"),
        ({"a": np.ones(3), "b": np.ones(2)}, "got nothing at 'b'; expected float64[2], as in like"),
        ({}, "got float64[3] at 'a'; expected nothing, as in like"),
    ):
        with pytest.raises(ValueError, match=re.escape(match)):
            cavs.io.load_params(path, like=like)
    with pytest.raises(TypeError, match=re.escape("at 'key'; expected only arrays. Write jax.random.key_data(key)")):
        cavs.io.save_params({"key": jax.random.key(0)}, path)
    with pytest.raises(ValueError, match="got two leaves with the name 'a.b'"):
        cavs.io.save_params({"a.b": 1, "a": {"b": 2}}, path)


def test_names_that_are_prefixes_of_others_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    path = tmp_path / "w"
    for names in (("a", "a.b"), ("a.b", "a.b.c.d"), ("x.0", "x.0.y")):
        params = {name: jnp.full(2, float(i)) for i, name in enumerate(names)}
        cavs.io.save_params(params, path)
        with pytest.raises(ValueError, match=f"load_params: {path}: .*: got an array beside one whose name begins with it"):
            cavs.io.load_params(path)
        assert_close(cavs.io.load_params(path, like=params), params, 0)


def test_the_error_of_an_invalid_weights_file_names_it(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    path = tmp_path / "w"
    cavs.io.save_params({"a": np.arange(9.0)}, path)
    data = path.read_bytes()
    for broken in (b"", data[:5], data[:-1], b"\xff" * 40, data.replace(b"F64", b"X64"), data.replace(b"[9]", b"[8]")):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=f"load_params: {path} is not a complete safetensors file"):
            cavs.io.load_params(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        cavs.io.load_params(tmp_path / "nowhere")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(OSError, match="is not a regular file.*pipe"):
            cavs.io.load_params(tmp_path / "pipe")


# ---- compiled forwards ----


def counting(params: Any, carry: Any, x: Any) -> Any:
    """A plain cell with a counter, which pushes both of its states."""
    h = jnp.tanh(carry["h"] @ params["u"] + x @ params["w"])
    return {"h": h, "n": carry["n"] + 1}, (h, carry["n"])


SERVE = """
import sys, jax, numpy as np, cavs
jax.config.update("jax_enable_x64", True)
folder = sys.argv[1]
data = np.load(folder + "/batch.npz")
exported = cavs.interop.load_forward(open(folder + "/forward.cavs", "rb").read())
graphs = cavs.from_lengths(data["lengths"])
sched = cavs.schedule(graphs, shapes=list(exported.shapes))
params = {"cell": {name: data[name] for name in ("u", "w")}, "out": data["out"]}
np.save(folder + "/scores.npy", exported(params, sched, {"x": sched.pad(data["x"])})["scores"])
"""


def test_an_exported_forward_runs_without_its_source(tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    function = cavs.interop.from_cell(counting, {"h": jnp.zeros(H), "n": jnp.zeros(())})
    rng = np.random.default_rng(1)
    cell = {"u": 0.3 * rng.standard_normal((H, H)), "w": rng.standard_normal((E, H))}
    params = {"cell": cell, "out": np.ones((H, 2))}

    def forward(params: Any, sched: cavs.Schedule, inputs: Any) -> Any:
        h, _ = cavs.run(function, params["cell"], sched, inputs["x"], select=sched.roots)
        return {"scores": jax.nn.softmax(h @ params["out"])}

    # Two shapes. A batch that was not among the examples fits the first.
    examples = []
    for lengths in ([9, 8, 7], [40, 30, 20]):
        schedule = cavs.schedule(cavs.from_lengths(lengths))
        examples.append((schedule, {"x": np.zeros((schedule.shape.vertices, E))}))
    exported = cavs.interop.export_forward(forward, jax.eval_shape(lambda: params), [*examples, examples[0]])
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
            "expected one of the exported shapes, whose (graphs, padded vertices) are [(3, 32), (3, 104)]",
        ),
        (
            (params, schedule, {"x": x}),
            f"inputs: got float64[22, {E}] at 'x'; expected float64[32, {E}]. Pad inputs on the host",
        ),
        ((params["cell"], schedule, inputs), "params: got nothing at 'cell.u'; expected"),
        ((params, schedule, inputs | {"y": x}), f"inputs: got float64[22, {E}] at 'y'; expected nothing"),
    ):
        with pytest.raises(ValueError, match=re.escape(match)):
            exported(*given)


def test_a_jitted_forward_is_exported_whether_or_not_it_ran_before() -> None:
    """It may have been traced with engine `native`, whose library other processes do not have."""
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    program = vp.TreeFC(8)
    F, params = program.vertex_function(), program.init(jax.random.key(0))
    sched = cavs.schedule(cavs.from_parents([[2, 2, -1], [1, 2, -1]]))
    inputs = sched.pad(np.random.default_rng(0).standard_normal((6, 8), np.float32))
    forward = jax.jit(lambda params, sched, inputs: cavs.run(F, params, sched, inputs, select=sched.roots))
    want = forward(params, sched, inputs)
    exported = cavs.interop.export_forward(forward, params, [(sched, inputs)])
    assert_close(exported(params, sched, inputs), want, 1e-5)


def test_schedules_that_a_forward_closes_over_or_gets_as_inputs_are_exported() -> None:
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")

    def five(params: Any, v: cavs.Vertex) -> None:  # compiled code checks that no vertex has more children
        h = jnp.tanh(sum(v.gather(k) for k in range(5)) @ params + v.pull())
        v.scatter(h)
        v.push(h)

    F, params = cavs.VertexFunction(five, state=(8,), arity=5), jnp.eye(8, dtype=jnp.float32)
    sched = cavs.schedule(cavs.from_parents([[5] * 5 + [-1], [1, 2, -1]]))
    inputs = {"x": sched.pad(np.random.default_rng(0).standard_normal((9, 8), np.float32)), "other": sched}

    def forward(params: Any, _: cavs.Schedule, inputs: Any) -> Any:
        return [cavs.run(F, params, own, inputs["x"], select=own.roots) for own in (sched, inputs["other"])]

    want = forward(params, sched, inputs)
    exported = cavs.interop.export_forward(forward, params, [(sched, inputs)])
    assert_close(exported(params, sched, inputs), want, 1e-5)


def test_invalid_examples_and_bytes_are_refused() -> None:
    schedule = cavs.schedule(cavs.from_lengths([4, 1, 2]))
    with pytest.raises(ValueError, match="examples: got none; expected pairs"):
        cavs.interop.export_forward(lambda p, s, x: x, {}, [])
    with pytest.raises(TypeError, match=re.escape("examples[0]: got a Schedule; expected a pair (sched, inputs)")):
        cavs.interop.export_forward(lambda p, s, x: x, {}, [schedule])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="data: got bytes of another format"):
        cavs.interop.load_forward(b"something else")


def a_forward(call: str | None = None) -> cavs.interop.Exported:
    """A small exported program. With `call` it calls the external function of that name."""
    schedule = cavs.schedule(cavs.from_lengths([4, 1, 2]))

    def forward(params: Any, sched: cavs.Schedule, x: Any) -> Any:
        kept = params if call is None else jax.ffi.ffi_call(call, jax.ShapeDtypeStruct((2, 2), jnp.float32))(params)
        return jnp.linalg.inv(kept).sum() + sched.num_vertices + x.sum()

    def flat(params: Any, data: Any, inputs: Any) -> Any:
        return forward(params[""], ExportedSchedule(data, schedule.shape), inputs[""])

    arguments = {"": jnp.eye(2)}, jnp.asarray(schedule.data), {"": jnp.ones(3)}
    checks = [] if call is None else [jax.export.DisabledSafetyCheck.custom_call(call)]
    program = jax.export.export(jax.jit(flat), disabled_checks=checks)(*arguments)
    return cavs.interop.Exported((schedule.shape,), (program,))


def test_a_damaged_export_is_refused() -> None:
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    with jax.enable_x64(False):
        data = a_forward().to_bytes()
    assert len(cavs.interop.load_forward(data).shapes) == 1  # linear algebra is what a forward may call
    rng = np.random.default_rng(0)
    for place in rng.integers(0, 8 * len(data), 300):
        broken = bytearray(data)
        broken[place // 8] ^= 1 << place % 8
        with pytest.raises(ValueError, match="^load_forward: "):
            cavs.interop.load_forward(bytes(broken))
    for broken in (b"", data[:10], data[:60], data[:-1], data + b"x"):
        with pytest.raises(ValueError, match="data: got a wrong checksum|data: got bytes of another format"):
            cavs.interop.load_forward(broken)
    with pytest.raises(ValueError, match="data: got format '2'; expected 3. Another version of cavs wrote it"):
        cavs.interop.load_forward(data.replace(b"cavs forward 3", b"cavs forward 2", 1))


def repacked(data: bytes, change: Callable[[dict[str, bytes], random.Random], None], seed: int = 0) -> bytes:
    """An exported program with changed files and a valid checksum, as an attacker could write it."""
    head = len(b"cavs forward 3\n")
    with zipfile.ZipFile(io.BytesIO(data[head + 32 :])) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files, random.Random(seed))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return data[:head] + hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue()


def test_an_invalid_export_raises_one_type() -> None:
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    with jax.enable_x64(False):
        data = a_forward().to_bytes()

    def other_shape(files: dict[str, bytes], rng: random.Random) -> None:
        about = json.loads(files["about.json"])
        shape = cavs.schedule(cavs.from_lengths([90])).shape
        files["about.json"] = json.dumps({"shapes": [shape], "layout": _exported.layout_hash([shape])}).encode()
        assert about["shapes"] != [shape]

    changes: list[Callable[[dict[str, bytes], random.Random], None]] = [
        other_shape,
        lambda files, _: files.pop("0.jax") and None,
        lambda files, _: files.pop("about.json") and None,
        lambda files, _: files.update({"about.json": b"[]"}),
        lambda files, _: files.update({"about.json": b'{"shapes": [[1]], "layout": ""}'}),
        lambda files, _: files.update({"about.json": b"[" * 10**5}),
        *[lambda files, _, n=n: files.update({"0.jax": files["0.jax"][:n]}) for n in (0, 3, 9)],
    ]
    assert len(cavs.interop.load_forward(repacked(data, lambda files, _: None)).shapes) == 1
    for change in changes:
        with pytest.raises(ValueError, match="^load_forward: data: got bytes that cannot be loaded"):
            cavs.interop.load_forward(repacked(data, change))


def test_an_export_that_calls_other_functions_is_refused() -> None:
    pytest.importorskip("flatbuffers", reason="flatbuffers is not installed")
    with jax.enable_x64(False):
        exported = a_forward("xla_ffi_python_cpu_callback")
        data = exported.to_bytes()
    with pytest.raises(ValueError, match="it disables safety checks: .*custom_call"):
        cavs.interop.load_forward(data)
    quiet = dataclasses.replace(exported.programs[0], disabled_safety_checks=())
    data = dataclasses.replace(exported, programs=(quiet,)).to_bytes()
    with pytest.raises(ValueError, match="it calls xla_ffi_python_cpu_callback, which no forward pass needs"):
        cavs.interop.load_forward(data)


def test_numbers_and_names_of_weights(tmp_path):
    path = tmp_path / "w.safetensors"
    cavs.io.save_params({"scale": 2.0}, path)
    assert cavs.io.load_params(path, like={"scale": 1.0})["scale"] == 2
    with pytest.raises(TypeError, match="load_params: like: got a str at 'scale'; expected arrays and numbers"):
        cavs.io.load_params(path, like={"scale": "2"})
    with pytest.raises(ValueError, match="save_params: params: got a leaf '__metadata__', a name of safetensors' own"):
        cavs.io.save_params({"__metadata__": jnp.ones(2)}, path)  # no file that can be read
    with pytest.raises(TypeError, match=r"load_params: path: got a BytesIO; expected .* Write load_params\(path\)"):
        cavs.io.load_params(io.BytesIO())  # type: ignore[arg-type]
