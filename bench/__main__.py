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
import contextlib
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

    def command(run: Callable[[Any], None], text: str) -> Callable[..., argparse.Action]:
        subparser = commands.add_parser(run.__name__[1:], help=text)
        subparser.set_defaults(run=run)
        subparser.add_argument("--results", type=Path, default=store.RESULTS)
        return subparser.add_argument

    add = command(_run, "time a suite")
    add("--suite", choices=suites.SUITES, default="cavs")
    add("--device", choices=("cpu", "gpu"), default="cpu")
    add("--quick", action="store_true", help="few cases, short rounds: under 10 minutes")
    add("--file", help="SST-like trees to use instead of the generator, such as train.txt or train.txt.gz")
    add("--only", default="*", help="the cases to run, such as 'tree_lstm/*/h256/*'")
    add("--systems", help="the systems to run, comma-separated; default: those of the suite")
    add("--threads", type=int, default=2)
    add("--precision", choices=PRECISIONS, help="of products on a GPU; default tf32")
    add("--rounds", type=int, help="rounds over the batches; default 7, quick 3")
    add("--minutes", type=float, default=float("inf"), help="start no case after this time; run again to continue")
    add("--again", action="store_true", help="repeat cases that today's results hold already")
    add("--python", action="append", default=[], metavar="SYSTEM=PATH", help="run a system with this interpreter")
    add("--commit", help="the commit of this code, if this is not a git checkout")
    command(_report, "write tables from the results")
    add = command(_tune, "time layouts of the persistent kernels on this GPU")
    add("--minutes", type=float, default=30.0)
    add("--precision", help="of products, as for jax.default_matmul_precision")
    add = command(_profile, "print the kernels of a training step of Cavs on this GPU, in order")
    add("cases", nargs="+", metavar="CASE", help="such as tree_lstm/sst/h512/b64")
    add("--precision", choices=PRECISIONS, default=PRECISION["gpu"], help="of products")
    add = command(_memory, "measure suite memory: budgets, parts, and Echo's models with recompute")
    names = ", ".join(dict.fromkeys((*memory.PROGRAMS, *memory.PLANS, *memory.CASES)))
    add("names", nargs="*", metavar="NAME", help=f"of {names}; all if none")
    add("--device", choices=("cpu", "gpu"), default="cpu")
    add("--quick", action="store_true", help="small sizes, four budgets")
    add("--only", choices=memory.PARTS, action="append", help="may be repeated; default all")
    add("--commit", help="the commit of this code, if this is not a git checkout")
    add = command(_convolution, "time convolutions of 3 x 3, and networks, on this GPU")
    add("names", nargs="*", metavar="PART", help="such as layers, filters:VGG-1 or networks; all if none")
    add("--seconds", type=float, default=1e9, help="begin nothing after this time")
    command(_peers, "list the peers and how to install them")
    return parser


def _run(args: argparse.Namespace) -> None:
    deadline, device, quick = time.monotonic() + 60 * args.minutes, args.device, args.quick
    if (load := os.getloadavg()[0]) > BUSY:
        print(f"The machine is busy (load {load:.1f}): results will be noisy. The record says so.")
    names = tuple(args.systems.split(",")) if args.systems else suites.systems_of(args.suite, quick, device)
    names = tuple(n for n in names if device in SYSTEMS[n].devices)
    wanted = [c for c in suites.cases_of(args.suite, quick, device) if fnmatch.fnmatch(c.name, args.only)]
    if not wanted:
        raise SystemExit(f"no case of suite {args.suite!r} matches {args.only!r}")
    if args.precision == PRECISION[device]:
        args.precision = None
    elif args.precision and device == "cpu":
        raise SystemExit(f"--precision: got {args.precision!r}; on a CPU products are in fp32. Omit it, or add --device gpu.")
    args.results.mkdir(parents=True, exist_ok=True)
    pythons, log = dict(p.split("=", 1) for p in args.python), args.results / "workers.log"
    setting = Setting(device, args.threads, args.precision, pythons, log)

    def left_out(case: cases.Case, name: str) -> str | None:
        runs = SYSTEMS[name].runs(case, device, quick, setting.of_products)
        return runs or suites.left_out(args.suite, case, name, quick, device)

    needed = tuple(n for n in names if not all(left_out(c, n) for c in wanted))
    with contextlib.closing(Bench(needed, setting)) as bench, tempfile.TemporaryDirectory() as folder:
        for name, why in bench.missing.items():
            print(f"{name} is not installed: {why}")
        if not bench.versions:
            raise SystemExit(f"no system can run on {device} on this machine")
        environment = store.environment(device, args.threads, bench.versions, args.commit, args.precision)
        folder_of_device = args.results / store.device_name(device, args.threads, bench.versions)
        results = store.Store(folder_of_device / f"{time.strftime('%Y-%m-%d')}.json")
        done = [c for c in wanted if results.done(args.suite, c.name, names, quick, args.precision or "")]
        remaining = [c for c in wanted if args.again or c not in done]
        # Cases that are compiled in parallel. FlashRNN compiles for minutes.
        at_once = AT_ONCE if device == "gpu" else 1
        at_once = len(wanted) if "torch_flashrnn" in bench.versions else at_once
        options = {"rounds": args.rounds or (3 if quick else 7), "seconds": 0.4 if quick else 1.0, "quick": quick}
        options |= {"path": _packed(args.file, folder), "left_out": left_out}
        run_fields = {"suite": args.suite, "quick": quick} | ({"precision": args.precision} if args.precision else {})
        for i in range(0, len(remaining), at_once):
            if time.monotonic() > deadline:
                print(f"--minutes is over before {remaining[i].name}: run again to continue")
                break
            records = bench.run_together(remaining[i : i + at_once], names, **options)
            for n, record in enumerate(records, len(wanted) - len(remaining) + i + 1):
                results.add(run_fields | record, environment)
                print(f"{n} of {len(wanted)}: {_line(record)}", flush=True)
                if record.get("other_cores", 0) > BUSY_CORES:
                    print(f"  noisy: other programs used {record['other_cores']:.1f} cores during this case")
    print(f"{results.path}: {len(results.data['records'])} cases. Next: python -m bench report")


