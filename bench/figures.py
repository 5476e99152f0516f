"""The papers' figures as SVG, beside the results: time per epoch, share of construction, ablation, scaling."""

import re
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402  (the backend must be chosen first)

from bench import cases  # noqa: E402
from bench.report import Records, median  # noqa: E402

# Equal results give equal bytes.
STYLE: Any = {"svg.hashsalt": "cavs", "svg.fonttype": "none", "font.size": 8, "axes.grid": True, "grid.alpha": 0.3}


def draw(found: Records, results: Path) -> list[Path]:
    """Draws every figure for which there are results, and returns the files."""
    written: list[Path] = []
    with plt.rc_context(STYLE):
        for device, records in found.items():
            suite_of = lambda r: "-".join([r["suite"], *([r["precision"]] if "precision" in r else [])])  # noqa: E731
            for suite in dict.fromkeys(map(suite_of, records)):
                mine = [r for r in records if suite_of(r) == suite]
                panels = _ablation_panels(mine) if suite == "ablation" else [] if suite == "scheduling" else _panels(mine)
                if panels:
                    written.append(save(_lines_figure(panels), results / device / f"{suite}.svg"))
                shares = [r for r in mine if len(_shares(r)) > 1]
                if shares:
                    written.append(save(_share_figure(shares), results / device / f"{suite}-construction.svg"))
    return written


def save(figure: Any, path: Path) -> Path:
    """Writes a figure and closes it."""
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)
    return path


def _panels(records: list[dict[str, Any]]) -> list[tuple[str, str, str, dict[str, list[tuple[float, float]]]]]:
    """Returns (title, x axis, y axis, lines): seconds per epoch against batch size, hidden size or leaves."""
    panels = []
    axes = {"batch": lambda c: c.batch, "hidden": lambda c: c.hidden, "leaves": _leaves}
    for axis, x_of in axes.items():
        groups: dict[str, list[tuple[cases.Case, dict[str, Any]]]] = {}
        for r in records:
            c = cases.parse(r["case"])
            fixed = {"batch": c.batch, "hidden": c.hidden, "embed": c.embed, "shape": c.shape}
            if axis == "leaves":
                fixed["shape"] = re.sub(r"\d+", "", c.shape)
            fixed.pop(axis, None)
            if axis == "hidden":
                fixed["embed"] = c.embed if c.embed != c.hidden else "hidden"
            groups.setdefault(f"{c.cell}, " + ", ".join(f"{k} {v}" for k, v in fixed.items() if k != "embed"), []).append(
                (c, r)
            )
        for title, members in groups.items():
            if len({x_of(c) for c, _ in members}) < 2:
                continue
            lines: dict[str, list[tuple[float, float]]] = {}
            for c, r in sorted(members, key=lambda m: x_of(m[0])):
                for name, s in r["systems"].items():
                    t = median(s)
                    if t is not None:
                        lines.setdefault(name, []).append((x_of(c), t * r["epoch"] / r["batch"]))
            panels.append((title, axis, f"seconds per epoch of {members[0][1]['epoch']}", lines))
    return panels


def _leaves(case: cases.Case) -> int:
    return int((re.findall(r"complete-(\d+)", case.shape) or [0])[0])


def _ablation_panels(records: list[dict[str, Any]]) -> list[tuple[str, str, str, dict[str, list[tuple[float, float]]]]]:
    """Returns the time without each optimization over the time with all, against hidden size (Cavs, figure 10)."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for r in sorted(records, key=lambda r: cases.parse(r["case"]).hidden):
        c, ours = cases.parse(r["case"]), median(r["systems"].get("cavs", {}))
        for name, s in r["systems"].items():
            t = median(s)
            if ours and t is not None and name != "cavs":
                line = panels.setdefault(f"{c.cell}, {c.shape}, batch {c.batch}", {}).setdefault(name, [])
                line.append((c.hidden, t / ours))
    return [(title, "hidden", "time relative to all optimizations", lines) for title, lines in panels.items()]


def _lines_figure(panels: list[tuple[str, str, str, dict[str, list[tuple[float, float]]]]]) -> Any:
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False)
    names = list(dict.fromkeys(n for *_, lines in panels for n in lines))
    colour = {n: f"C{i % 10}" for i, n in enumerate(names)}
    for ax, (title, x, y, lines) in zip(axes.flat, panels, strict=False):
        for name, points in lines.items():
            ours = name == "cavs"
            ax.plot(
                *zip(*points, strict=True), "o-", ms=3, lw=2 if ours else 1, color="k" if ours else colour[name], label=name
            )
        ax.set(title=title, xlabel=x, ylabel=y, xscale="log", yscale="log")
        ticks = sorted({p[0] for points in lines.values() for p in points})
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks], minor=False)
        ax.minorticks_off()
        ax.legend(fontsize=6)
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    figure.tight_layout()
    return figure


def _shares(record: dict[str, Any]) -> dict[str, float]:
    """Returns the percentage of a step that each system spends on scheduling or graph construction."""
    timed = {n: s for n, s in record["systems"].items() if s.get("schedule") and median(s)}
    return {n: 100 * statistics.median(s["schedule"]) / (median(s) or 1) for n, s in timed.items()}


def _share_figure(records: list[dict[str, Any]]) -> Any:
    """Draws the bars of Cavs, figure 9."""
    names = list(dict.fromkeys(n for r in records for n in _shares(r)))
    figure, ax = plt.subplots(figsize=(7, 0.5 + 0.14 * len(records) * (len(names) + 1)))
    for i, name in enumerate(names):
        at = [k * (len(names) + 1) + i for k in range(len(records))]
        ax.barh(at, [_shares(r).get(name, 0) for r in records], color="k" if name == "cavs" else f"C{i}", label=name)
    ax.set_yticks([k * (len(names) + 1) + (len(names) - 1) / 2 for k in range(len(records))], [r["case"] for r in records])
    ax.set(xlabel="graph construction and scheduling, % of a step")
    ax.invert_yaxis()
    ax.legend(fontsize=6)
    return figure
