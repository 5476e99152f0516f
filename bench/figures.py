"""The papers' figures as SVG, beside the results: time per epoch, share of construction, ablation, budgets of memory.

git ignores them: `python -m bench report` draws them again.
"""

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402  (the backend must be chosen first)

from bench import cases  # noqa: E402
from bench.store import Records, median  # noqa: E402

# Equal results give equal bytes.
STYLE: Any = {"svg.hashsalt": "cavs", "svg.fonttype": "none", "font.size": 8, "axes.grid": True, "grid.alpha": 0.3}
Lines = dict[str, list[tuple[float, float]]]
Panel = tuple[str, str, str, Lines]  # title, x axis, y axis, points by the name of their line


def draw(found: Records, results: Path) -> list[Path]:
    """Draws every figure for which there are results, and returns the files."""
    written: list[Path] = []
    for device, records in found.items():
        suite_of = lambda r: "-".join([r["suite"], *([r["precision"]] if "precision" in r else [])])  # noqa: E731
        for suite in dict.fromkeys(map(suite_of, records)):
            mine = [r for r in records if suite_of(r) == suite]
            panels = _ablation_panels(mine) if suite == "ablation" else [] if suite == "scheduling" else _panels(mine)
            shares = [r for r in mine if len(_shares(r)) > 1]
            written += _save(_lines_figure, panels, results / device / f"{suite}.svg")
            written += _save(_share_figure, shares, results / device / f"{suite}-construction.svg")
    return written


def draw_memory(records: list[dict[str, Any]], stem: Path) -> list[Path]:
    """Draws suite `memory` of one device: measured bytes and times under budgets, and Echo's models."""
    good, written = [r for r in records if "error" not in r], []
    panels: dict[tuple[str, str], Panel] = {}
    for r in (r for r in good if r["part"] == "budgets"):
        for axis, unit in (("temp", 2**20), ("ms", r["points"][0]["ms"])):
            name = {"temp": "MiB", "ms": "time of a step, no budget = 1"}[axis]
            panel = panels.setdefault((r["program"], axis), (r["program"], "budget, MiB", name, {}))
            panel[3][r["engine"]] = [(p["budget"] / 2**20, p[axis] / unit) for p in r["points"]]
    dots: dict[str, Panel] = {}
    for r in (r for r in good if r["part"] == "echo" and "temp" in r):
        dots.setdefault(r["case"], (r["case"], "whole step, MiB", "ms", {}))[3][r["variant"]] = [(r["total"] / 2**20, r["ms"])]
    for name, found in (("budgets", panels), ("echo", dots)):
        written += _save(_lines_figure, list(found.values()), Path(f"{stem}-{name}.svg"))
    return written


def _save(draw: Callable[[Any], Any], found: list[Any], path: Path) -> list[Path]:
    """Draws a figure of what was found, if there is anything, and returns its file."""
    if not found:
        return []
    with plt.rc_context(STYLE):
        figure = draw(found)
        figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
        plt.close(figure)
    return [path]


def _panels(records: list[dict[str, Any]]) -> list[Panel]:
    """Returns seconds per epoch against batch size, hidden size and leaves."""
    panels: dict[tuple[str, str], Panel] = {}
    for r in records:
        c = cases.parse(r["case"])
        leaves = int((re.findall(r"complete-(\d+)", c.shape) or [0])[0])
        for axis, x in {"batch": c.batch, "hidden": c.hidden, "leaves": leaves}.items():
            fixed: dict[str, Any] = {"batch": c.batch, "hidden": c.hidden, "shape": c.shape}
            fixed["shape"] = re.sub(r"\d+", "", c.shape) if axis == "leaves" else c.shape
            fixed.pop(axis, None)
            title = f"{c.cell}, " + ", ".join(f"{k} {v}" for k, v in fixed.items())
            embed = "hidden" if axis == "hidden" and c.embed == c.hidden else c.embed
            panel = panels.setdefault((title, f"{axis} {embed}"), (title, axis, f"seconds per epoch of {r['epoch']}", {}))
            for name, s in r["systems"].items():
                if (t := median(s)) is not None:
                    panel[3].setdefault(name, []).append((x, t * r["epoch"] / r["batch"]))
    return [p for p in panels.values() if len({x for points in p[3].values() for x, _ in points}) > 1]


def _ablation_panels(records: list[dict[str, Any]]) -> list[Panel]:
    """Returns the time without each optimization over the time with all, against hidden size (Cavs, figure 10)."""
    panels: dict[str, Panel] = {}
    for r in records:
        c, ours = cases.parse(r["case"]), median(r["systems"].get("cavs", {}))
        title = f"{c.cell}, {c.shape}, batch {c.batch}"
        panel = panels.setdefault(title, (title, "hidden", "time relative to all optimizations", {}))
        for name, s in r["systems"].items():
            if ours and name != "cavs" and (t := median(s)) is not None:
                panel[3].setdefault(name, []).append((c.hidden, t / ours))
    return list(panels.values())


def _lines_figure(panels: list[Panel]) -> Any:
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False, layout="constrained")
    names = list(dict.fromkeys(n for *_, lines in panels for n in lines))
    for ax, (title, x, y, lines) in zip(axes.flat, panels, strict=False):
        for name, points in lines.items():
            colour = "k" if name == "cavs" else f"C{names.index(name) % 10}"
            ax.plot(*zip(*sorted(points), strict=True), "o-", ms=3, lw=2 if name == "cavs" else 1, color=colour, label=name)
        ax.set(title=title, xlabel=x, ylabel=y, xscale="log", yscale="log")
        ax.legend(fontsize=6)
    for ax in axes.flat[len(panels) :]:
        ax.remove()
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
