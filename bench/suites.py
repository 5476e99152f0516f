"""Which cases and systems a suite runs: the grids of the papers' figures, and smaller ones for `--quick`."""

from bench.cases import Case

BATCHES = (1, 16, 32, 64, 128, 256)
HIDDEN = (64, 128, 256, 512, 1024, 2048)
LEAVES = (32, 64, 128, 256, 512, 1024)
PEERS = (
    "cavs",
    "torch_levelled",
    "torch_compiled",
    "torch_manual",
    "torch_cuda_graph",
    "torch_packed_lstm",
    "torch_padded_lstm",
    "torch_edges",
    "dynet_like_depth",
    "dynet_like_agenda",
    "jax_scan",
    "jax_unrolled",
    "flax_rnn",
    "dgl",
    "dynet",
)
QUICK_PEERS = ("cavs", "torch_levelled", "torch_manual", "torch_packed_lstm", "torch_edges", "dynet_like_agenda", "jax_scan")
ABLATION = ("cavs", "cavs-no-fusion", "cavs-no-eager", "cavs-no-lazy", "cavs-none", "cavs-serial")


def _case(cell: str, shape: str, hidden: int, batch: int, embed: int | None = None) -> Case:
    return Case(cell, shape, hidden, batch, embed or hidden)


def _cavs(quick: bool) -> list[Case]:
    """Cavs, figure 8 (four models over batch and hidden), figure 9 and table 1 (Tree-FC over leaves; Tree-LSTM over batch)."""
    if quick:
        return [
            *(_case("tree_lstm", "sst", h, b) for h in (64, 256) for b in (1, 16, 64, 256)),
            *(_case("tree_fc", "complete-256", 256, b) for b in (16, 64)),
            _case("lstm", "chains", 256, 64),
        ]
    models = (("lstm", "fixed-64"), ("lstm", "chains"), ("tree_fc", "complete-256"), ("tree_lstm", "sst"))
    grid = [_case(*m, 512, b) for m in models for b in BATCHES] + [_case(*m, h, 64) for m in models for h in HIDDEN]
    return grid + [_case("tree_fc", f"complete-{n}", 512, 64) for n in LEAVES]


def _vpps(quick: bool) -> list[Case]:
    """VPPS, figure 8 (Tree-LSTM over batch), 9 (over hidden and batch), 12 (TD-RNN and TD-LSTM: pyramids over sentences).

    Table I counts bytes that a GPU loads from its memory, which no clock shows. BiLSTM, BiLSTMwChar and RvNN of figure 12
    are not here: no peer of this bench runs them.
    """
    batches = (2, 32) if quick else (1, 2, 4, 8, 16, 32, 64, 128)
    cases = [_case("tree_lstm", "sst", 256, b) for b in batches]
    cases += [_case("tree_lstm", "sst", h, b, 128) for h in ((128,) if quick else (128, 256, 384, 512)) for b in batches[::2]]
    cases += [_case("tree_fc", "pyramid", 64 if quick else 512, b) for b in batches[1::2]]
    return cases + [_case("tree_lstm", "pyramid", 64 if quick else 256, b) for b in batches[1::2]]


def _ablation(quick: bool) -> list[Case]:
    """Cavs, figure 10: Fixed-LSTM and Tree-LSTM over hidden, batch 64; and section 5.1's serial policy."""
    sizes = (64, 256) if quick else HIDDEN
    return [_case(*m, h, 64) for m in (("lstm", "fixed-64"), ("tree_lstm", "sst")) for h in sizes]


def _scaling(quick: bool) -> list[Case]:
    """Other shapes of graphs, and how time grows with batch and leaves."""
    h = 64 if quick else 256
    shapes = ("dependency", "lattice", "deep-300", "wide-128")
    cases = [_case("child_sum", s, h, b) for s in shapes for b in ((16,) if quick else (1, 16, 64))]
    return cases + [_case("tree_fc", f"complete-{n}", h, 16) for n in ((32, 256) if quick else LEAVES)]


SUITES = {"cavs": _cavs, "vpps": _vpps, "ablation": _ablation, "scaling": _scaling}


def cases_of(suite: str, quick: bool) -> list[Case]:
    """The cases of a suite, each once."""
    return list(dict.fromkeys(SUITES[suite](quick)))


def systems_of(suite: str, quick: bool) -> tuple[str, ...]:
    """The systems of a suite, ours first."""
    return ABLATION if suite == "ablation" else QUICK_PEERS if quick else PEERS
