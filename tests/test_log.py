"""The log of a training loop: what it reports, and that it leaves no thread behind."""

import atexit
import gc
import importlib
import json
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import cavs
from cavs import cli
from tests.small_run import SMALL, TREE

GRAPHS = cavs.from_lengths(np.arange(1, 9), label=np.zeros(36, np.int32))


@cavs.data.step
def step(state: Any, sched: cavs.Schedule) -> Any:
    return state + 1, {"loss": 1.0 * state, "vertices": sched.num_vertices}


def threads() -> int:
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "cavs-log":
            thread.join(10)
    return sum(thread.name == "cavs-log" for thread in threading.enumerate())


def test_a_report_has_means_speed_and_where_the_time_goes(tmp_path: Path) -> None:
    found: list[Any] = []
    loader = cavs.data.Loader(GRAPHS, 2, steps=2)
    with cavs.data.Log(loader, found.append, cavs.data.json_lines(tmp_path / "log.jsonl"), step=10) as log:
        state = jnp.int32(0)
        for _ in range(2):
            for batches in loader:
                state, values = step(state, batches)
                log(values)
    assert [(r["step"], r["epoch"], r["batch"]) for r in found] == [(14, 0, 4), (18, 1, 4)]
    assert [(r["loss"], r["vertices"]) for r in found] == [(1.5, 9.0), (5.5, 9.0)]  # four batches of 36 vertices together
    for report in found:
        assert report["vertices_per_second"] == pytest.approx(36 / report["seconds"])
        assert report["steps_per_second"] == pytest.approx(4 / report["seconds"])
        assert all(0 <= report[name] <= 1 for name in ("device", "waiting", "host"))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [{k: x for k, x in line.items() if k != "time"} for line in lines] == found
    single = cavs.data.Loader(GRAPHS, 2, steps=1)
    with cavs.data.Log(single, found.append) as log:
        for _ in single:
            log({"of_classes": np.arange(3.0)})  # a vector, of one step
    assert (found[-1]["step"], found[-1]["of_classes"]) == (4, 1)
    with cavs.data.Log(single, found.append) as log:
        for _ in single:
            log(np.float32(single.batch))
            if single.batch == 3:
                break
    assert [found[-1][name] for name in ("step", "epoch", "batch", "loss")] == [7, 1, 3, 2]  # what was left at the end
    again = cavs.data.Loader(GRAPHS, 2, steps=2)
    again.restore(loader.state())  # a loop that continues also counts on
    with cavs.data.Log(again, found.append) as log:
        for _ in again:
            log(np.zeros(2))
    assert found[-1]["step"] == 12
    late = cavs.data.Loader(GRAPHS, 2, steps=2)
    with cavs.data.Log(late, found.append) as log:
        late.restore(loader.state())  # after the log was created
        for _ in late:
            log(np.full(2, float(late.batch)))
    assert (found[-1]["step"], found[-1]["loss"]) == (12, 3)
    assert threads() == 0


def test_a_metric_of_some_steps_has_the_mean_of_these() -> None:
    """The other steps counted as zeros."""
    found: list[Any] = []
    loader = cavs.data.Loader(GRAPHS, 2, steps=1)
    with cavs.data.Log(loader, found.append) as log:
        for _ in loader:
            log({"loss": np.float32(2)} | ({"norm": np.float32(3)} if loader.batch == 2 else {}))
    assert (found[-1]["loss"], found[-1]["norm"]) == (2, 3)


