"""The systems: where each is implemented, what it needs, and what it runs (also read under Python 3.8 for DyNet)."""

import importlib
import importlib.util

from bench.cells import APPLICATIONS, BASIC, CELLS, TAGGERS, TREES

PRECISIONS = ("fp32", "tf32", "bf16")  # of products; only fp32 on a CPU
DYNET_LIKE = (*BASIC, "td_rnn", "rvnn")
VPPS = ("td_rnn", "td_lstm", "rvnn", *TAGGERS)


class System:
    """One row of the table below."""

    def __init__(
        self,
        module,
        cls,
        cells,
        needs,
        install,
        devices=("cpu", "gpu"),
        trees_only=False,
        slow=False,
        elsewhere=(),
        precisions=None,
        **options,
    ):
        self.module, self.cls, self.cells, self.needs, self.install = module, cls, cells, needs, install
        self.devices, self.trees_only, self.options = devices, trees_only, options
        self.elsewhere = dict(elsewhere)  # cell -> other module and class
        self.slow = slow  # to compile or to run, or slower than a sibling: quick runs time it at one size
        # JAX sets the precision of products globally; PyTorch peers need code for bf16.
        self.precisions = precisions or (PRECISIONS if "jax" in needs else PRECISIONS[:2])
        self.compiles_long = bool({"jax", "flashrnn"} & set(needs))  # on a GPU it is prepared first

    def runs(self, case, device, quick=False, precision=""):
        """Returns why this system cannot run a case, or None."""
        if device not in self.devices:
            return "not on " + device
        if precision and precision not in self.precisions:
            return "no " + precision
        if case.cell not in self.cells:
            return "no " + case.cell
        if self.trees_only and case.shape.split("-")[0] == "pyramid":
            return "trees only"
        if self.slow and quick and (case.hidden, case.batch) != (256 if device == "cpu" else 512, 64):
            return "no quick run of this size"
        return None

    @property
    def library(self):
        """Returns the library whose matrix products this system runs."""
        return next((name for name in ("jax", "torch", "dynet") if name in self.needs), self.needs[-1])

    def missing(self):
        """Returns the required modules that this interpreter lacks."""
        return [m for m in self.needs if importlib.util.find_spec(m) is None]

    def make(self, case, params, threads, device):
        """Returns the model, under the contract of `bench.peers`."""
        module, cls = self.elsewhere.get(case.cell, (self.module, self.cls))
        cls = getattr(importlib.import_module(module), cls)
        options = dict(self.options)
        if "gpu" in self.devices:
            options["device"] = device
        return cls(case.cell, params, threads=threads, **options)


def _ours(cells=(*BASIC, "child_sum"), **options):
    return System("bench.ours", "Cavs", cells, ("jax",), "pip install -e .", **options)


def _torch(module, cls, cells=BASIC, needs=("torch",), **options):
    return System("bench.peers." + module, cls, cells, needs, "pip install " + " ".join(needs), **options)


SYSTEMS = {
    "cavs": _ours(CELLS),
    "cavs_scan": _ours(engine="scan"),
    "cavs_persistent": _ours(engine="persistent", devices=("gpu",)),
    "cavs-no-fusion": _ours(fusion=False),
    "cavs-no-eager": _ours(eager=False),
    "cavs-no-lazy": _ours(lazy=False),
    "cavs-none": _ours(fusion=False, eager=False, lazy=False),
    "cavs-fusion-alone": _ours(eager=False, lazy=False),
    "cavs-eager-alone": _ours(fusion=False, lazy=False),
    "cavs-lazy-alone": _ours(fusion=False, eager=False),
    "cavs-serial": _ours(policy="serial"),
    "torch_levelled": _torch("torch_levelled", "TorchLevelled"),
    "torch_manual": _torch("torch_manual", "TorchManual", trees_only=True),
    "torch_cuda_graph": _torch("torch_manual", "TorchCudaGraph", devices=("gpu",), trees_only=True),
    "torch_triton": _torch("torch_triton", "TorchTriton", TREES, ("torch", "triton"), devices=("gpu",), trees_only=True),
    "torch_triton_graph": _torch(
        "torch_triton", "TorchTritonCudaGraph", TREES, ("torch", "triton"), devices=("gpu",), trees_only=True
    ),
    "torch_packed_lstm": _torch("torch_packed_lstm", "TorchPackedLSTM", ("lstm",), precisions=PRECISIONS),
    "torch_padded_lstm": _torch(
        "torch_packed_lstm", "TorchPackedLSTM", ("lstm",), precisions=PRECISIONS, padded=True, slow=True
    ),
    "torch_packed_graph": _torch(
        "torch_packed_lstm", "TorchPackedCudaGraph", ("lstm",), precisions=PRECISIONS, devices=("gpu",)
    ),
    "torch_padded_graph": _torch(
        "torch_packed_lstm", "TorchPackedCudaGraph", ("lstm",), precisions=PRECISIONS, devices=("gpu",), padded=True
    ),
    "torch_flashrnn": _torch(
        "torch_flashrnn",
        "TorchFlashRNN",
        ("lstm",),
        ("torch", "flashrnn"),
        precisions=PRECISIONS[1:],
        devices=("gpu",),
    ),
    "torch_applications": _torch("torch_applications", "TorchApplication", [c for c in APPLICATIONS if c not in TAGGERS]),
    "torch_packed_bilstm": _torch("torch_bilstm", "TorchBiLSTM", TAGGERS),
    "torch_loop_bilstm": _torch("torch_bilstm", "TorchBiLSTM", TAGGERS, kind="loop"),
    "torch_edges": _torch("torch_applications", "TorchApplication", ("child_sum",)),
    "dynet_like_depth": _torch("torch_dynet_like", "TorchDynetLike", DYNET_LIKE, policy="depth", slow=True),
    "dynet_like_agenda": _torch("torch_dynet_like", "TorchDynetLike", DYNET_LIKE, policy="agenda"),
    "jax_scan": System("bench.peers.jax_scan", "JaxScan", BASIC, ("jax",), "pip install jax"),
    "jax_cudnn_rnn": System(
        "bench.peers.jax_cudnn_rnn",
        "JaxCudnnRNN",
        ("lstm",),
        ("jax",),
        "pip install 'jax[cuda13]'",
        devices=("gpu",),
        precisions=PRECISIONS[:2],
    ),
    "dgl": System(
        "bench.peers.dgl_topo",
        "DglTopo",
        ("tree_lstm", "child_sum"),
        ("dgl", "torch"),
        "pip install --no-deps dgl==1.1.3; pip install torch scipy networkx requests tqdm psutil",
        devices=("cpu",),
    ),
    "dynet": System(
        "bench.peers.dynet_autobatch",
        "DynetAutobatch",
        (*BASIC, *VPPS),
        ("dynet",),
        "pip install dynet38 'numpy<1.25' (Python 3.8, in an environment of its own; then --python dynet=PATH)",
        devices=("cpu",),
    ),
}