def _packed(file: str | None, folder: str) -> str | None:
    """Converts the trees of a file to a form that every worker reads."""
    if file is None:
        return None
    import numpy as np

    import cavs

    graphs, samples = cavs.read_trees(file), []
    for i in range(len(graphs)):
        g = graphs[i]
        children = np.full((g.num_vertices, 2), -1)
        children[np.diff(g.child_offsets) > 0] = g.children.reshape(-1, 2)
        label = 0 if g.label is None else int(g.label[-1]) % cases.CLASSES
        samples.append({"left": children[:, 0], "right": children[:, 1], "word": g.input_id, "label": label})
    path = str(Path(folder) / "trees.json")
    cases.pack(samples, path)
    return path


def _line(record: dict) -> str:
    """Formats a case as one line, in milliseconds per step."""
    parts = []
    for name, s in record["systems"].items():
        seconds = median(s)
        if seconds is not None or not cannot_run(s):
            ms = "-" if seconds is None else f"{1e3 * seconds:.3g}"
            parts.append(f"{name} {ms}{'' if s.get('agrees', True) else ' (different loss)'}")
    return f"{record['case']}: ms a step: {', '.join(parts)}"


def _report(args: argparse.Namespace) -> None:
    from bench import memory_report, report

    path, readme = args.results / "TABLES.md", store.RESULTS.parent.parent / "README.md"
    path.write_text(report.tables(store.latest(args.results)))
    if args.results.resolve() == store.RESULTS:
        readme.write_text(report.with_main_table(readme.read_text(), store.latest()))
    print(*filter(None, (path, memory_report.write(args.results))))


def _profile(args: argparse.Namespace) -> None:
    from bench.device_time import profile

    for text in profile(args.cases, args.precision):
        print(text, flush=True)


def _tune(args: argparse.Namespace) -> None:
    from bench.tune import tune

    for line in tune(args.minutes, args.precision):
        print(line, flush=True)


def _convolution(args: argparse.Namespace) -> None:
    from bench import convolution

    convolution.main(args.results, args.seconds, args.names)


def _memory(args: argparse.Namespace) -> None:
    tasks = memory.tasks(args.device, memory.SIZES[args.device, args.quick], args.only or memory.PARTS, args.names or None)
    if not tasks:
        raise SystemExit(f"memory: {args.only} has no measurement of {args.names}. Write python -m bench memory.")
    records = memory.run(args.device, tasks, args.results, args.commit)
    failed = [r for r in records if "error" in r]
    print(f"{len(records)} measurements, {len(failed)} failed. Next: python -m bench report")


def _peers(args: argparse.Namespace) -> None:
    for name, s in SYSTEMS.items():
        missing = s.missing()
        print(f"{name}: {', '.join(s.cells)}; on {', '.join(s.devices)}")
        print(f"    needs {', '.join(missing)}: {s.install}" if missing else "    is installed")


if __name__ == "__main__":
    main()