def test_reports_are_due_after_some_time_and_errors_of_writers_are_raised() -> None:
    loader, found = cavs.data.Loader(GRAPHS, 2, steps=1), []
    log = cavs.data.Log(loader, found.append, every=0.0)
    for _ in loader:
        log(jnp.float32(np.nan))
    log.close()
    assert len(found) == 4 and all(np.isnan(r["loss"]) for r in found)
    broken = cavs.data.Log(loader, lambda report: 1 / 0, every=0.0)
    broken(jnp.float32(1))
    with pytest.raises(ZeroDivisionError):
        broken.close()
    abandoned = cavs.data.Log(loader, found.append)
    abandoned(jnp.float32(1))
    del abandoned, log, broken
    assert threads() == 0
    with pytest.raises(
        TypeError, match=r"Log: writers: got a str; expected functions of one report. Write cavs.data.json_lines"
    ):
        cavs.data.Log(loader, "log.jsonl")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ((np.float32(1), np.float32(0.5)), TypeError, r"got {'loss': \('float32', 'float32'\)}; expected an array"),
        ({"a": {"b": np.float32(1)}}, TypeError, "Write {'loss': loss, 'accuracy': accuracy}"),
        ({"loss": None}, TypeError, "got {'loss': 'NoneType'}"),
        ({"loss": np.complex64(1)}, TypeError, "dict of real arrays"),
        ({"loss": np.float32(1), "epoch": np.float32(7)}, ValueError, "got the metric 'epoch'; expected other names than step"),
    ],
)
def test_values_that_are_no_metrics_are_refused(values: Any, error: type[Exception], match: str) -> None:
    """The mean of a loss and an accuracy was reported as the loss."""
    log = cavs.data.Log(cavs.data.Loader(GRAPHS, 2, steps=1), lambda report: None)
    log(values)
    with pytest.raises(error, match=match):
        log.close()


def test_json_lines_begin_on_a_line_of_their_own(tmp_path: Path) -> None:
    for before, lines in (("", 1), ('{"step": 1}\n', 2), ('{"step": 1}\n{"st', 3)):
        (tmp_path / "log").write_text(before)
        write = cavs.data.json_lines(tmp_path / "log")
        write({"step": 2})
        write({"step": 3})
        assert [json.loads(line)["step"] for line in (tmp_path / "log").read_text().splitlines()[-2:]] == [2, 3]
        assert len((tmp_path / "log").read_text().splitlines()) == lines + 1


def test_json_lines_fail_before_the_loop_and_have_a_folder(tmp_path: Path) -> None:
    """The error came with the first report, after ten seconds or an epoch of training."""
    cavs.data.json_lines(tmp_path / "logs" / "a.jsonl")({"step": 1})
    assert json.loads((tmp_path / "logs" / "a.jsonl").read_text())["step"] == 1
    with pytest.raises(OSError, match=r"a\.jsonl"):
        cavs.data.json_lines(tmp_path / "logs" / "a.jsonl" / "b.jsonl")


def test_json_lines_are_json(tmp_path: Path) -> None:
    cavs.data.json_lines(tmp_path / "log")({"step": 1, "loss": float("nan")})
    assert json.loads((tmp_path / "log").read_text())["loss"] is None


def test_training_writes_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "t.jsonl").write_text("\n".join([json.dumps(TREE)] * 4))
    options = [str(tmp_path / "t.jsonl"), *SMALL, "--epochs", "1", "--out", str(tmp_path / "run")]
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    assert cli.main(["train", *options, "--log", "tensorboard"]) == 2
    assert "--log: tensorboard: the package tensorboardX is not installed. Write: pip install" in capsys.readouterr().err
    monkeypatch.undo()
    assert cli.main(["train", *options, "--log", "json"]) == 0
    steps, scores = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [steps[key] == scores[key] for key in ("step", "epoch", "batch")] == [True] * 3 and scores["step"] == 2
    assert steps["loss"] > 0 and steps["vertices_per_second"] > 0
    assert scores["held_out_loss"] > 0 and 0 <= scores["score"] <= 1


def test_tensorboard_reads_the_event_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboardX")
    Event = importlib.import_module("tensorboardX.proto.event_pb2").Event

    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    cavs.data.tensorboard(tmp_path)({"step": 3, "loss": 0.5})
    at_exit[-1]()
    (file,) = tmp_path.glob("events.out.tfevents.*")
    data, found = file.read_bytes(), []
    while data:  # each record: its length (8 bytes), a checksum (4), the event, a checksum (4)
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[16 + size :]
    assert found == [(3, "loss", 0.5)]
