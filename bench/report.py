"""The Markdown tables of times, and the README's, generated from committed results only. Equal JSON gives equal bytes."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from bench import suites
from bench.cases import parse
from bench.machine import rates, told_apart
from bench.store import Records, median

MOST_SCHEDULING = 0.05  # the largest share of a step that scheduling should take in Cavs
BUSY_CORES = 0.15  # cores used by other programs during a case, above which the table warns

Record: TypeAlias = dict[str, Any]

HEAD = """# Results

`python -m bench report` generates this file from the JSON files next to it; do not edit it. Times are medians of a whole
training step in milliseconds. Ratios compare medians of one run: the time of a system relative to Cavs (below 1: it is faster
than Cavs). The floor is the time of the step's matrix products at the rate of a 1024 x 1024 x 1024 product (8192 on a GPU),
measured in the same run. It excludes element-wise operations, memory traffic and the order of the levels.
"""
OURS = ("cavs", "cavs_scan", "cavs_persistent")
# These replay one captured structure. They are bounds: they cannot train on graphs that change.
BOUNDS = ("torch_cuda_graph", "torch_triton_graph", "torch_packed_graph", "torch_padded_graph")


def engine_of(name: str, system: Record) -> str:
    """Returns the engine that Cavs ran, by its record or its name."""
    return system.get("engine", name.removeprefix("cavs_") if name != "cavs" else "scan")


def cannot_run(system: Record) -> bool:
    """Returns whether a system is absent by design or for lack of a package, rather than because it failed."""
    why = system.get("absent", "")
    return why.startswith(("no ", "not on ", "needs ", "compiles for minutes"))


def tables(by_device: Records) -> str:
    """Returns all tables of all devices."""
    out = [HEAD]
    for device, records in by_device.items():
        out.append(f"\n## {device}\n\n{_environment(records)}\n### Where another system is faster\n\n{_against(records)}")
        for suite, precision in dict.fromkeys((r["suite"], r.get("precision", "")) for r in records):
            suite_records = [r for r in records if (r["suite"], r.get("precision", "")) == (suite, precision)]
            suite_records.sort(key=lambda r: dataclasses.astuple(parse(r["case"])))
            title = f"\n### Suite {suite}{', ' + precision if precision else ''}: "
            if suite == "scheduling":
                out.append(f"{title}every setting of the other suites, Cavs alone\n\n{_schedules(suite_records)}")
                continue
            out.append(f"{title}a training step\n\n{_steps(suite_records)}")
            if precision:
                out.append(f"\nPrecision: {suite_records[0]['environment']['precision']}.\n")
            if suite != "ablation":
                out.append(f"{title}graph construction and scheduling (Cavs 5.2)\n\n{_schedules(suite_records)}")
            if any(_on_device(s) for r in suite_records for s in r["systems"].values()):
                times = _by_system(suite_records, "{}: ms per step, of which products, moves (kernels)", _on_device)
                out.append(f"{title}time on the device alone, by its profiler\n\n{times}")
            if fresh := [r for r in suite_records if not _cached(r)]:
                slow = [n for n in names_of(fresh) if any(r["systems"].get(n, {}).get("first", 0) > 0.5 for r in fresh)]
                firsts = _by_system(fresh, "{}: first step, all batches once, compilations", _compilation, slow)
                out.append(f"{title}compilation, once\n\n{firsts}")
    return "".join(out)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a Markdown table."""
    head = list(head)
    return "".join("| " + " | ".join(r) + " |\n" for r in (head, *rows)).replace("\n", f"\n|{'---|' * len(head)}\n", 1)


