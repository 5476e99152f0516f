"""The tables of suite `memory`, `MEMORY.md`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import table
from cavs._memory.bytes import (
    text_of,
)

HEAD = """# Memory

`python -m bench report` generates this file from the JSON files next to it; do not edit it. Bytes are those of temporary memory
of the forward and the backward, as XLA assigns them, without parameters, gradients and inputs, unless a column says otherwise.
"""
BUDGETS = """
"Fit" counts the budgets that the compiled step keeps. "Falls": no smaller budget needs more memory. "Compilations": the most
that one plan took. Gradients: the largest difference to those without a budget, relative to the largest element.
"""
PLANS = """
Four budgets of `cavs.memory.plan`, from the whole batch to the smallest plan, and for arrays two of `cavs.memory.recompute`.
"Fit" counts those that the step keeps, compiled again here. "Refused": half of the smallest plan raises a `BudgetError`.
"""
STEPS = """
A capped allocator holds the budget, arguments and results, and 192 MiB for libraries.
"""
ECHO = """
"Smaller" and "time" compare whole steps with `jax.grad`. Estimates, which order the plans that are compiled, are of the loss
and its gradients, compared with these compiled alone.
"""

Record = dict[str, Any]


def write(results: Path) -> Path | None:
    """Writes the tables of all devices. Returns the file, or None if there are no results."""
    loaded = {path.stem.removeprefix("memory-"): json.loads(path.read_text()) for path in sorted(results.glob("memory-*.json"))}
    if not loaded:
        return None
    tables = results / "MEMORY.md"
    tables.write_text("".join([HEAD, *(_of_device(name, data) for name, data in loaded.items())]))
    return tables


def _of_device(name: str, data: dict[str, Any]) -> str:
    records = data["records"]
    environments = [data["environments"][i] for i in sorted({r["environment"] for r in records})]
    commits = ", ".join(dict.fromkeys(e["commit"][:9] + (" (changed)" if e["changed"] else "") for e in environments))
    versions = ", ".join(dict.fromkeys(v for e in environments for v in [e["versions"]["cavs"].get("jax", "")] if v))
    text = f"\n## {name}\n\nCommit {commits}; JAX {versions}; {environments[0]['cores']} cores.\n"
    for part, (title, head, rows, note) in PARTS.items():
        if part_records := [r for r in records if r["part"] == part]:
            table_rows = [row for r in part_records if "error" not in r for row in [rows(r, part_records)] if row]
            text += f"\n### {title}\n\n{table(head, table_rows)}{note}{_failed(part_records)}"
    return text


def _budgets(r: Record, _: Any) -> list[str]:
    points = r["points"]
    counts = [p["compilations"] for p in points if "compilations" in p]
    return [
        r["program"], r["engine"], f"{r['graphs']} x h{r['hidden']}", text_of(points[0]["temp"]), text_of(points[-1]["temp"]),
        f"1/{points[0]['temp'] / points[-1]['temp']:.0f}",
        f"{sum(p['temp'] <= p['budget'] for p in points)} of {len(points)}",
        "yes" if falls(points) else "no", f"{max(counts)}" if counts else "–",
        f"{points[0]['ms']:.4g} to {points[-1]['ms']:.4g}", f"{max(p['plan_s'] for p in points):.2f}",
        f"{max(p['difference'] for p in points):.0e}",
    ]  # fmt: skip


def falls(points: Sequence[Record]) -> bool:
    """Whether no smaller budget needs more memory than a larger one."""
    return all(b["temp"] <= a["temp"] for a, b in zip(points, points[1:], strict=False))


def _quarter(r: Record, _: Any) -> list[str]:
    return [
        r["program"], r["engine"], f"{r['graphs']} x h{r['hidden']}", str(r["parts"][1]), *map(text_of, r["temp"]),
        f"{r['temp'][1] / r['temp'][0]:.2f}", *(f"{ms:.4g}" for ms in r["ms"]), f"{100 * (r['time'] - 1):+.1f} %",
    ]  # fmt: skip


def _plans(r: Record, _: Any) -> list[str]:
    points, temps = r["points"], [p["temp"] for p in r["points"] if "parts" in p]
    sizes = text_of(temps[0]), text_of(temps[-1]), f"1/{temps[0] / temps[-1]:.0f}"
    again = " and ".join(text_of(p["temp"]) for p in points if "flops" in p) or "–"
    fit = f"{sum(p['temp'] <= p['budget'] for p in points)} of {len(points)}"
    most = str(max(p["compilations"] for p in points))
    return [r["program"], f"{r['samples']} x h{r['hidden']}", *sizes, again, fit, most, "yes" if r["refused"] else "no"]


def _echo(r: Record, records: list[Record]) -> list[str]:
    plain = next((p for p in records if (p["case"], p["variant"]) == (r["case"], "jax.grad") and "temp" in p), None)
    smaller, time = "", ""
    if plain:
        smaller, time = f"{plain['total'] / r['total']:.2f}x", f"{100 * (r['ms'] / plain['ms'] - 1):+.1f} %"
    peak = text_of(r["peak"]) if r.get("peak") else "–"
    guess = f"{r['predicted'] / r.get('compiled', r['temp']):.2f}" if r.get("predicted") else "–"
    sizes = text_of(r["temp"]), text_of(r["total"]), peak
    return [r["case"], r["variant"], *sizes, smaller, f"{r['ms']:.4g}", time, guess] if "temp" in r else []


def _steps(r: Record, _: Any) -> list[str]:
    values = (r.get(k) for k in ("budget", "temp", "arrays", "peak", "cap"))
    sizes = (text_of(value) if isinstance(value, int) else str(value or "–") for value in values)
    rate = f"{1e3 * r['samples'] / r['ms']:.0f}" if "samples" in r else "–"
    return [r["case"], r["variant"], str(r.get("samples", "–")), *sizes, str(r.get("parts", "–")), f"{r['ms']:.4g}", rate]


def _failed(records: list[Record]) -> str:
    lines = []
    for r in (r for r in records if "error" in r):
        name = " ".join(str(r[k]) for k in ("program", "engine", "case", "variant") if k in r)
        lines.append(f"- {name}: {r['error'].splitlines()[-1]}\n")
    return "\nNot measured:\n\n" + "".join(lines) if lines else ""


# For each part of the suite: its title, the columns, a function that returns a row of a record, and a note.
PARTS: dict[str, Any] = {
    "budgets": (
        "Budgets in geometric steps, from no budget to the floor",
        "program,engine,graphs,no budget,floor,share,fit,falls,compilations,ms,plan (CPU s),gradients differ".split(","),
        _budgets,
        BUDGETS,
    ),
    "quarter": (
        "A quarter of the memory, by parts alone (moDNN)",
        "program,engine,graphs,parts,whole,in parts,share,ms whole,ms in parts,time".split(","),
        _quarter,
        "",
    ),
    "plans": (
        "Other programs under budgets: graphs and arrays",
        "program,samples,whole,smallest,share,with recompute,fit,compilations,refused".split(","),
        _plans,
        PLANS,
    ),
    "echo": (
        "Echo's models, a whole training step",
        "model,variant,temporary,whole step,allocator's peak,smaller,ms,time,estimated / compiled".split(","),
        _echo,
        ECHO,
    ),
    "steps": (
        "Whole training steps: capped allocators, and large batches of images",
        "model,variant,samples,budget,temporary,arrays,allocator's peak,cap,parts,ms,samples a second".split(","),
        _steps,
        STEPS,
    ),
}
