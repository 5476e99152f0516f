"""The Markdown tables, generated from committed results only. Equal JSON gives equal bytes."""

import dataclasses
import statistics
from typing import Any

from bench import suites
from bench.cases import parse
from bench.machine import rates, told_apart

MOST_SCHEDULING = 0.05  # the largest share of a step that scheduling should take in Cavs
BUSY_CORES = 0.15  # cores used by other programs during a case, above which the table warns

Records = dict[str, list[dict[str, Any]]]

HEAD = """# Results

`python -m bench report` generates this file from the JSON files next to it; do not edit it. Times are medians of a whole
training step in milliseconds. Ratios compare medians of one run: the time of a system relative to Cavs (below 1: it is faster
than Cavs). The floor is the time of the step's matrix products at the rate of a 1024 x 1024 x 1024 product (8192 on a GPU),
measured in the same run. It excludes element-wise operations, memory traffic and the order of the levels.
"""


OURS = ("cavs", "cavs_scan", "cavs_persistent")
# These replay one captured structure. They are bounds: they cannot train on graphs that change.
BOUNDS = ("torch_cuda_graph", "torch_triton_graph", "torch_packed_graph", "torch_padded_graph")


def median(system: dict[str, Any]) -> float | None:
    """Returns the median seconds per step of one system of a record, or None if it did not run."""
    return statistics.median(system["samples"]) if system.get("samples") else None


def engine_of(name: str, system: dict[str, Any]) -> str:
    """Returns the engine that Cavs ran, by its record or its name."""
    return system.get("engine", name.removeprefix("cavs_") if name != "cavs" else "scan")


def cannot_run(system: dict[str, Any]) -> bool:
    """Returns whether a system is absent by design or for lack of a package, rather than because it failed."""
    why = system.get("absent", "")
    return why.startswith(("no ", "not on ", "trees only", "needs ", "compiles for minutes"))


def tables(found: Records) -> str:
    """Returns all tables of all devices."""
    out = [HEAD]
    for device, records in found.items():
        suites = list(dict.fromkeys((r["suite"], r.get("precision", "")) for r in records))
        out.append(f"\n## {device}\n\n{_environment(records)}\n### Where another system is faster\n\n{_against(records)}")
        for suite, precision in suites:
            mine = [r for r in records if (r["suite"], r.get("precision", "")) == (suite, precision)]
            mine.sort(key=lambda r: dataclasses.astuple(parse(r["case"])))
            suite += f", {precision}" if precision else ""
            if suite == "scheduling":
                out.append(f"\n### Suite {suite}: every setting of the other suites, Cavs alone\n\n{_schedules(mine)}")
                continue
            out.append(f"\n### Suite {suite}: a training step\n\n{_steps(mine)}")
            if precision:
                out.append(f"\nPrecision: {mine[0]['environment']['precision']}.\n")
            if suite != "ablation":
                out.append(f"\n### Suite {suite}: graph construction and scheduling (Cavs 5.2)\n\n{_schedules(mine)}")
            if any(s.get("device", {}).get("seconds") for r in mine for s in r["systems"].values()):
                out.append(f"\n### Suite {suite}: time on the device alone, by its profiler\n\n{_device_times(mine)}")
            fresh = [r for r in mine if not _cached(r)]
            if fresh:
                out.append(f"\n### Suite {suite}: compilation, once\n\n{_compilation(fresh)}")
    if found:
        newest = max((r for records in found.values() for r in records), key=lambda r: (r["date"], r["started"]))
        out.append(f"\n## Lines of code for a model (Cavs 5.3)\n\n{_lines(newest['environment']['lines'])}")
    return "".join(out)