def milliseconds(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def names_of(records: list[Record]) -> list[str]:
    """Returns the systems that ran in any of these records, in the order of the suite."""
    names = dict.fromkeys(n for r in records for n in r["systems"])
    return [n for n in names if any(median(r["systems"].get(n, {})) is not None or _failed(r, n) for r in records)]


def best_rates(records: list[Record]) -> dict[str, float]:
    """Returns the best GFLOP/s of a large product in all records that compare libraries, by library; else in all records."""
    best: dict[str, float] = {}
    all_speeds = [rates(r["systems"]) for r in records]
    for speeds in [speeds for speeds in all_speeds if len(speeds) > 1] or all_speeds:
        best |= {library: max(rate, best.get(library, 0.0)) for library, rate in speeds.items()}
    return best


def _environment(records: list[Record]) -> str:
    records = [r for r in records if "precision" not in r] or records
    newest = max(records, key=lambda r: (r["date"], r["started"]))
    e = newest["environment"]
    versions: dict[str, str] = {}
    for system in e["versions"].values():  # Cavs first; a peer under another interpreter adds its own packages
        versions = {k: v for k, v in system.items() if k != "device"} | versions
    changed = " with changes" if e["changed"] else ""
    best = best_rates(records)
    by_rate = ", ".join(f"{library} {rate:.0f}" for library, rate in best.items())
    lines = [
        f"- {newest['date']}, commit {e['commit'][:10]}{changed}, {e['threads']} threads, {e['precision']}, {e['platform']}",
        "- " + ", ".join(f"{k} {v}" for k, v in sorted(versions.items())),
        f"- {e['clock']}",
        f"- Rate of a large float32 product in GFLOP/s, the best measured, by library: {by_rate}",
    ]
    if warning := told_apart(best):
        lines.append(f"- UNEQUAL: {warning}.")
    lacking = {n for n in suites.FAIR for r in records if r["suite"] == "cavs" and not r["systems"].get(n, {}).get("samples")}
    if lacking and e["device"].startswith("cpu"):
        lines.append(f"- INCOMPLETE: some cases of suite cavs lack {', '.join(sorted(lacking))}.")
    if busy := [r["other_cores"] for r in records if r.get("other_cores", 0.0) > BUSY_CORES]:
        lines.append(f"- NOISY: other programs used up to {max(busy):.1f} cores during {len(busy)} of {len(records)} cases.")
    if cached := sum(map(_cached, records)):
        lines.append(f"- JAX found compiled code in its cache in {cached} cases; the tables of compilation omit them.")
    streams = [s["stream"] for r in records for s in r["systems"].values() if "stream" in s]
    if streams and max(streams) > 256:  # on a GPU
        lines.append(f"- A sample is a stream of {min(streams)} to {max(streams)} steps and includes the start-up.")
    if quick := sum(r["quick"] for r in records):
        lines.append(f"- {quick} of {len(records)} cases are from `--quick` runs, with few samples.")
    absent: dict[str, str] = {}
    for r in records:
        absent |= {n: s["absent"] for n, s in r["systems"].items() if s.get("absent", "").startswith("needs ")}
    lines += [f"- Not installed: {name}, {why}" for name, why in absent.items()]
    return "\n".join(lines) + "\n"


def _against(records: list[Record]) -> str:
    """Lists the cases in which another system is faster than Cavs, and those in which Cavs' scheduling takes too much."""
    faster, slow, compared, most = [], [], 0, 0.0
    for r in sorted(records, key=lambda r: (r["suite"], dataclasses.astuple(parse(r["case"])))):
        named = ", ".join([r["suite"], r["case"], *([r["precision"]] if "precision" in r else [])])
        times = _times(r["systems"])
        ours = min((times[n] for n in OURS if n in times), default=None)
        if ours is None:
            continue
        compared += any(n not in OURS for n in times)
        if winners := sorted((t / ours, n) for n, t in times.items() if t < ours and n not in OURS):
            ratios = (f"{n} {ratio:.2f}x{' (a bound)' if n in BOUNDS else ''}" for ratio, n in winners)
            faster.append(f"- {named}: {', '.join(ratios)}\n")
        for n in (n for n in OURS if n in times):
            share = _scheduling(r["systems"][n]) / times[n]
            most = max(most, share)
            if share > MOST_SCHEDULING:
                slow.append(f"- {named}: {n} {100 * share:.1f} %\n")
    return (
        f"Another system is faster in {len(faster)} of {compared} cases:\n\n{''.join(faster)}\n"
        f"Scheduling takes over {100 * MOST_SCHEDULING:.0f} % of a step in host time in "
        + (f"{len(slow)}:\n\n{''.join(slow)}" if slow else f"none of {len(records)} cases: at most {100 * most:.1f} %.\n")
    )


def _times(systems: dict[str, Record]) -> dict[str, float]:
    return {n: t for n, s in systems.items() if (t := median(s)) is not None}


def _scheduling(system: Record) -> float:
    return statistics.median(system["schedule"]) if system.get("schedule") else 0.0


def _failed(record: Record, name: str) -> bool:
    system = record["systems"].get(name, {})
    return "absent" in system and not cannot_run(system)


def _cached(record: Record) -> bool:
    return record["environment"].get("compilation_cache", False)


def _steps(records: list[Record]) -> str:
    others = [n for n in names_of(records) if n != "cavs"]
    rows, failures, disagree = [], {}, []
    for r in records:
        systems, cavs_result = r["systems"], r["systems"].get("cavs", {})
        ours, engine = median(cavs_result), engine_of("cavs", cavs_result)
        floor = r["gflop"] / r["gemm"] if r["gemm"] and "gflop" in r else None

        def time(name: str, systems: Any = systems, ours: Any = ours, r: Any = r) -> str:
            if (t := median(s := systems.get(name, {}))) is None:
                return "failed" if _failed(r, name) else "-"
            return milliseconds(t) + (f" ({t / ours:.2f}x)" if ours else "") + ("" if s["agrees"] else " (!)")

        failures |= {n: systems[n]["absent"] for n in others if _failed(r, n)}
        disagree += [f"{r['case']}: {n} by {s['deviation']:.1e}" for n, s in systems.items() if not s.get("agrees", True)]
        step = milliseconds(ours) + ("" if engine == "scan" else f" ({engine})") if ours else "-"
        step += "" if cavs_result.get("agrees", True) else " (!)"
        share = f"{100 * floor / ours:.0f} %" if floor and ours else "-"
        sizes = f"{r.get('gflop', 0):.3g}", milliseconds(floor) if floor else "-"
        rows.append((r["case"], *sizes, step, share, *map(time, others)))
    notes = [f"- (!) the loss before or after two updates differs from the median of all systems: {x}" for x in disagree]
    notes += [f"- failed: {n}: {why}" for n, why in failures.items()]
    head = ("case", "GFLOP", "floor", "cavs", "of floor", *others)
    return table(head, rows) + ("\n" + "\n".join(notes) + "\n" if notes else "")


def _schedules(records: list[Record]) -> str:
    names = [n for n in names_of(records) if any(r["systems"].get(n, {}).get("schedule") for r in records)]
    adds = any("with_schedule" in r["systems"].get("cavs", {}) for r in records)
    rows = []
    for r in records:
        cells, ours = [], r["systems"].get("cavs", {})
        for n in names:
            t, step = _scheduling(s := r["systems"].get(n, {})), median(s)
            cells.append(f"{milliseconds(t)} ({100 * t / step:.1f} %)" if t and step is not None else "-")
        if adds:
            with_it, without = (statistics.median(ours.get(k, [0.0])) for k in ("with_schedule", "without_schedule"))
            cells.append(f"{100 * (with_it - without) / with_it:.1f} %" if with_it else "-")
        rows.append((r["case"], *cells, milliseconds(ours.get("reading", 0.0))))
    added = ("cavs: time added to the step, from steps with and without scheduling",) if adds else ()
    return table(("case", *(f"{n}, ms (share of its step)" for n in names), *added, "cavs reading files, ms per step"), rows)


def _by_system(records: list[Record], title: str, cell: Callable[[Record], str], names: list[str] | None = None) -> str:
    """Returns a table with a column for each system that has a cell in any record."""
    cell_of = lambda r, n: cell(r["systems"].get(n, {}))  # noqa: E731
    names = [n for n in names_of(records) if any(cell_of(r, n) for r in records)] if names is None else names
    return table(("case", *map(title.format, names)), [(r["case"], *(cell_of(r, n) or "-" for n in names)) for r in records])


def _on_device(system: Record) -> str:
    d = system.get("device", {})
    if not d.get("seconds"):
        return ""
    seconds, products, moves = (milliseconds(d[k]) for k in ("seconds", "products", "moves"))
    return f"{seconds}, {products}, {moves} ({d['kernels']:.0f})"


def _compilation(system: Record) -> str:
    return "{first:.1f} s, {warm:.1f} s, {compilations}".format(**system) if "warm" in system else ""


# --- the README's table

# Its rows, by device. A case without results, or without a peer, has no row.
MAIN = {
    "cpu": (
        *(f"tree_lstm/sst/h{h}/b{b}" for h in (64, 256) for b in (1, 64)),
        "tree_fc/complete-256/h256/b64",
        "lstm/chains/h256/b64",
    ),
    "gpu": (
        *(f"tree_lstm/sst/{size}" for size in ("h512/b1", "h512/b64", "h1024/b64")),
        "tree_fc/complete-256/h512/b64",
        "lstm/chains/h512/b64",
    ),
}
MODELS = {"tree_lstm": "Tree-LSTM", "tree_fc": "Tree-FC", "lstm": "LSTM"}
PEERS = {
    "dynet": "DyNet",
    "jax_cudnn_rnn": "cuDNN through JAX",
    "jax_scan": "JAX, scan over levels",
    "torch_levelled": "PyTorch, levelled by hand",
    "torch_manual": "PyTorch, hand-written backward",
    "torch_packed_graph": "cuDNN in a CUDA graph *",
    "torch_padded_lstm": "PyTorch, nn.LSTM",
    "torch_triton_graph": "Triton in a CUDA graph *",
}
COLUMNS = ("training step", "device", "Cavs, ms", "fastest other system", "its time, ms", "relative to Cavs")
NOTE = """\
\\* These replay one captured structure. They are bounds: they cannot train on graphs that change.
"""
MARKS = ("<!-- bench:begin -->\n", "<!-- bench:end -->\n")


def main_table(by_device: Records) -> str:
    """Returns the table: Cavs and the fastest other system in each case, and the devices and dates under it."""
    rows, measured = [], []
    for device, records in by_device.items():
        kind = device.split("-")[0]
        of = {r["case"]: r for r in records if r["suite"] == "cavs" and "precision" not in r}
        new = [(of[name], row) for name in MAIN.get(kind, ()) if name in of and (row := _main_row(of[name], kind.upper()))]
        if new:
            rows += [row for _, row in new]
            dates = sorted({record["date"] for record, _ in new})
            best = best_rates([record for record, _ in new])
            unequal = f", {max(best.values()) / min(best.values()):.1f}x apart" if told_apart(best) else ""
            listed = ", ".join(f"{library} {rate / 1000:.3g}" for library, rate in best.items()) + unequal
            speed = f"; rate of large products in TFLOP/s: {listed}" if best else ""
            measured.append(f"{kind.upper()}: `{device}`, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}{speed}.")
    if not rows:
        return ""
    text = table(COLUMNS, rows)
    return f"\n{text}\n{' '.join(measured)}\n\n{NOTE if ' *' in text else ''}\n".replace("\n\n\n", "\n\n")


def _main_row(record: Record, device: str) -> tuple[str, ...] | None:
    """Returns a row, or None if Cavs or all other systems have no result."""
    case, times = parse(record["case"]), _times(record["systems"])
    ours = min((n for n in OURS if n in times), key=lambda n: times[n], default=None)
    other = min((n for n in times if n not in OURS), key=lambda n: times[n], default=None)
    if ours is None or other is None:
        return None
    model = f"{MODELS[case.cell]}, hidden size {case.hidden}, batch size {case.batch}"
    engine = " (persistent)" if engine_of(ours, record["systems"][ours]) == "persistent" else ""
    peer = PEERS.get(other, f"{other}{' *' if other in BOUNDS else ''}")
    ratio = f"{times[other] / times[ours]:.2f}x"
    return model, device, milliseconds(times[ours]) + engine, peer, milliseconds(times[other]), ratio


def with_main_table(readme: str, by_device: Records) -> str:
    """Returns the README's text with the table between its marks replaced."""
    before, rest = readme.split(MARKS[0], 1)
    return before + MARKS[0] + main_table(by_device) + MARKS[1] + rest.split(MARKS[1], 1)[1]
