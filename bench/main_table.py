"""The README's table, from committed results alone."""

from bench.report import BOUNDS, OURS, Records, engine_of, head, median, milliseconds, row

# The rows of the README's table, where there are results.
MAIN = (
    "tree_lstm/sst/h64/b1",
    "tree_lstm/sst/h64/b64",
    "tree_lstm/sst/h256/b1",
    "tree_lstm/sst/h256/b16",
    "tree_lstm/sst/h256/b64",
    "tree_lstm/sst/h256/b256",
    "tree_lstm/sst/h512/b1",
    "tree_lstm/sst/h512/b16",
    "tree_lstm/sst/h512/b64",
    "tree_fc/complete-256/h256/b64",
    "tree_fc/complete-256/h512/b64",
    "lstm/chains/h256/b64",
    "lstm/chains/h512/b64",
)
MARKS = ("<!-- bench:begin -->\n", "<!-- bench:end -->\n")


def main_table(found: Records) -> str:
    """What the README shows of suite `cavs`: ours, the fastest peer, and well-known ones, wherever we stand."""
    shown = ("torch_levelled", "dynet_like_agenda", "dynet", "dgl", "jax_scan")
    out = ""
    for device, records in found.items():
        of = {r["case"]: r["systems"] for r in records if r["suite"] == "cavs" and "precision" not in r}
        rows = [name for name in MAIN if any(median(of.get(name, {}).get(n, {})) is not None for n in OURS)]
        if not rows:
            continue
        columns = [n for n in shown if any(median(of[name].get(n, {})) is not None for name in rows)]
        bounded = any(median(of[name].get(n, {})) is not None for name in rows for n in BOUNDS)
        bound = ("bound: one structure in a CUDA graph",) if bounded else ()
        when = {r["case"]: r["date"] for r in records if r["suite"] == "cavs" and "precision" not in r}
        dates = sorted({when[name] for name in rows})
        measured = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        out += f"\n{device}, {measured}:\n\n" + head("a training step", "cavs, ms", "fastest peer", *columns, *bound)
        for name in rows:
            times = {n: t for n, s in of[name].items() if (t := median(s)) is not None}
            mine = min((n for n in OURS if n in times), key=lambda n: times[n])
            cell = lambda n, t=times, m=mine: f"{t[n] / t[m]:.2f}x" if n in t else "-"  # noqa: E731
            fastest = lambda names, t=times: min((n for n in names if n in t), key=lambda n: t[n], default=None)  # noqa: E731
            peer = fastest(n for n in times if n not in (*OURS, *BOUNDS))
            best = [fastest(BOUNDS)] if bounded else []
            named = [f"{n} {cell(n)}" if n else "-" for n in (peer, *best)]
            engine = " (persistent)" if engine_of(mine, of[name][mine]) == "persistent" else ""
            out += row(name, milliseconds(times[mine]) + engine, named[0], *map(cell, columns), *named[1:])
    return out + "\n" if out else ""


def with_main_table(readme: str, found: Records) -> str:
    """The README's text with the table between its marks made anew."""
    before, rest = readme.split(MARKS[0], 1)
    return before + MARKS[0] + main_table(found) + MARKS[1] + rest.split(MARKS[1], 1)[1]
