"""Random vertex functions against the per-vertex reference: `python -m tests.random_functions --seconds 600`.

Every failure is shrunk and printed as a script. `--seed 123` runs one case again.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

if not Path("/dev/nvidia0").exists():
    quick = "--xla_backend_optimization_level=0"
    if version("jax").startswith("0.10."):  # 0.11 has no such flag
        quick += " --xla_cpu_use_fusion_emitters=false"  # a third of the time of compilation
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}".strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax  # noqa: E402

import cavs  # noqa: E402
from tests.random_cases import random_case, script  # noqa: E402
from tests.random_check import Outcome, check  # noqa: E402
from tests.random_poison import check_poison
from tests.random_shrink import shrunk  # noqa: E402

# The uses of JAX in F that the documentation of `cavs` excludes.
REFUSALS: tuple[str, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="this case alone, printed")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--engine", default="scan", help="scan, persistent-interpret, persistent, or auto: what cavs chooses")
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--precision", default="highest", choices=["highest", "tf32"])
    parser.add_argument("--poison", action="store_true", help="run it with filled memory, too (GPU: xla_gpu_deterministic_ops)")
    parser.add_argument("--out", help="a file of results, JSON lines")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--shrink-seconds", type=float, default=120, help="for each distinct failure")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    print(f"cavs at {cavs.__file__}, jax {jax.__version__} on {jax.default_backend()}", flush=True)
    engine = None if args.engine == "auto" else args.engine
    float32 = args.float32 or args.engine != "scan"
    started, counts, found = time.time(), Counter(), {}
    seeds = [args.seed] if args.seed is not None else range(args.first_seed, args.first_seed + args.count)
    done = 0
    for seed in seeds:
        if time.time() - started > args.seconds:
            break
        begin = time.time()
        case = random_case(seed, engine, float32, args.precision)
        if args.seed is not None:
            print(script(case))
        outcome = guarded(case)
        if args.poison and outcome.status == "ok":
            poison = guarded(case, check_poison)
            outcome = outcome if poison.status == "ok" else poison
        done += 1
        counts[f"{outcome.status} {outcome.engine}".strip()] += 1
        line: dict[str, Any] = {
            "seed": seed,
            "status": outcome.status,
            "engine": outcome.engine,
            "what": outcome.what,
            "text": outcome.text,
        }
        line["seconds"] = round(time.time() - begin, 2)
        if args.out:
            with open(args.out, "a") as file:
                file.write(json.dumps(line) + "\n")
        if outcome.status != "ok":
            print(f"seed {seed}: {outcome.status}: {outcome.what}", flush=True)
        if outcome.failed or (outcome.status == "refused" and engine == "scan" and not allowed(outcome)):
            found.setdefault(outcome.what, []).append((seed, outcome))
        if done % 20 == 0:
            print(f"... {done} cases, {dict(counts)}, {(time.time() - started) / done:.2f} s each", flush=True)
            jax.clear_caches()
    print(f"{done} cases in {time.time() - started:.0f} s: {dict(counts)}")
    for what, cases in found.items():
        print(f"\n=== {what}: seeds {[seed for seed, _ in cases]}\n{cases[0][1].text}", flush=True)
        if not args.no_shrink:
            case = random_case(cases[0][0], engine, float32, args.precision)
            small = shrunk(case, lambda c, what=what: guarded(c).what == what, args.shrink_seconds)
            print(script(small, guarded(small).text), flush=True)
    return 1 if found else 0


def allowed(outcome: Outcome) -> bool:
    """Returns whether the documentation names an error of engine scan."""
    return any(text in outcome.what for text in REFUSALS)


def guarded(case: Any, way: Any = check) -> Outcome:
    """Runs `check`, and reports errors of the generator as errors."""
    try:
        return way(case)
    except Exception as error:
        return Outcome("error", f"of the generator: {type(error).__name__}", traceback.format_exc()[-1500:])


if __name__ == "__main__":
    sys.exit(main())