def _environment(records: list[dict[str, Any]]) -> str:
    records = [r for r in records if "precision" not in r] or records
    newest = max(records, key=lambda r: (r["date"], r["started"]))
    e = newest["environment"]
    versions: dict[str, str] = {}
    for system in e["versions"].values():  # Cavs first; a peer under another interpreter adds its own packages
        versions = {k: v for k, v in system.items() if k != "device"} | versions
    changed = " with changes" if e["changed"] else ""
    lines = [
        f"- {newest['date']}, commit {e['commit'][:10]}{changed}, {e['threads']} threads, {e['precision']}, {e['platform']}",
        "- " + ", ".join(f"{k} {v}" for k, v in sorted(versions.items())),
        f"- {e['clock']}",
    ]
    found = best_rates(records)
    by_rate = ", ".join(f"{library} {rate:.0f}" for library, rate in found.items())
    lines.append(f"- Rate of a large float32 product in GFLOP/s, the best measured, by library: {by_rate}")
    if warning := told_apart(found):
        lines.append(f"- UNEQUAL: {warning}.")
    lacking = {n for n in suites.FAIR for r in records if r["suite"] == "cavs" and not r["systems"].get(n, {}).get("samples")}
    if lacking and e["device"].startswith("cpu"):
        lines.append(f"- INCOMPLETE: some cases of suite cavs lack {', '.join(sorted(lacking))}.")
    busy = [r for r in records if r.get("other_cores", 0.0) > BUSY_CORES]
    if busy:
        most = max(r["other_cores"] for r in busy)
        lines.append(f"- NOISY: other programs used up to {most:.1f} cores during {len(busy)} of {len(records)} cases.")
    cached = sum(_cached(r) for r in records)
    if cached:
        lines.append(f"- JAX found compiled code in its cache in {cached} cases; the tables of compilation omit them.")
    streams = [s["stream"] for r in records for s in r["systems"].values() if "stream" in s]
    if streams and max(streams) > 256:  # on a GPU
        lines.append(f"- A sample is a stream of {min(streams)} to {max(streams)} steps and includes the start-up.")
    quick = sum(r["quick"] for r in records)
    if quick:
        lines.append(f"- {quick} of {len(records)} cases are from `--quick` runs, with few samples.")
    absent: dict[str, str] = {}
    for r in records:
        absent |= {n: s["absent"] for n, s in r["systems"].items() if s.get("absent", "").startswith("needs ")}
    lines += [f"- Not installed: {name}, {why}" for name, why in absent.items()]
    return "\n".join(lines) + "\n"


