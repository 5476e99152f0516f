"""Random vertex functions on random graphs, by `cavs` and by a loop over vertices that shares no code with it.

    python -m tests.random_functions --engine native --seeds 0:500 --processes 16 --json results.jsonl

Prints a table of what ran, and a few failures of each kind as short scripts. `--seed 123` prints one case and runs it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

if os.environ.get("JAX_PLATFORMS") == "cpu" or not Path("/dev/nvidia0").exists():
    quick = "--xla_backend_optimization_level=0"
    if version("jax").startswith("0.10."):  # 0.11 has no such flag
        quick += " --xla_cpu_use_fusion_emitters=false"  # a third of the time of compilation
    if quick not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}".strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402

import cavs  # noqa: E402
from tests.random_bulk import results  # noqa: E402
from tests.random_cases import Case, random_case, script  # noqa: E402
from tests.random_check import check  # noqa: E402
from tests.random_compare import FAILED, Outcome  # noqa: E402
from tests.random_poison import check_poison  # noqa: E402
from tests.random_shrink import shrunk  # noqa: E402

SHRUNK = 3  # cases of one kind of failure that are made smaller
ENGINES = ("scan", "native", "persistent-interpret", "persistent", "auto")
STATUSES = {
    "ok": "ran, with the right results",
    "refused": "refused for a documented reason",
    "ill": "no number to compare with",
    "wrong": "wrong",
    "crashed": "crashed",
    "unclear": "an error without a documented text",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=_range, default=range(100), help="A:B, without B")
    parser.add_argument("--seed", type=int, help="this case alone, printed, in this process")
    parser.add_argument("--engine", default="scan", choices=ENGINES, help="auto: what cavs.run chooses on this machine")
    parser.add_argument("--float32", action="store_true", help="in float32 on engine scan, too")
    parser.add_argument("--precision", default="highest", choices=["highest", "tf32"])
    parser.add_argument("--poison", action="store_true", help="run it with filled memory, too (GPU: xla_gpu_deterministic_ops)")
    parser.add_argument("--processes", type=int, default=1, help="how many run at a time")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which a case counts as crashed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other case after so long")
    parser.add_argument("--json", help="a file of results, JSON lines; the last one is the table")
    parser.add_argument("--shrink-seconds", type=float, default=120, help="for each failure; 0: none is shrunk")
    parser.add_argument("--shrink", type=int, help=argparse.SUPPRESS)
    parser.add_argument("chunk", type=int, nargs="*", help=argparse.SUPPRESS)  # the seeds of a process
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    if args.chunk:
        for seed in args.chunk:
            print(json.dumps(line_of(seed, args)), flush=True)
    elif args.shrink is not None:
        print(smaller(args.shrink, args), flush=True)
    elif args.seed is not None:
        print(script(case_of(args.seed, args)))
        line = line_of(args.seed, args)
        print(*(f"{key}: {value}" for key, value in line.items()), sep="\n")
        return line["status"] in FAILED
    else:
        return bulk(args)
    return 0


def _range(text: str) -> range:
    begin, end = text.split(":")
    return range(int(begin), int(end))


def case_of(seed: int, args: Any) -> Case:
    """Returns the case of a seed with the options of the command line."""
    engine = None if args.engine == "auto" else args.engine
    return random_case(seed, engine, args.float32 or engine != "scan", args.precision)


def line_of(seed: int, args: Any) -> dict[str, Any]:
    """Runs a case, and returns what is reported about it."""
    begin = time.time()
    try:
        case = case_of(seed, args)
    except Exception as error:
        outcome, how = Outcome("crashed", f"the generator: {type(error).__name__}", traceback.format_exc()[-1500:]), ""
    else:
        outcome, how = guarded(case), case.options.how
        if args.poison and outcome.status == "ok" and (poison := guarded(case, check_poison)).status != "ok":
            outcome = poison
    line = {"seed": seed, "status": outcome.status, "engine": outcome.engine, "how": how, "what": outcome.what}
    return line | {"text": outcome.text, "seconds": round(time.time() - begin, 2)}


def guarded(case: Case, way: Any = check) -> Outcome:
    """Runs `check`, and reports errors of the generator as crashes."""
    try:
        return way(case)
    except Exception as error:
        return Outcome("crashed", f"the generator: {type(error).__name__}", traceback.format_exc()[-1500:])


def smaller(seed: int, args: Any) -> str:
    """Returns a script of a case that is shrunk while it fails in the same way."""
    case = case_of(seed, args)
    what = guarded(case).what
    small = shrunk(case, lambda c: guarded(c).what == what, args.shrink_seconds)
    return script(small, guarded(small).text)


def bulk(args: Any) -> int:
    """Runs all seeds in processes of their own, prints the table and the failures, and returns 1 if there are any."""
    print(f"cavs at {cavs.__file__}, jax {jax.__version__}, engine {args.engine}, seeds {args.seeds}", flush=True)
    begin, lines = time.time(), []
    for line in results(command_of(args), args.seeds, args.processes, args.limit, args.seconds):
        lines.append(line)
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(line) + "\n")
        if line["status"] in FAILED:
            print(f"seed {line['seed']}: {line['status']}: {line['what']}", flush=True)
        if len(lines) % 50 == 0:
            print(f"... {len(lines)} cases in {time.time() - begin:.0f} s", flush=True)
    print(*table(lines), f"{len(lines)} cases in {time.time() - begin:.0f} s", sep="\n", flush=True)
    if args.json:
        with open(args.json, "a") as file:
            file.write(json.dumps({"table": table(lines)}) + "\n")
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line["status"] in FAILED:
            found.setdefault(line["what"], []).append(line)
    for what, of in found.items():
        print(f"\n=== {of[0]['status']}: {what}: seeds {[line['seed'] for line in of]}\n{of[0]['text']}", flush=True)
    if args.shrink_seconds:
        some = [line["seed"] for of in found.values() for line in of[:SHRUNK]]
        with ThreadPoolExecutor(args.processes) as pool:
            for seed, text in zip(some, pool.map(lambda seed: shrunk_apart(seed, args), some), strict=True):
                print(f"\n=== seed {seed}\n{text}", flush=True)
    return 1 if found else 0


def shrunk_apart(seed: int, args: Any) -> str:
    """Returns the script of a case that a process of its own makes smaller."""
    command = [*command_of(args), "--shrink", str(seed), "--shrink-seconds", str(args.shrink_seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.shrink_seconds + args.limit)
    except subprocess.TimeoutExpired:
        return "It was not made smaller in time."
    return done.stdout or done.stderr[-1500:]


def command_of(args: Any) -> list[str]:
    """Returns the command that runs the seeds that follow it, with the options of this one."""
    command = [sys.executable, "-m", "tests.random_functions", "--engine", args.engine, "--precision", args.precision]
    return command + [f"--{name}" for name in ("float32", "poison") if getattr(args, name)]


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Returns the lines of the final table: how many cases ended in which way, and what ran by which engine and under what."""
    out = []
    for status, meaning in STATUSES.items():
        of = [line for line in lines if line["status"] == status]
        out.append(f"{len(of):6} {meaning}")
        if status == "ok":
            count = Counter((line["engine"], line["how"]) for line in of)
            for engine in sorted({engine for engine, _ in count}):
                ways = ", ".join(f"{n} {how}" for (name, how), n in sorted(count.items()) if name == engine)
                out.append(f"       engine {engine}: {ways}")
        else:
            reasons = Counter(re.sub(r"\d+", "N", line["what"])[:110] for line in of)
            out += [f"       {n:5} {reason}" for reason, n in reasons.most_common(12)]
    return out


if __name__ == "__main__":
    sys.exit(main())
