"""Which systems the bench knows: where each lives, what it needs, what it runs (also read by the older Python of DyNet)."""

import importlib
import importlib.util

TREES, ALL = ("tree_lstm", "tree_fc"), ("tree_lstm", "tree_fc", "lstm")
EVERY = (*ALL, "child_sum")


class System:
    """One row of the table below."""

    def __init__(self, module, cls, cells, needs, install, devices=("cpu", "gpu"), trees_only=False, widest=None, **options):
        self.module, self.cls, self.cells, self.needs, self.install = module, cls, cells, needs, install
        self.devices, self.trees_only, self.widest, self.options = devices, trees_only, widest, options

    def runs(self, case, device):
        """Why this system cannot run a case, or None."""
        if device not in self.devices:
            return "not on " + device
        if case.cell not in self.cells:
            return "no " + case.cell
        if self.trees_only and case.shape.split("-")[0] == "pyramid":
            return "trees only"
        if self.widest and case.batch > self.widest:
            return f"compiles for minutes beyond batch {self.widest}"
        return None

    def missing(self):
        """The modules that it needs and that this interpreter lacks."""
        return [m for m in self.needs if importlib.util.find_spec(m) is None]

    def make(self, case, params, threads, device):
        """The model, by the contract of `bench.peers`."""
        cls = getattr(importlib.import_module(self.module), self.cls)
        options = dict(self.options)
        if "gpu" in self.devices:
            options["device"] = device
        return cls(case.cell, params, threads=threads, **options)


def _ours(**options):
    return System("bench.ours", "Cavs", EVERY, ("jax",), "pip install -e .", **options)


def _torch(module, cls, cells=ALL, **options):
    return System("bench.peers." + module, cls, cells, ("torch",), "pip install torch", **options)


SYSTEMS = {
    "cavs": _ours(),
    "cavs-no-fusion": _ours(fusion=False),
    "cavs-no-eager": _ours(eager=False),
    "cavs-no-lazy": _ours(lazy=False),
    "cavs-none": _ours(fusion=False, eager=False, lazy=False),
    "cavs-serial": _ours(policy="serial"),
    "torch_levelled": _torch("torch_levelled", "TorchLevelled"),
    "torch_compiled": _torch("torch_compiled", "TorchCompiled", TREES, trees_only=True),
    "torch_manual": _torch("torch_manual", "TorchManual", trees_only=True),
    "torch_cuda_graph": _torch("torch_cuda_graph", "TorchCudaGraph", devices=("gpu",)),
    "torch_packed_lstm": _torch("torch_packed_lstm", "TorchPackedLSTM", ("lstm",)),
    "torch_padded_lstm": _torch("torch_packed_lstm", "TorchPackedLSTM", ("lstm",), padded=True),
    "torch_edges": _torch("torch_edges", "TorchEdges", ("child_sum",)),
    "dynet_like_depth": _torch("torch_dynet_like", "TorchDynetLike", policy="depth"),
    "dynet_like_agenda": _torch("torch_dynet_like", "TorchDynetLike", policy="agenda"),
    "jax_scan": System("bench.peers.jax_scan", "JaxScan", ALL, ("jax",), "pip install jax"),
    "jax_unrolled": System("bench.peers.jax_unrolled", "JaxUnrolled", ALL, ("jax",), "pip install jax", widest=16),
    "flax_rnn": System("bench.peers.flax_rnn", "FlaxRNN", ("lstm",), ("flax", "jax"), "pip install flax"),
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
        ALL,
        ("dynet",),
        "pip install dynet38 'numpy<1.25' (Python 3.8, in an environment of its own; then --python dynet=PATH)",
        devices=("cpu",),
    ),
}