def best_rates(records: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the best GFLOP/s of a large product in all records that compare libraries, by library; else in all records."""
    found: dict[str, float] = {}
    each_of = [rates(r["systems"]) for r in records]
    for each in [each for each in each_of if len(each) > 1] or each_of:
        found |= {library: max(rate, found.get(library, 0.0)) for library, rate in each.items()}
    return found


def _against(records: list[dict[str, Any]]) -> str:
    """Lists the cases in which another system is faster than Cavs, and those in which Cavs' scheduling takes too much."""
    faster, slow, compared, most = [], [], 0, 0.0
    for r in sorted(records, key=lambda r: (r["suite"], dataclasses.astuple(parse(r["case"])))):
        times = {n: t for n, s in r["systems"].items() if (t := median(s)) is not None}
        mine = min((times[n] for n in OURS if n in times), default=None)
        if mine is None:
            continue
        bound = {n: " (a bound)" for n in BOUNDS}
        compared += any(n not in OURS for n in times)
        found = [(t / mine, n) for n, t in times.items() if t < mine and n not in OURS]
        if found:
            named = (f"{n} {ratio:.2f}x{bound.get(n, '')}" for ratio, n in sorted(found))
            faster.append(f"- {_named(r)}: {', '.join(named)}\n")
        for n in OURS:
            s = r["systems"].get(n, {})
            share = statistics.median(s["schedule"]) / times[n] if n in times and s.get("schedule") else 0.0
            most = max(most, share)
            if share > MOST_SCHEDULING:
                slow.append(f"- {_named(r)}: {n} {100 * share:.1f} %\n")
    return (
        f"Another system is faster in {len(faster)} of {compared} cases:\n\n{''.join(faster)}\n"
        f"Scheduling takes over {100 * MOST_SCHEDULING:.0f} % of a step in host time in "
        + (f"{len(slow)}:\n\n{''.join(slow)}" if slow else f"none of {len(records)} cases: at most {100 * most:.1f} %.\n")
    )


def _named(record: dict[str, Any]) -> str:
    return ", ".join([record["suite"], record["case"], *([record["precision"]] if "precision" in record else [])])


def row(*cells: str) -> str:
    """Returns a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |\n"


def head(*cells: str) -> str:
    """Returns the first two lines of a Markdown table."""
    return row(*cells) + "|" + "---|" * len(cells) + "\n"


def names_of(records: list[dict[str, Any]]) -> list[str]:
    """Returns the systems that ran in any of these records, in the order of the suite."""
    names = dict.fromkeys(n for r in records for n in r["systems"])
    return [n for n in names if any(median(r["systems"].get(n, {})) is not None or _failed(r, n) for r in records)]


def _persistently(record: dict[str, Any]) -> str:
    engine = engine_of("cavs", record["systems"].get("cavs", {}))
    return "" if engine == "scan" else f" ({engine})"


def _failed(record: dict[str, Any], name: str) -> bool:
    system = record["systems"].get(name, {})
    return "absent" in system and not cannot_run(system)


def _steps(records: list[dict[str, Any]]) -> str:
    names = names_of(records)
    others = [n for n in names if n != "cavs"]
    out = head("case", "GFLOP", "floor", "cavs", "of floor", *others)
    failures, disagree = {}, []
    for r in records:
        ours = median(r["systems"].get("cavs", {}))
        floor = r["gflop"] / r["gemm"] if r["gemm"] and "gflop" in r else None
        share = f"{100 * floor / ours:.0f} %" if floor and ours else "-"
        cells = []
        for n in others:
            s = r["systems"].get(n, {})
            t = median(s)
            if t is None:
                cells.append("failed" if _failed(r, n) else "-")
                if _failed(r, n):
                    failures[n] = s["absent"]
                continue
            cells.append(milliseconds(t) + (f" ({t / ours:.2f}x)" if ours else "") + ("" if s["agrees"] else " (!)"))
        disagree += [f"{r['case']}: {n} by {s['deviation']:.1e}" for n, s in r["systems"].items() if not s.get("agrees", True)]
        mark = "" if r["systems"].get("cavs", {}).get("agrees", True) else " (!)"
        out += row(
            r["case"],
            f"{r.get('gflop', 0):.3g}",
            milliseconds(floor) if floor else "-",
            (milliseconds(ours) + _persistently(r) if ours else "-") + mark,
            share,
            *cells,
        )
    notes = [f"- (!) the loss before or after two updates differs from the median of all systems: {x}" for x in disagree]
    notes += [f"- failed: {n}: {why}" for n, why in failures.items()]
    return out + ("\n" + "\n".join(notes) + "\n" if notes else "")


def _schedules(records: list[dict[str, Any]]) -> str:
    names = [n for n in names_of(records) if any(r["systems"].get(n, {}).get("schedule") for r in records)]
    adds = any("with_schedule" in r["systems"].get("cavs", {}) for r in records)
    columns = (("cavs: time added to the step, from steps with and without scheduling",) if adds else ()) + (
        "cavs reading files, ms per step",
    )
    out = head("case", *(f"{n}, ms (share of its step)" for n in names), *columns)
    for r in records:
        cells = []
        for n in names:
            s = r["systems"].get(n, {})
            step = median(s)
            if not s.get("schedule") or step is None:
                cells.append("-")
                continue
            t = statistics.median(s["schedule"])
            cells.append(f"{milliseconds(t)} ({100 * t / step:.1f} %)")
        ours = r["systems"].get("cavs", {})
        if adds and "with_schedule" in ours:
            with_it, without = (statistics.median(ours[k]) for k in ("with_schedule", "without_schedule"))
            cells.append(f"{100 * (with_it - without) / with_it:.1f} %")
        elif adds:
            cells.append("-")
        out += row(r["case"], *cells, milliseconds(ours.get("reading", 0.0)))
    return out


def _device_times(records: list[dict[str, Any]]) -> str:
    names = [n for n in names_of(records) if any(r["systems"].get(n, {}).get("device", {}).get("seconds") for r in records)]
    out = head("case", *(f"{n}: ms per step, of which products, moves (kernels)" for n in names))
    for r in records:
        cells = []
        for n in names:
            d = r["systems"].get(n, {}).get("device", {})
            cells.append(
                f"{milliseconds(d['seconds'])}, {milliseconds(d['products'])}, {milliseconds(d['moves'])} ({d['kernels']:.0f})"
                if d.get("seconds")
                else "-"
            )
        out += row(r["case"], *cells)
    return out


def _cached(record: dict[str, Any]) -> bool:
    return record["environment"].get("compilation_cache", False)


def _compilation(records: list[dict[str, Any]]) -> str:
    names = [n for n in names_of(records) if any(r["systems"].get(n, {}).get("first", 0) > 0.5 for r in records)]
    out = head("case", *(f"{n}: first step, all batches once, compilations" for n in names))
    for r in records:
        cells = []
        for n in names:
            s = r["systems"].get(n, {})
            cells.append(f"{s['first']:.1f} s, {s['warm']:.1f} s, {s['compilations']}" if "warm" in s else "-")
        out += row(r["case"], *cells)
    return out


def _lines(counted: dict[str, dict[str, int]]) -> str:
    names = list(dict.fromkeys(n for systems in counted.values() for n in systems))
    out = head("model", *names)
    for model, systems in counted.items():
        out += row(model, *(str(systems.get(n, "-")) for n in names))
    return out


def milliseconds(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"
