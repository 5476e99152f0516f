"""The systems of the benchmarks agree: losses before and after two updates, and the updated parameters."""

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from bench import cases, suites
from bench.cells import APPLICATIONS, TAGGERS
from bench.systems import SYSTEMS


def assert_agree(case, *systems, count=2):
    """Three steps of each, a system's name or a model, over so many batches; the first is compared with all others."""
    batches, found = cases.dataset(case, count), []
    for system in systems:
        model = SYSTEMS[system].make(case, cases.parameters(case), 2, "cpu") if isinstance(system, str) else system
        found.append(([model.step(b, 0.5) for b in (batches[0], batches[-1], batches[0])], model.params()))
    (losses, params), *others = found
    for other, theirs in others:
        assert losses == pytest.approx(other, rel=1e-5)
        assert params.keys() == theirs.keys()
        for k, v in params.items():
            np.testing.assert_allclose(v, theirs[k], rtol=0, atol=1e-4 * np.abs(v).max(), err_msg=k)


@pytest.mark.parametrize("cell, shape", [("tree_lstm", "complete-8"), ("tree_fc", "sst"), ("lstm", "chains")])
def test_ours_and_plain_jax_agree_in_every_parameter(cell, shape):
    assert_agree(cases.Case(cell, shape, 8, 3, 8), "cavs", "jax_scan")


