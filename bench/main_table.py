"""The README's table, generated from committed results only."""

from typing import Any, TypeAlias

from bench.cases import Case, parse
from bench.machine import told_apart
from bench.report import BOUNDS, OURS, Records, best_rates, engine_of, head, median, milliseconds, row

# The rows of the README's table, by device. A case without results, or without a peer, has no row.
MAIN = {
    "cpu": (
        "tree_lstm/sst/h64/b1",
        "tree_lstm/sst/h64/b64",
        "tree_lstm/sst/h256/b1",
        "tree_lstm/sst/h256/b64",
        "tree_fc/complete-256/h256/b64",
        "lstm/chains/h256/b64",
    ),
    "gpu": (
        "tree_lstm/sst/h512/b1",
        "tree_lstm/sst/h512/b64",
        "tree_lstm/sst/h1024/b64",
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

Record: TypeAlias = dict[str, Any]


def main_table(found: Records) -> str:
    """Returns the table: Cavs and the fastest other system in each case, and the devices and dates under it."""
    rows, measured = "", []
    for device, records in found.items():
        kind = device.split("-")[0]
        of = {r["case"]: r for r in records if r["suite"] == "cavs" and "precision" not in r}
        shown = [(name, of[name]) for name in MAIN.get(kind, ()) if name in of and _has_peer(of[name])]
        rows += "".join(_row(parse(name), kind.upper(), record["systems"]) for name, record in shown)
        if shown:
            dates = sorted({record["date"] for _, record in shown})
            rates = best_rates([record for _, record in shown])
            unequal = f", {max(rates.values()) / min(rates.values()):.1f}x apart" if told_apart(rates) else ""
            each = ", ".join(f"{library} {rate / 1000:.3g}" for library, rate in rates.items()) + unequal
            speed = f"; rate of large products in TFLOP/s: {each}" if rates else ""
            measured.append(f"{kind.upper()}: `{device}`, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}{speed}.")
    if not rows:
        return ""
    return f"\n{head(*COLUMNS)}{rows}\n{' '.join(measured)}\n\n{NOTE if ' *' in rows else ''}\n".replace("\n\n\n", "\n\n")


def _times(systems: dict[str, Record]) -> dict[str, float]:
    return {n: t for n, s in systems.items() if (t := median(s)) is not None}


def _has_peer(record: Record) -> bool:
    """Whether Cavs and at least one other system have results."""
    times = _times(record["systems"])
    return any(n in times for n in OURS) and any(n not in OURS for n in times)


def _row(case: Case, device: str, systems: dict[str, Record]) -> str:
    times = _times(systems)
    mine = min((n for n in OURS if n in times), key=lambda n: times[n])
    other = min((n for n in times if n not in OURS), key=lambda n: times[n])
    model = f"{MODELS[case.cell]}, hidden size {case.hidden}, batch size {case.batch}"
    engine = " (persistent)" if engine_of(mine, systems[mine]) == "persistent" else ""
    peer = PEERS.get(other, f"{other}{' *' if other in BOUNDS else ''}")
    ratio = f"{times[other] / times[mine]:.2f}x"
    return row(model, device, milliseconds(times[mine]) + engine, peer, milliseconds(times[other]), ratio)


def with_main_table(readme: str, found: Records) -> str:
    """Returns the README's text with the table between its marks replaced."""
    before, rest = readme.split(MARKS[0], 1)
    return before + MARKS[0] + main_table(found) + MARKS[1] + rest.split(MARKS[1], 1)[1]
