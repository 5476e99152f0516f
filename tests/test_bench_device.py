"""GPU profiles: the events of a profiler, and the kernels of a step in order."""

from types import SimpleNamespace

import jax
import pytest

from bench import device_time


def test_time_on_a_device_counts_overlaps_once():
    events = [("gemm", 0, 10), ("gates", 5, 12), ("MemcpyH2D", 20, 21), ("gemm", 30, 40)]
    found = device_time.summary(events, 2, "test")
    assert found["seconds"] == pytest.approx(23e-9 / 2) and found["span"] == pytest.approx(20e-9)
    assert found["kernels"] == 1.5 and found["heaviest"][0] == ["gemm", pytest.approx(10e-9), 1.0]
    assert device_time.summary([], 2, "test") == {"seconds": None, "why": "test recorded no kernels"}


def test_time_on_a_device_is_read_from_the_streams_of_gpus():
    event = SimpleNamespace(name="gemm", start_ns=3.0, duration_ns=4.0)
    lines = [SimpleNamespace(name=n, events=[event]) for n in ("Stream #13(Compute)", "XLA Ops")]
    planes = [SimpleNamespace(name=n, lines=lines) for n in ("/device:GPU:0", "/host:CPU")]
    assert device_time.gpu_events(SimpleNamespace(planes=planes)) == [("gemm", 3.0, 7.0)]


def test_the_profiler_of_jax_is_read_back():
    assert device_time.measure(lambda: jax.block_until_ready(jax.numpy.ones(3) + 1), 1, True)["seconds"] is None  # no GPU
