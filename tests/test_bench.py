"""The benchmarks: runs resume, and tables follow from the results."""

import json
import os
import statistics
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest

from bench import __main__ as command, cases, machine, remote, report, runner, store, suites
from bench.remote import Remote, Setting
from bench.runner import Bench
from bench.systems import SYSTEMS
from bench.worker import Worker

TINY, OTHER = (cases.Case(cell, "complete-4", 8, 3, 8) for cell in ("tree_fc", "tree_lstm"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The records of a tiny run of two systems in workers of their own, and one absent system: two cases, prepared together.

    And the answer of a worker that fails, and the versions.
    """
    log = tmp_path_factory.mktemp("log") / "log"
    bench = Bench(("cavs", "jax_scan"), Setting("cpu", log=log))
    try:
        names, settings = ("cavs", "jax_scan", "torch_packed_lstm"), {"quick": True, "rounds": 2, "seconds": 0.01}

        def skip(case, name):
            return SYSTEMS[name].runs(case, "cpu") or ("not here" if (case, name) == (OTHER, "cavs") else None)

        records = list(bench.run_together([TINY, OTHER], names, left_out=skip, **settings))
        failed = bench.ask("jax_scan", "open", case="nonsense", steps=1)
    finally:
        bench.close()
    return records, failed, bench.versions


@pytest.fixture(scope="module")
def results(ran, tmp_path_factory):
    """The results of the first case, as those of two suites."""
    folder = tmp_path_factory.mktemp("results")
    (record, _), _, versions = ran
    environment = store.environment("cpu", 2, versions)
    kept = store.Store(folder / "cpu-tiny" / "2020-01-01.json")
    for suite in ("cavs", "ablation"):
        kept.add({"suite": suite, "quick": True} | record, environment)
    return folder


@pytest.mark.slow
def test_workers_time_and_check_every_system(results):
    (record, _) = store.latest(results)["cpu-tiny"]
    for name, passes in (("cavs", 5), ("jax_scan", 3)):
        system = record["systems"][name]
        assert system["agrees"] and len(system["losses"]) == 3
        assert len(system["samples"]) >= 2 and len(system["schedule"]) == passes and system["first"] > 0
    assert record["systems"]["torch_packed_lstm"] == {"absent": "no tree_fc"}
    assert record["gemm"] > 0


def test_cases_prepared_together_are_timed_in_workers_of_their_own(ran):
    records, failed, _ = ran
    assert [r["case"] for r in records] == [TINY.name, OTHER.name]
    assert records[1]["systems"]["cavs"] == {"absent": "not here"} and records[1]["systems"]["jax_scan"]["agrees"]
    assert records[0]["systems"]["jax_scan"]["losses"] != records[1]["systems"]["jax_scan"]["losses"]
    assert "expected cell/shape" in failed["error"]


def test_a_sample_on_a_gpu_is_a_stream(monkeypatch):
    """Timed as on a GPU, with workers that answer at once: streams of equal length, however long a step takes."""
    asked, start = [], 3e-3  # seconds before a pipeline runs

    def ask(name, command, slot=0, samples=1, passes=1, **_):
        asked.append((name, command, samples, passes))
        step = {"cavs": 4e-4, "torch_manual": 7e-3, "jax_scan": 1e-6, "torch_levelled": 0.2}[name]
        return {"samples": [step + start / (8 * passes)] * samples} if command == "round" else {}

    names = ("cavs", "torch_manual", "jax_scan", "torch_levelled")
    bench = Bench((), Setting("gpu"))
    monkeypatch.setattr(bench, "ask", ask)
    record = {"case": "", "steps": 8, "systems": {}}
    prepared = {n: {"gflop": 1.0, "losses": [1.0]} for n in names}
    bench._time(record, 0, prepared, 3, 0.4)
    streams = {n: s["stream"] for n, s in record["systems"].items()}
    assert streams["jax_scan"] == runner.LONGEST and streams["torch_levelled"] == 8
    for name in ("cavs", "torch_manual"):
        assert 0.25 < streams[name] * record["systems"][name]["samples"][0] < 0.5
        assert ("schedule", streams[name] // 8) in {(c, p) for n, c, _, p in asked if n == name}
    assert all(len(s["samples"]) >= runner.SAMPLES for s in record["systems"].values())


@pytest.mark.slow
def test_a_worker_times_streams(monkeypatch):
    worker = Worker("cavs", 2, "gpu")
    monkeypatch.setattr(worker, "gemm", dict)
    worker.open("tree_fc/complete-4/h8/b2", 3)
    worker.check()
    assert worker.warm()["engine"] in ("native", "scan") and worker.model.compilations() == 1  # for all lengths
    assert len(worker.round(2, 3)["samples"]) == 2
    found = worker.schedule(2)
    assert len(found["with_schedule"]) == len(found["without_schedule"]) == 5 and worker.model.compilations() == 1


def test_quick_runs_on_a_gpu_take_every_system_once():
    names = suites.systems_of("cavs", True, "gpu")
    first, *others = suites.cases_of("cavs", True, "gpu")
    here = [n for n in names if not suites.left_out("cavs", first, n, True, "gpu")]
    assert set(names) - set(here) == {"cavs_scan", "cavs_persistent"}
    for case in others:
        assert tuple(n for n in names if not suites.left_out("cavs", case, n, True, "gpu")) == tuple(
            n for n in names if n in suites.CLOSEST[case.cell]
        )
        assert all(not SYSTEMS[n].runs(case, "gpu", True) for n in suites.CLOSEST[case.cell])
    assert not any(suites.left_out("cavs", first, n, False, "gpu") for n in names)


def test_a_run_resumes(results):
    kept = store.Store(results / "cpu-tiny" / "2020-01-01.json")
    assert kept.done("cavs", TINY.name, ("cavs", "jax_scan"), True)
    assert not kept.done("cavs", TINY.name, ("cavs", "dynet"), True)
    assert not kept.done("cavs", TINY.name, ("cavs",), False)


class Stopped(Bench):
    """Times nothing; the run is killed before case `stop`."""

    asked: ClassVar[list[str]] = []
    stop = -1

    def __init__(self, names, _):
        self.missing, self.versions = {}, {n: {"python": "3"} for n in names}

    def run_together(self, wanted, names, **_):
        if len(self.asked) == self.stop:
            raise KeyboardInterrupt
        for case in wanted:
            self.asked.append(case.name)
            yield {"case": case.name, "batch": 1, "steps": 1, "systems": {n: {"samples": [1.0]} for n in names}}

    def close(self):
        pass


def test_a_suite_goes_on_where_it_stopped(tmp_path, monkeypatch):
    every = [c.name for c in suites.cases_of("ablation", True)]

    def run(*more, stop=-1):
        monkeypatch.setattr(Stopped, "asked", [])
        monkeypatch.setattr(Stopped, "stop", stop)
        monkeypatch.setattr(sys, "argv", ["bench", "run", "--suite", "ablation", "--quick", "--results", str(tmp_path), *more])
        command.main()

    monkeypatch.setattr(command, "Bench", Stopped)
    run("--minutes", "0")
    assert Stopped.asked == []
    with pytest.raises(KeyboardInterrupt):
        run(stop=2)
    assert Stopped.asked == every[:2]
    run()
    assert Stopped.asked == every[2:]
    run()
    assert Stopped.asked == []
    run("--again", "--only", every[0])
    assert Stopped.asked == every[:1]
    assert sorted(r["case"] for r in next(iter(store.latest(tmp_path).values()))) == sorted(every)


def test_suite_scheduling_holds_every_setting_and_shows_the_share_alone(results, tmp_path):
    every = [c for suite in suites.SUITES for quick in (True, False) for c in suites.cases_of(suite, quick)]
    assert set(suites.cases_of("scheduling", True)) == set(every) and suites.systems_of("scheduling", True) == ("cavs",)
    record = store.latest(results)["cpu-tiny"][0]
    mine = record | {"suite": "scheduling", "systems": {"cavs": record["systems"]["cavs"]}}
    text = report.tables({"cpu-tiny": [mine]})
    assert "every setting of the other suites" in text and "a training step\n" not in text.split("Suite scheduling")[1]
    share = statistics.median(mine["systems"]["cavs"]["schedule"]) / store.median(mine["systems"]["cavs"])
    assert f"({100 * share:.1f} %)" in text


def test_records_of_each_precision_stand_beside_each_other(results, tmp_path, monkeypatch):
    record = dict(store.latest(results)["cpu-tiny"][0])
    record.pop("environment")
    record.pop("date")
    kept = store.Store(tmp_path / "gpu-x" / "2020-01-01.json")
    for precision, ms in (("", 1.0), ("bf16", 0.5)):
        systems = {"cavs": {"samples": [ms * 1e-3], "agrees": True, "engine": "persistent"}}
        of = {"precision": precision} if precision else {}
        kept.add(record | {"suite": "lstm", "systems": systems} | of, store.environment("gpu", 2, {}, "0", precision))
    assert kept.done("lstm", TINY.name, ("cavs",), True, "bf16") and not kept.done("lstm", TINY.name, ("cavs",), True, "fp32")
    text = report.tables(store.latest(tmp_path))
    assert "Suite lstm: a training step" in text and "Suite lstm, bf16: a training step" in text
    assert f"Precision: {store.MEANING['bf16']}." in text and "1 (persistent)" in text and "0.5 (persistent)" in text
    monkeypatch.setattr(sys, "argv", ["bench", "run", "--precision", "bf16", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="on a CPU products are in fp32"):
        command.main()


def test_workers_get_the_precision_of_the_run(monkeypatch):
    seen = []
    monkeypatch.setattr(remote.subprocess, "Popen", lambda *_, env, **__: seen.append(env) or SimpleNamespace(pid=os.getpid()))
    for precision in (None, "bf16"):
        Remote("cavs", Setting("gpu", precision=precision))
    names = ("JAX_DEFAULT_MATMUL_PRECISION", "BENCH_PRECISION")
    assert [[env[n] for n in names] for env in seen] == [["tensorfloat32", "tf32"], ["BF16_BF16_F32", "bf16"]]
    case = cases.Case("lstm", "fixed-64", 256, 64, 256)
    assert SYSTEMS["jax_cudnn_rnn"].runs(case, "gpu", True, "bf16") == "no bf16"
    names = [n for n in suites.systems_of("lstm", True, "gpu") if not SYSTEMS[n].runs(case, "gpu", True, "bf16")]
    assert names == ["cavs", "torch_packed_lstm", "torch_packed_graph", "torch_padded_graph", "torch_flashrnn"]


def test_an_absent_interpreter_is_reported():
    bench = Bench(("dynet",), Setting("cpu", pythons={"dynet": "/no/such/python"}))
    assert "dynet" in bench.missing and not bench.versions


def test_another_loss_is_marked(results):
    found = store.latest(results)
    text = report.tables(found)
    assert TINY.name in text and "(!)" not in text and text == report.tables(json.loads(json.dumps(found)))
    found["cpu-tiny"][0]["systems"]["jax_scan"] |= {"agrees": False, "deviation": 0.5}
    assert "(!)" in report.tables(found)


def test_committed_tables_are_those_of_the_committed_results():
    path = store.RESULTS / "TABLES.md"
    if not path.exists():
        pytest.skip("no results are committed yet")
    assert path.read_text() == report.tables(store.latest()), "run: python -m bench report"


def test_the_readme_shows_the_committed_results():
    readme = (store.RESULTS.parent.parent / "README.md").read_text()
    assert readme == report.with_main_table(readme, store.latest()), "run: python -m bench report"


def test_the_main_table_names_the_fastest_other_system():
    systems = {n: {"samples": [t]} for n, t in (("cavs", 2.0), ("cavs_persistent", 1.0), ("jax_scan", 5.0), ("dynet", 9.0))}
    systems |= {"torch_triton_graph": {"samples": [0.25]}, "dgl": {"absent": "needs dgl"}}
    record = {"suite": "cavs", "case": report.MAIN["gpu"][0], "date": "2020-01-01", "systems": systems}
    text = report.main_table({"gpu-x": [record]})
    step = "Tree-LSTM, hidden size 512, batch size 1"
    assert f"| {step} | GPU | 1000 (persistent) | Triton in a CUDA graph * | 250 | 0.25x |" in text
    assert "GPU: `gpu-x`, 2020-01-01." in text and "They are bounds" in text
    assert report.main_table({"gpu-x": [record | {"suite": "vpps"}]}) == ""
    alone = record | {"systems": {"cavs": systems["cavs"]}}
    assert report.main_table({"gpu-x": [alone]}) == ""
    with_table = report.with_main_table("a\n" + "".join(report.MARKS) + "z\n", {"gpu-x": [record]})
    assert text in with_table and report.with_main_table(with_table, {"gpu-x": [record]}) == with_table


def test_rates_of_products_that_differ_are_told():
    systems = {n: {"samples": [1.0], "gemm": g} for n, g in (("cavs", 500.0), ("jax_scan", 510.0), ("torch_manual", 225.0))}
    assert machine.rates(systems) == {"JAX": 510.0, "PyTorch": 225.0}
    assert "2.3x (GFLOP/s: JAX 510, PyTorch 225)" in (machine.told_apart(machine.rates(systems)) or "")
    assert machine.told_apart({"JAX": 290.0, "PyTorch": 225.0}) is None and machine.told_apart({"JAX": 1.0}) is None
    record = {"suite": "cavs", "case": report.MAIN["cpu"][0], "date": "2020-01-01", "systems": systems}
    text = report.main_table({"cpu-x": [record]})
    assert "CPU: `cpu-x`, 2020-01-01; rate of large products in TFLOP/s: JAX 0.51, PyTorch 0.225, 2.3x apart." in text
