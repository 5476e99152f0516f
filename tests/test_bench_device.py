"""GPU profiles: the events of a profiler, and the kernels of a step in order."""

from types import SimpleNamespace

import jax
import pytest

from bench import cases, device_time, ours


def test_time_on_a_device_counts_overlaps_once():
    events = [("gemm", 0, 10), ("gates", 5, 12), ("MemcpyH2D", 20, 21), ("gemm", 30, 40)]
    found = device_time.summary(events, 2, "test")
    assert found["seconds"] == pytest.approx(23e-9 / 2) and found["span"] == pytest.approx(20e-9)
    assert found["kernels"] == 1.5 and found["heaviest"][0] == ["gemm", pytest.approx(10e-9), 1.0]
    assert device_time.summary([], 2, "test") == {"seconds": None, "why": "test recorded no kernels"}


def test_a_step_is_shown_kernel_after_kernel():
    step = [("cavs_forward_mosaic", 0, 2000), ("gates", 1000, 4000), ("gemm", 5000, 6000)]
    times = (25_000, 0, 32_000, 15_000)  # steps of 15, 10 and 7 us: the median one begins after 15
    events = [(name, start + t, end + t) for t in times for name, start, end in step]
    assert device_time.a_step(events) == [(name, start + 15_000, end + 15_000) for name, start, end in step]
    lines = device_time.text(events, 4).splitlines()
    assert lines[0].split() == "busy 5.0 us, kernels 6.0 us in total".split()
    assert [line.split() for line in lines[2:5]] == [
        ["3.00", "x", "1.00", "gates"],
        ["2.00", "x", "1.00", "cavs_forward_mosaic"],
        ["1.00", "x", "1.00", "gemm"],
    ]
    assert lines[-1].split() == ["5.0", "6.0", "1.0", "gemm"]
    wide = [("cavs_forward_wide_mosaic", -500, -100), *step]
    events = [(name, start + t, end + t) for t in times for name, start, end in wide]
    assert device_time.a_step(events) == [(name, start + 15_000, end + 15_000) for name, start, end in wide]
    assert device_time.a_step(step[1:]) == step[1:] and "no kernels" in device_time.text([], 3)


def test_profiles_are_of_whole_stacks():
    case = cases.parse("tree_lstm/sst/h8/b2")
    model = ours.Cavs(case.cell, cases.parameters(case), device="gpu", engine="scan")
    (stack, *_) = device_time._stacks(model, model.load(cases.dataset(case, 1)))
    assert len(stack) == model.steps > 1 and len(model.train([stack])) == model.steps
    with pytest.raises(SystemExit, match="JAX runs on 'cpu'; expected a GPU"):
        next(device_time.profile([case.name], "tf32"))


@pytest.mark.parametrize(
    ("name", "why"), [("tree", "case: got 'tree'; expected cell/"), ("dagnn/netlist/h8/b2", "of cell 'dagnn'; expected")]
)
def test_profiles_of_what_there_is_not_are_refused(name: str, why: str):
    with pytest.raises(SystemExit, match=why):
        next(device_time.profile([name], "tf32"))


def test_time_on_a_device_is_read_from_the_streams_of_gpus():
    event = SimpleNamespace(name="gemm", start_ns=3.0, duration_ns=4.0)
    lines = [SimpleNamespace(name=n, events=[event]) for n in ("Stream #13(Compute)", "XLA Ops")]
    planes = [SimpleNamespace(name=n, lines=lines) for n in ("/device:GPU:0", "/host:CPU")]
    assert device_time.gpu_events(SimpleNamespace(planes=planes)) == [("gemm", 3.0, 7.0)]


def test_the_profiler_of_jax_is_read_back():
    assert device_time.measure(lambda: jax.block_until_ready(jax.numpy.ones(3) + 1), 1, True)["seconds"] is None  # no GPU
