"""The cases and systems of each suite: the grids of the papers' figures, and smaller ones for `--quick`."""

from bench.cases import Case
from bench.cells import TAGGERS, TREES
from bench.systems import SYSTEMS

BATCHES = (1, 16, 32, 64, 128, 256)
HIDDEN = (64, 128, 256, 512, 1024, 2048)
LEAVES = (32, 64, 128, 256, 512, 1024)
OF_CHAINS = ("torch_padded_graph", "torch_flashrnn")  # in suite `lstm` alone
PEERS = tuple(name for name in SYSTEMS if not name.startswith("cavs-") and name not in OF_CHAINS)
# On a CPU a table without these flatters: the strongest peer in batches, and the strongest for one graph at a time.
FAIR = ("torch_manual", "dynet")
# Each optimization off alone, on alone (as in the paper), all off, and the serial policy.
ABLATION = tuple(name for name in SYSTEMS if name == "cavs" or name.startswith("cavs-"))
# Suite `lstm`: the systems for long chains of equal length.
CHAINS = ("cavs", "torch_packed_lstm", "torch_packed_graph", "torch_padded_graph", "jax_cudnn_rnn", "torch_flashrnn")
# The data of the applications.
SHAPE = {
    "td_rnn": "sentences",
    "td_lstm": "sentences",
    "rvnn": "sst",
    "bilstm": "tagged",
    "char_bilstm": "spelled",
    "encoder_decoder": "pairs",
    "lattice_lstm": "characters",
    "dagnn": "netlist",
}
VPPS_HIDDEN = {"bilstm": 256, "char_bilstm": 256, "td_rnn": 512, "td_lstm": 256, "rvnn": 512}  # figure 12


def _case(cell: str, shape: str, hidden: int, batch: int, embed: int | None = None) -> Case:
    return Case(cell, shape, hidden, batch, embed or hidden)


def _cavs(quick: bool, device: str) -> list[Case]:
    """Cavs, figures 8 and 9, tables 1 and 2: models over batch and hidden size, Tree-FC over leaves."""
    if quick and device == "gpu":  # the most important cases come first: --minutes may end a run
        return [
            *(_case("tree_lstm", "sst", 512, b) for b in (64, 1, 16, 256)),
            *(_case("lstm", shape, 512, 64) for shape in ("fixed-64", "chains")),
            *(_case("tree_lstm", "sst", h, 64) for h in (256, 1024)),
            *(_case("tree_fc", "complete-256", 512, b) for b in (64, 16, 1)),
        ]
    if quick:
        return [
            *(_case("tree_lstm", "sst", h, b) for h in (64, 256) for b in (1, 16, 64, 256)),
            *(_case("tree_fc", "complete-256", 256, b) for b in (16, 64)),
            _case("lstm", "chains", 256, 64),
        ]
    models = (("lstm", "fixed-64"), ("lstm", "chains"), ("tree_fc", "complete-256"), ("tree_lstm", "sst"))
    grid = [_case(*m, 512, b) for m in models for b in BATCHES] + [_case(*m, h, 64) for m in models for h in HIDDEN]
    return grid + [_case("tree_fc", f"complete-{n}", 512, 64) for n in LEAVES]


def _vpps(quick: bool, device: str) -> list[Case]:
    """VPPS, figure 8 (Tree-LSTM over batch), 9 (over hidden and batch), 12 (its other applications over batch), at its sizes.

    Table I counts bytes of GPU memory, which timings cannot show.
    """
    batches = (2, 32) if quick else (1, 2, 4, 8, 16, 32, 64, 128)
    cases = [_case("tree_lstm", "sst", 256, b) for b in batches]
    cases += [_case("tree_lstm", "sst", h, b, 128) for h in ((128,) if quick else (128, 256, 384, 512)) for b in batches]
    small = quick and device == "cpu"
    return cases + [_case(cell, SHAPE[cell], 64 if small else h, b) for cell, h in VPPS_HIDDEN.items() for b in batches]


def _ablation(quick: bool, device: str) -> list[Case]:
    """Cavs, figure 10: Fixed-LSTM and Tree-LSTM over hidden, batch 64; and section 5.1's serial policy."""
    sizes = (64, 256) if quick else HIDDEN
    return [_case(*m, h, 64) for m in (("lstm", "fixed-64"), ("tree_lstm", "sst")) for h in sizes]


def _scaling(quick: bool, device: str) -> list[Case]:
    """Other shapes of graphs, and scaling with batch size and leaves."""
    h = 64 if quick else 256
    shapes = ("dependency", "lattice", "deep-300", "wide-128")
    cases = [_case("child_sum", s, h, b) for s in shapes for b in ((16,) if quick else (1, 16, 64))]
    return cases + [_case("tree_fc", f"complete-{n}", h, 16) for n in ((32, 256) if quick else LEAVES)]


