"""The tables and figures of suite `memory`: `MEMORY.md`, and an SVG for each device and kind of measurement."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cavs._remat.bytes import text_of

HEAD = """# Memory

`python -m bench report` generates this file from the JSON files next to it; do not edit it. Bytes are those of temporary memory
of the forward and the backward, as XLA assigns them, without parameters, gradients and inputs, unless a column says otherwise.
"""

Record = dict[str, Any]


def write(results: Path) -> list[Path]:
    """Writes the tables and figures of all devices, and returns the files."""
    found = {path.stem.removeprefix("memory-"): json.loads(path.read_text()) for path in sorted(results.glob("memory-*.json"))}
    if not found:
        return []
    tables = results / "MEMORY.md"
    tables.write_text("".join([HEAD, *(_of_device(name, data) for name, data in found.items())]))
    written = [tables]
    for name, data in found.items():
        written += _figures(data["records"], results / f"memory-{name}")
    return written


def _of_device(name: str, data: dict[str, Any]) -> str:
    records = data["records"]
    used = sorted({r["environment"] for r in records})
    made = [data["environments"][i] for i in used]
    commits = ", ".join(dict.fromkeys(e["commit"][:9] + (" (changed)" if e["changed"] else "") for e in made))
    versions = ", ".join(dict.fromkeys(v for e in made for v in [e["versions"]["cavs"].get("jax", "")] if v))
    text = f"\n## {name}\n\nCommit {commits}; JAX {versions}; {made[0]['cores']} cores.\n"
    kinds = (("budgets", _budgets), ("quarter", _quarters), ("scan", _scans), ("echo", _echo))
    for part, table in kinds:
        if mine := [r for r in records if r["part"] == part]:
            text += table(mine)
    return text


def _budgets(records: list[Record]) -> str:
    good = [r for r in records if "error" not in r]
    rows = []
    for r in good:
        points = r["points"]
        counts = [p["compilations"] for p in points if "compilations" in p]
        rows.append(
            (
                r["program"], r["engine"], f"{r['graphs']} x h{r['hidden']}", text_of(points[0]["temp"]),
                text_of(points[-1]["temp"]), f"1/{points[0]['temp'] / points[-1]['temp']:.0f}",
                f"{sum(p['temp'] <= p['budget'] for p in points)} of {len(points)}",
                "yes" if falls(points) else "no",
                f"{max(counts)}" if counts else "–",
                f"{points[0]['ms']:.4g} to {points[-1]['ms']:.4g}",
                f"{max(p['plan_s'] for p in points):.2f}",
                f"{max(p['difference'] for p in points):.0e}",
            )
        )  # fmt: skip
    head = (
        "program", "engine", "graphs", "no budget", "floor", "share", "fit", "falls", "compilations", "ms",
        "plan, CPU s", "gradients differ",
    )  # fmt: skip
    text = "\n### Budgets in geometric steps, from no budget to the floor\n\n" + _table(head, rows)
    return text + (
        '\n"Fit" counts the budgets that the compiled step keeps. "Falls": no smaller budget needs more memory. '
        '"Compilations": the most that one plan took. Gradients: the largest difference to those without a budget, relative to '
        "the largest element.\n" + _failed(records)
    )


def falls(points: Sequence[Record]) -> bool:
    """Whether no smaller budget needs more memory than a larger one."""
    return all(b["temp"] <= a["temp"] for a, b in zip(points, points[1:], strict=False))


def _quarters(records: list[Record]) -> str:
    rows = [
        (
            r["program"], r["engine"], f"{r['graphs']} x h{r['hidden']}", str(r["parts"][1]),
            *(text_of(b) for b in r["temp"]), f"{r['temp'][1] / r['temp'][0]:.2f}",
            *(f"{ms:.4g}" for ms in r["ms"]), f"{100 * (r['time'] - 1):+.1f} %",
        )
        for r in records
        if "time" in r
    ]  # fmt: skip
    head = ("program", "engine", "graphs", "parts", "whole", "in parts", "share", "ms whole", "ms in parts", "time")
    return "\n### A quarter of the memory, by parts alone (moDNN)\n\n" + _table(head, rows) + _failed(records)


def _scans(records: list[Record]) -> str:
    rows = []
    for r in (r for r in records if "plans" in r):
        scan = r["plans"][0]
        for p in r["plans"]:
            less, time = f"{scan['temp'] / p['temp']:.2f}x", f"{100 * (p['ms'] / scan['ms'] - 1):+.1f} %"
            sizes = f"{r['graphs']} x h{r['hidden']}", p["name"], text_of(p["temp"])
            rows.append((r["program"], r["engine"], *sizes, less, f"{p['ms']:.4g}", time, f"{p['difference']:.0e}"))
    head = ("program", "engine", "graphs", "plan", "temporary", "smaller", "ms", "time", "gradients differ")
    title = "\n### The same function in a plain `lax.scan` over levels, under `jax.grad`\n\n"
    return title + _table(head, rows) + _failed(records)


def _echo(records: list[Record]) -> str:
    rows = []
    for case in dict.fromkeys(r["case"] for r in records):
        mine = [r for r in records if r["case"] == case and "temp" in r]
        plain = next((r for r in mine if r["variant"] == "jax.grad"), None)
        for r in mine:
            smaller, time = "", ""
            if plain:
                smaller, time = f"{plain['total'] / r['total']:.2f}x", f"{100 * (r['ms'] / plain['ms'] - 1):+.1f} %"
            peak = text_of(r["peak"]) if r.get("peak") else "–"
            guess = f"{r['predicted'] / r.get('compiled', r['temp']):.2f}" if r.get("predicted") else "–"
            sizes = text_of(r["temp"]), text_of(r["total"]), peak
            rows.append((case, r["variant"], *sizes, smaller, f"{r['ms']:.4g}", time, guess))
    head = ("model", "variant", "temporary", "whole step", "allocator's peak", "smaller", "ms", "time", "estimated / compiled")
    text = "\n### Echo's models, a whole training step\n\n" + _table(head, rows)
    note = (
        '\n"Smaller" and "time" compare whole steps with `jax.grad`. Estimates, which order the plans that are compiled, are '
        "of the loss and its gradients, compared with these compiled alone.\n"
    )
    return text + note + _failed(records)


def _failed(records: list[Record]) -> str:
    lines = []
    for r in records:
        if "error" in r:
            name = " ".join(str(r[k]) for k in ("program", "engine", "case", "variant") if k in r)
            lines.append(f"- {name}: {r['error'].splitlines()[-1]}\n")
    return "\nNot measured:\n\n" + "".join(lines) if lines else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |\n" for row in (head, ["---"] * len(head), *rows)]
    return "".join(lines)


def _figures(records: list[Record], stem: Path) -> list[Path]:
    from bench.figures import STYLE, plt, save

    written = []
    with plt.rc_context(STYLE):
        curves = [r for r in records if r["part"] == "budgets" and "error" not in r]
        if curves:
            programs = list(dict.fromkeys(r["program"] for r in curves))
            figure, axes = plt.subplots(2, len(programs), figsize=(3 * len(programs), 5), squeeze=False, layout="constrained")
            for i, program in enumerate(programs):
                _curves(axes[:, i], program, [r for r in curves if r["program"] == program])
            written.append(save(figure, Path(f"{stem}-budgets.svg")))
        bars = [r for r in records if r["part"] == "echo" and "temp" in r]
        if bars:
            cases = list(dict.fromkeys(r["case"] for r in bars))
            figure, axes = plt.subplots(1, len(cases), figsize=(3.2 * len(cases), 3), squeeze=False, layout="constrained")
            for ax, case in zip(axes[0], cases, strict=True):
                _dots(ax, case, [r for r in bars if r["case"] == case])
            written.append(save(figure, Path(f"{stem}-echo.svg")))
    return written


def _curves(axes: Any, program: str, records: list[Record]) -> None:
    """Above measured bytes against the budget, below the time."""
    for n, r in enumerate(records):
        points, colour = r["points"], f"C{n}"
        budget = [p["budget"] / 2**20 for p in points]
        axes[0].plot(budget, [p["temp"] / 2**20 for p in points], "o-", color=colour, ms=3, label=r["engine"])
        axes[1].plot(budget, [p["ms"] / points[0]["ms"] for p in points], "o-", color=colour, ms=3, label=r["engine"])
    low, high = axes[0].get_xlim()
    axes[0].plot([max(low, 1e-3), high], [max(low, 1e-3), high], color="grey", lw=0.8)  # below it, a budget is kept
    axes[0].set(title=f"{program}, hidden {records[0]['hidden']}", ylabel="MiB", xscale="log", yscale="log")
    axes[1].set(xlabel="budget, MiB", ylabel="time of a step, no budget = 1", xscale="log", yscale="log")
    for ax in axes:
        ax.legend(fontsize=6)


def _dots(ax: Any, case: str, records: list[Record]) -> None:
    """Time against the memory of a whole step."""
    for n, r in enumerate(records):
        ax.plot(r["total"] / 2**20, r["ms"], "o", color=f"C{n}", label=r["variant"])
    ax.set(title=case, xlabel="whole step, MiB", ylabel="ms", xlim=(0, None), ylim=(0, None))
    ax.legend(fontsize=6)
