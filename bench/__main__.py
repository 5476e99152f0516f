"""The commands of the benchmarks.

python -m bench run --suite cavs --quick     times Cavs and its peers; writes results to bench/results/
python -m bench report                       writes the tables, and the README's table
python -m bench profile CASE                 prints the kernels of a training step on this GPU, in order
python -m bench tune                         times layouts of the persistent kernels on this GPU for kernels/tuned/
python -m bench memory --device gpu          measures suite memory: budgets, parts, Echo's models
python -m bench convolution                  times convolutions of 3 x 3 and networks of them on this GPU
python -m bench peers                        lists the installed peers, and how to install the others
"""

import argparse
import fnmatch
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import cases, memory, store, suites
from bench.remote import PRECISION, Setting
from bench.report import BUSY_CORES, cannot_run
from bench.runner import BUSY, Bench
from bench.store import median
from bench.systems import PRECISIONS, SYSTEMS

AT_ONCE = max(4, (os.cpu_count() or 1) // 2)  # cases compiled in parallel in a run on a GPU


def main() -> None:
    args = _parser().parse_args()
    args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Times Cavs and its peers. Each command has --help.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(run: Callable[[Any], None], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(run.__name__[1:], help=text)
        made.set_defaults(run=run)
        made.add_argument("--results", type=Path, default=store.RESULTS)
        return made

    _add_run(command(_run, "time a suite"))
    command(_report, "write tables from the results")
    tune = command(_tune, "time layouts of the persistent kernels on this GPU")
    tune.add_argument("--minutes", type=float, default=30.0)
    tune.add_argument("--precision", help="of products, as for jax.default_matmul_precision")
    profile = command(_profile, "print the kernels of a training step of Cavs on this GPU, in order")
    profile.add_argument("cases", nargs="+", metavar="CASE", help="such as tree_lstm/sst/h512/b64")
    profile.add_argument("--precision", choices=PRECISIONS, default=PRECISION["gpu"], help="of products")
    suite = command(_memory, "measure suite memory: budgets, parts, and Echo's models with recompute")
    names = ", ".join(dict.fromkeys((*memory.PROGRAMS, *memory.PLANS, *memory.CASES)))
    suite.add_argument("names", nargs="*", metavar="NAME", help=f"of {names}; all if none")
    suite.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    suite.add_argument("--quick", action="store_true", help="small sizes, four budgets")
    suite.add_argument("--only", choices=memory.PARTS, action="append", help="may be repeated; default all")
    suite.add_argument("--commit", help="the commit of this code, if this is not a git checkout")
    layers = command(_convolution, "time convolutions of 3 x 3, and networks, on this GPU")
    layers.add_argument("names", nargs="*", metavar="PART", help="such as layers, filters:VGG-1 or networks; all if none")
    layers.add_argument("--seconds", type=float, default=1e9, help="begin nothing after this time")
    command(_peers, "list the peers and how to install them")
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("--suite", choices=suites.SUITES, default="cavs")
    run.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    run.add_argument("--quick", action="store_true", help="few cases, short rounds: under 10 minutes")
    run.add_argument("--file", help="SST-like trees to use instead of the generator, such as train.txt or train.txt.gz")
    run.add_argument("--only", default="*", help="the cases to run, such as 'tree_lstm/*/h256/*'")
    run.add_argument("--systems", help="the systems to run, comma-separated; default: those of the suite")
    run.add_argument("--threads", type=int, default=2)
    run.add_argument("--precision", choices=PRECISIONS, help="of products on a GPU; default tf32")
    run.add_argument("--rounds", type=int, help="rounds over the batches; default 7, quick 3")
    run.add_argument("--minutes", type=float, default=float("inf"), help="start no case after this time; run again to continue")
    run.add_argument("--again", action="store_true", help="repeat cases that today's results hold already")
    run.add_argument("--python", action="append", default=[], metavar="SYSTEM=PATH", help="run a system with this interpreter")
    run.add_argument("--commit", help="the commit of this code, if this is not a git checkout")


def _profile(args: argparse.Namespace) -> None:
    from bench.device_time import profile

    for text in profile(args.cases, args.precision):
        print(text, flush=True)


def _tune(args: argparse.Namespace) -> None:
    from bench.tune import tune

    for line in tune(args.minutes, args.precision):
        print(line, flush=True)


def _run(args: argparse.Namespace) -> None:
    deadline = time.monotonic() + 60 * args.minutes
    if (load := os.getloadavg()[0]) > BUSY:
        print(f"The machine is busy (load {load:.1f}): results will be noisy. The record says so.")
    names = tuple(args.systems.split(",")) if args.systems else suites.systems_of(args.suite, args.quick, args.device)
    wanted = [c for c in suites.cases_of(args.suite, args.quick, args.device) if fnmatch.fnmatch(c.name, args.only)]
    if not wanted:
        raise SystemExit(f"no case of suite {args.suite!r} matches {args.only!r}")
    if args.precision == PRECISION[args.device]:
        args.precision = None
    elif args.precision and args.device == "cpu":
        raise SystemExit(f"--precision: got {args.precision!r}; on a CPU products are in fp32. Omit it, or add --device gpu.")
    args.results.mkdir(parents=True, exist_ok=True)
    pythons, log = dict(p.split("=", 1) for p in args.python), args.results / "workers.log"
    bench = Bench(
        tuple(n for n in names if _needed(args, n, wanted)), Setting(args.device, args.threads, args.precision, pythons, log)
    )
    for name, why in bench.missing.items():
        print(f"{name} is not installed: {why}")
    if not bench.versions:
        raise SystemExit(f"no system can run on {args.device} on this machine")
    try:
        with tempfile.TemporaryDirectory() as temporary:
            _run_cases(args, bench, wanted, names, _packed(args.file, temporary), deadline)
    finally:
        bench.close()


def _needed(args: argparse.Namespace, name: str, wanted: list[cases.Case]) -> bool:
    """Returns whether a system runs any of the cases."""
    precision = args.precision or PRECISION[args.device]
    return any(
        not SYSTEMS[name].runs(c, args.device, args.quick, precision)
        and not suites.left_out(args.suite, c, name, args.quick, args.device)
        for c in wanted
    )


def _packed(file: str | None, folder: str) -> str | None:
    """Converts the trees of a file to a form that every worker reads."""
    if file is None:
        return None
    import numpy as np

    import cavs

    graphs, samples = cavs.read_trees(file), []
    for i in range(len(graphs)):
        g = graphs[i]
        both = np.full((g.num_vertices, 2), -1)
        both[np.diff(g.child_offsets) > 0] = g.children.reshape(-1, 2)
        label = 0 if g.label is None else int(g.label[-1]) % cases.CLASSES
        samples.append({"left": both[:, 0], "right": both[:, 1], "word": g.input_id, "label": label})
    path = str(Path(folder) / "trees.json")
    cases.pack(samples, path)
    return path


def _run_cases(
    args: Any, bench: Bench, wanted: list[cases.Case], names: tuple[str, ...], path: str | None, deadline: float
) -> None:
    names = tuple(n for n in names if args.device in SYSTEMS[n].devices)
    environment = store.environment(args.device, args.threads, bench.versions, args.commit, args.precision)
    device = store.device_name(args.device, args.threads, bench.versions)
    results = store.Store(args.results / device / f"{time.strftime('%Y-%m-%d')}.json")
    precision = {"precision": args.precision} if args.precision else {}
    done = [c for c in wanted if results.done(args.suite, c.name, names, args.quick, args.precision or "")]
    left = [c for c in wanted if args.again or c not in done]
    at_once = AT_ONCE if args.device == "gpu" else 1
    if "torch_flashrnn" in bench.versions:  # it compiles for minutes
        at_once = len(wanted)
    for i in range(0, len(left), at_once):
        if time.monotonic() > deadline:
            print(f"--minutes is over before {left[i].name}: run again to continue")
            break
        for n, record in enumerate(
            bench.run_together(
                left[i : i + at_once],
                names,
                quick=args.quick,
                rounds=args.rounds or (3 if args.quick else 7),
                seconds=0.4 if args.quick else 1.0,
                path=path,
                left_out=lambda case, name: suites.left_out(args.suite, case, name, args.quick, args.device),
            ),
            len(wanted) - len(left) + i + 1,
        ):
            record = {"suite": args.suite, "quick": args.quick} | precision | record
            results.add(record, environment)
            print(f"{n} of {len(wanted)}: {_line(record)}", flush=True)
            if record.get("other_cores", 0) > BUSY_CORES:
                print(f"  noisy: other programs used {record['other_cores']:.1f} cores during this case")
    print(f"{results.path}: {len(results.data['records'])} cases. Next: python -m bench report")


def _line(record: dict) -> str:
    """Formats a case as one line, in milliseconds per step."""
    parts = []
    for name, s in record["systems"].items():
        time_ = median(s)
        if time_ is None and cannot_run(s):
            continue
        parts.append(f"{name} {1e3 * time_:.3g}" if time_ is not None else f"{name} -")
        if not s.get("agrees", True):
            parts[-1] += " (different loss)"
    return f"{record['case']}: ms a step: {', '.join(parts)}"


def _report(args: argparse.Namespace) -> None:
    from bench import memory_report, report

    path, readme = args.results / "TABLES.md", store.RESULTS.parent.parent / "README.md"
    path.write_text(report.tables(store.latest(args.results)))
    if args.results.resolve() == store.RESULTS:
        readme.write_text(report.with_main_table(readme.read_text(), store.latest()))
    print(*filter(None, (path, memory_report.write(args.results))))


def _convolution(args: argparse.Namespace) -> None:
    from bench import convolution

    convolution.main(args.results, args.seconds, args.names)


def _memory(args: argparse.Namespace) -> None:
    wanted = memory.tasks(args.device, memory.SIZES[args.device, args.quick], args.only or memory.PARTS, args.names or None)
    if not wanted:
        raise SystemExit(f"memory: {args.only} has no measurement of {args.names}. Write python -m bench memory.")
    found = memory.run(args.device, wanted, args.results, args.commit)
    failed = [r for r in found if "error" in r]
    print(f"{len(found)} measurements, {len(failed)} failed. Next: python -m bench report")


def _peers(args: argparse.Namespace) -> None:
    for name, s in SYSTEMS.items():
        missing = s.missing()
        print(f"{name}: {', '.join(s.cells)}; on {', '.join(s.devices)}")
        print(f"    needs {', '.join(missing)}: {s.install}" if missing else "    is installed")


if __name__ == "__main__":
    main()