def _applications(quick: bool, device: str) -> list[Case]:
    """The models of VPPS, section IV, Echo's encoder-decoder, a lattice LSTM and DAGNN, at batch size 1, 16 and 64."""
    return [_case(cell, shape, 64 if quick else 256, b) for cell, shape in SHAPE.items() for b in (1, 16, 64)]


def _lstm(quick: bool, device: str) -> list[Case]:
    """The LSTM against libraries specialised in it: chains of 64 words over hidden and batch size."""
    sizes = (256, 512, 1024) if device == "gpu" else (256,)
    return [_case("lstm", "fixed-64", h, b) for h in sizes for b in (64, 16, 1)]


def _sizes(quick: bool, device: str) -> list[Case]:
    """The Tree-LSTM over hidden and batch sizes, also odd ones; and the Tree-FC and the LSTM, with one chain of 5,000 words."""
    trees = [_case("tree_lstm", "sst", h, b) for h in (64, 96, 256, 384, 512) for b in (1, 10, 16, 40, 64, 256)]
    full = [_case("tree_fc", "complete-256", h, b) for h, b in ((64, 16), (256, 16), (256, 64))]
    chains = [_case("lstm", "chains", h, b) for h, b in ((64, 16), (64, 64), (256, 16), (256, 64))]
    return [*trees, *full, *chains, _case("lstm", "fixed-5000", 64, 1)]


def _grid(quick: bool, device: str) -> list[Case]:
    """Five models over hidden and batch sizes, chosen before they were measured, against the closest peers."""
    sizes = ((512, 16), (256, 64), (1024, 64), (512, 256), (2048, 16), (64, 16), (256, 1), (1024, 1), (64, 1024), (256, 256))
    models = (("tree_lstm", "sst"), ("tree_fc", "complete-64"), ("lstm", "fixed-64"), ("gru", "fixed-64"))
    return [_case(*m, h, b) for h, b in sizes for m in (*models, ("child_sum", "dependency"))]


def _mixtures(quick: bool, device: str) -> list[Case]:
    """VPPS's six applications at its sizes, and a lattice LSTM, against the closest peers over small and large batches."""
    hidden = VPPS_HIDDEN | {"lattice_lstm": 256}
    cases = []
    for b in (1, 32, 8, 128, 2):  # in this order, if there is time for a few only
        cases += [_case("tree_lstm", "sst", 256, b, 128), *(_case(cell, SHAPE[cell], h, b) for cell, h in hidden.items())]
    return cases


def _scheduling(quick: bool, device: str) -> list[Case]:
    """Every setting of the other suites, full and quick, with Cavs alone: scheduling's share of a step."""
    others = [suite for suite in SUITES.values() if suite is not _scheduling]
    return [c for suite in others for full in (False, True) for c in suite(full, device)]


# Cavs and the closest peers on a GPU. Quick runs of suite `cavs` time every system in the first case, and these in the others,
# because JAX compiles for a minute per case and system.
CLOSEST = {
    **dict.fromkeys(TREES, ("cavs", "torch_triton_graph")),
    "lstm": ("cavs", "torch_packed_graph", "jax_cudnn_rnn"),
    "gru": ("cavs", "torch_packed_graph"),
    "child_sum": ("cavs", "torch_edges"),
    **dict.fromkeys(TAGGERS, ("cavs", "torch_packed_bilstm")),
    **dict.fromkeys(("td_rnn", "td_lstm", "rvnn", "lattice_lstm"), ("cavs", "torch_applications")),
}

_ALL = (_cavs, _vpps, _ablation, _scaling, _applications, _lstm, _sizes, _grid, _mixtures, _scheduling)
SUITES = {suite.__name__[1:]: suite for suite in _ALL}


def cases_of(suite: str, quick: bool, device: str = "cpu") -> list[Case]:
    """Returns the distinct cases of a suite."""
    return list(dict.fromkeys(SUITES[suite](quick, device)))


def systems_of(suite: str, quick: bool, device: str = "cpu") -> tuple[str, ...]:
    """Returns the systems of a suite that a device supports, Cavs first."""
    if suite == "scheduling":
        return ("cavs",)
    if suite == "ablation":
        return tuple(n for n in ABLATION if not (quick and n.endswith("-alone")))
    return tuple(n for n in (CHAINS if suite == "lstm" else PEERS) if device in SYSTEMS[n].devices)


def left_out(suite: str, case: Case, name: str, quick: bool, device: str) -> str | None:
    """Returns why a quick run leaves a system out of a case, or None."""
    if suite in ("grid", "mixtures") and device == "gpu":
        return None if name in CLOSEST[case.cell] else "no run: slower than a peer that runs"
    if suite != "cavs" or not quick or device != "gpu":
        return None
    if name == "cavs_scan":
        return "compiles for minutes: not with --quick"
    if name == "cavs_persistent":
        return "no quick run: cavs chooses its engine, and the record says which"
    if case != _cavs(True, "gpu")[0] and name not in CLOSEST[case.cell]:
        return "no quick run of this case"
    return None