def test_outputs_that_are_children_stay_in_the_levelled_peer():
    pytest.importorskip("torch", reason="pip install torch")
    import torch

    from bench.peers.torch_levelled import carry

    x = torch.tensor([[1.0], [10.0]])
    # Vertices 2 = 0 + 1 and 3 = 1 + 1, then 4 = 2 + 3. The children of a level are all left ones, then all right ones.
    kids, roots = np.array([0, 1, 1, 1, 2, 3]), np.array([2, 4, 0])
    found = carry(x, [2, 1], [4, 2], kids, roots, lambda _, rows: rows[: len(rows) // 2] + rows[len(rows) // 2 :])
    assert found.ravel().tolist() == [11.0, 31.0, 1.0]


def test_sweeps_over_levels_schedule_as_loops_over_nodes(monkeypatch):
    pytest.importorskip("torch", reason="pip install torch")
    from bench.peers import dynet_graphs, levels

    case, found = cases.Case("tree_lstm", "sst", 8, 30, 8), []
    (batch,) = cases.dataset(case, 1)
    for below in (0, 10**9):
        for module in (levels, dynet_graphs):
            monkeypatch.setattr(module, "_LOOP_BELOW", below)
        agenda = SYSTEMS["dynet_like_agenda"].make(case, cases.parameters(case), 2, "cpu")
        found.append((levels.tree_levels(batch).blocks().tolist(), agenda.step(batch), agenda.step(batch)))
    assert found[0] == found[1]


@pytest.mark.parametrize("cell", APPLICATIONS)
def test_ours_and_torch_agree_in_every_application(cell):
    pytest.importorskip("torch", reason="pip install torch")
    names = ("torch_packed_bilstm", "torch_loop_bilstm") if cell in TAGGERS else ("torch_applications",)
    others = ["dynet_like_agenda"] if cell in SYSTEMS["dynet_like_agenda"].cells else []
    assert_agree(cases.Case(cell, suites.SHAPE[cell], 8, 2, 8), "cavs", *names, *others, count=1)


@pytest.mark.parametrize("name", ["torch_packed_lstm", "torch_padded_lstm"])
def test_ours_and_torch_agree_in_a_gru(name):
    pytest.importorskip("torch", reason="pip install torch")
    assert_agree(cases.Case("gru", "chains", 8, 3, 5), "cavs", name)


def test_ours_and_torch_agree_over_any_fan_in():
    pytest.importorskip("torch", reason="pip install torch")
    assert_agree(cases.Case("child_sum", "dependency", 8, 3, 8), "cavs", "torch_edges")


@pytest.mark.parametrize("cell, shape", [("tree_lstm", "sst"), ("tree_fc", "sst"), ("lstm", "chains")])
def test_torch_and_plain_jax_agree(cell, shape):
    pytest.importorskip("torch", reason="pip install torch")
    names = ["torch_levelled", "torch_manual", "dynet_like_agenda"]
    assert_agree(cases.Case(cell, shape, 8, 3, 8), "jax_scan", *names, *(["torch_packed_lstm"] if cell == "lstm" else []))


@pytest.mark.parametrize("cell, shape, count", [("tree_lstm", "complete-8", 4), ("bilstm", "tagged", 1)])
def test_ours_as_it_runs_on_a_gpu_computes_the_same(cell, shape, count):
    case = cases.Case(cell, shape, 8, 3, 8)
    found = []
    for device in ("cpu", "gpu"):  # there schedules come from a thread, and steps of one shape go in one dispatch
        model = SYSTEMS["cavs"].make(case, cases.parameters(case), 2, device)
        batches = model.load(cases.dataset(case, steps=count))
        found.append(model.run(batches * (8 // count), 0.5))
    model.warm(batches)
    compiled = model.compilations()
    model.run(batches * 8)
    assert model.compilations() == compiled
    assert found[0] == pytest.approx(found[1], rel=1e-5) and len(set(found[0])) == 8


def test_cudnn_of_jax_agrees_where_its_reference_runs(monkeypatch):
    from jax.experimental import rnn

    from bench.peers import jax_cudnn_rnn

    def reference(x, h, c, weights, lengths, *sizes):
        return rnn.lstm_ref(x, h, c, *rnn.unpack_lstm_weights(weights, *sizes[:3], sizes[4]), lengths, *sizes)

    monkeypatch.setattr(jax_cudnn_rnn, "lstm", reference)  # cuDNN itself needs a GPU
    case = cases.Case("lstm", "chains", 8, 3, 5)
    assert_agree(case, jax_cudnn_rnn.JaxCudnnRNN("lstm", cases.parameters(case)), "jax_scan")


@pytest.mark.parametrize(
    "cell, peer", [("tree_lstm", "TorchCudaGraph"), ("lstm", "TorchCudaGraph"), ("lstm", "TorchPackedCudaGraph")]
)
def test_steps_in_a_cuda_graph_are_those_of_the_peer(cell, peer, monkeypatch):
    """Without a GPU: capturing takes the step itself, once a batch; what is sent, put back and kept alive is as there."""
    torch = pytest.importorskip("torch", reason="pip install torch")
    from bench.peers import torch_manual, torch_packed_lstm, torch_peer

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in {
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "graph": lambda graph, pool: contextlib.nullcontext(),
        "graph_pool_handle": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch_peer, "torch_device", lambda name: "cpu")
    case = cases.Case(cell, "sst" if cell == "tree_lstm" else "chains", 16, 3, 16)
    batches = cases.dataset(case, 2)
    module = torch_manual if peer == "TorchCudaGraph" else torch_packed_lstm
    captured = getattr(module, peer)(cell, cases.parameters(case), threads=2, device="gpu")
    plain = SYSTEMS["jax_scan"].make(case, cases.parameters(case), 2, "cpu")
    assert captured.run(batches, 0.5) == pytest.approx(plain.run(batches, 0.5), rel=1e-5)
    for k, v in captured.params().items():
        np.testing.assert_allclose(v, plain.params()[k], rtol=1e-4, atol=1e-6, err_msg=k)


def test_peers_in_bf16_agree_as_far_as_bf16_tells(monkeypatch):
    pytest.importorskip("torch", reason="pip install torch")
    case = cases.Case("lstm", "chains", 16, 3, 16)
    batches, found = cases.dataset(case, 2), {}
    for precision in ("fp32", "bf16"):
        monkeypatch.setenv("BENCH_PRECISION", precision)
        for name in ("torch_packed_lstm", "torch_padded_lstm"):
            model = SYSTEMS[name].make(case, cases.parameters(case), 2, "cpu")
            found[name, precision] = np.array([*model.run(batches, 0.05), model.step(batches[0])])
            assert all(v.dtype == np.float32 for v in model.params().values())
    exact = found["torch_packed_lstm", "fp32"]
    for (_, precision), losses in found.items():
        np.testing.assert_allclose(losses, exact, rtol=1e-5 if precision == "fp32" else 2e-2)
        assert precision == "fp32" or np.abs(losses - exact).max() > 1e-6  # it did round


def test_flashrnn_agrees_in_its_reference():
    pytest.importorskip("flashrnn", reason="pip install flashrnn")
    from bench.peers.torch_flashrnn import TorchFlashRNN

    case = cases.Case("lstm", "chains", 8, 3, 5)
    peer = TorchFlashRNN("lstm", cases.parameters(case), device="cpu", backend="vanilla")  # the kernels need a GPU
    assert_agree(case, peer, "jax_scan")


def test_triton_agrees_in_its_interpreter():
    for module in ("torch", "triton"):
        pytest.importorskip(module, reason="pip install torch triton")
    check = "from tests.test_bench_peers import check_triton; check_triton()"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", check], env=environment, check=True)


def check_triton():
    from bench.peers.torch_triton import TorchTriton

    for name in ("tree_lstm/sst/h48/b3/e20", "tree_lstm/complete-1/h32/b2", "tree_fc/sst/h64/b3"):
        case = cases.parse(name)
        assert_agree(case, TorchTriton(case.cell, cases.parameters(case), device="cpu"), "jax_scan")
