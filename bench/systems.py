"""The systems: where each is implemented, what it needs, and what it runs (also read under Python 3.8 for DyNet)."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from bench.cells import APPLICATIONS, BASIC, CELLS, RNNS, TAGGERS, TREES

PRECISIONS = ("fp32", "tf32", "bf16")  # of products; only fp32 on a CPU
DYNET_LIKE = (*BASIC, "td_rnn", "rvnn")
VPPS = ("td_rnn", "td_lstm", "rvnn", *TAGGERS)


@dataclasses.dataclass
class System:
    """One row of the table below. `options` are those of the class."""

    module: str
    cls: str
    cells: Sequence[str]
    needs: tuple[str, ...]
    install: str
    devices: tuple[str, ...] = ("cpu", "gpu")
    slow: bool = False  # to compile or to run, or slower than a sibling: quick runs time it at one size
    precisions: tuple[str, ...] = PRECISIONS[:2]  # PyTorch peers need code for bf16
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def compiles_long(self):
        """Returns whether it is prepared first on a GPU."""
        return bool({"jax", "flashrnn"} & set(self.needs))

    def runs(self, case, device, quick=False, precision=""):
        """Returns why this system cannot run a case, or None."""
        if device not in self.devices:
            return "not on " + device
        if precision and precision not in self.precisions:
            return "no " + precision
        if case.cell not in self.cells:
            return "no " + case.cell
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
        cls = getattr(importlib.import_module(self.module), self.cls)
        options = dict(self.options)
        if "gpu" in self.devices:
            options["device"] = device
        return cls(case.cell, params, threads=threads, **options)


def _jax(module, cls, cells, install, precisions=PRECISIONS, **more):
    return System(module, cls, cells, ("jax",), install, precisions=precisions, **more)  # JAX sets precisions globally


def _ours(cells=(*BASIC, "child_sum"), devices=("cpu", "gpu"), **options):
    return _jax("bench.ours", "Cavs", cells, "pip install -e .", devices=devices, options=options)


def _torch(module, cls, cells=BASIC, needs=("torch",), gpu=False, **more):
    devices = ("gpu",) if gpu else ("cpu", "gpu")
    return System("bench.peers." + module, cls, cells, needs, "pip install " + " ".join(needs), devices, **more)


def _cudnn(cls, gpu=False, padded=False, slow=False):
    """An LSTM or a GRU in PyTorch, over packed or padded sequences."""
    options = {"padded": True} if padded else {}
    return _torch("torch_packed_lstm", cls, RNNS, gpu=gpu, slow=slow, precisions=PRECISIONS, options=options)


def _triton(cls):
    return _torch("torch_triton", cls, TREES, ("torch", "triton"), gpu=True)


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
    "torch_manual": _torch("torch_manual", "TorchManual"),
    "torch_cuda_graph": _torch("torch_manual", "TorchCudaGraph", gpu=True),
    "torch_triton": _triton("TorchTriton"),
    "torch_triton_graph": _triton("TorchTritonCudaGraph"),
    "torch_packed_lstm": _cudnn("TorchPackedLSTM"),
    "torch_padded_lstm": _cudnn("TorchPackedLSTM", padded=True, slow=True),
    "torch_packed_graph": _cudnn("TorchPackedCudaGraph", gpu=True),
    "torch_padded_graph": _cudnn("TorchPackedCudaGraph", gpu=True, padded=True),
    "torch_flashrnn": _torch(
        "torch_flashrnn", "TorchFlashRNN", ("lstm",), ("torch", "flashrnn"), gpu=True, precisions=PRECISIONS[1:]
    ),
    "torch_applications": _torch("torch_levelled", "TorchLevelled", [c for c in APPLICATIONS if c not in TAGGERS]),
    "torch_packed_bilstm": _torch("torch_bilstm", "TorchBiLSTM", TAGGERS),
    "torch_loop_bilstm": _torch("torch_bilstm", "TorchBiLSTM", TAGGERS, options={"kind": "loop"}),
    "torch_edges": _torch("torch_levelled", "TorchLevelled", ("child_sum",)),
    "dynet_like_agenda": _torch("torch_dynet_like", "TorchDynetLike", DYNET_LIKE),
    "jax_scan": _jax("bench.peers.jax_scan", "JaxScan", BASIC, "pip install jax"),
    "jax_cudnn_rnn": _jax(
        "bench.peers.jax_cudnn_rnn", "JaxCudnnRNN", ("lstm",), "pip install 'jax[cuda13]'", PRECISIONS[:2], devices=("gpu",)
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
