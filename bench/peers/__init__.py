"""The benchmarks' peers: one file and one class per system. Code that several peers share is in separate files.

Every peer is a class with `__init__(cell, params, threads=2)`, `step(batch, lr) -> float`
and `params() -> dict` of NumPy arrays.

- `cell` is one of `bench.cells.CELLS`; `params` are float32 arrays of the shapes there, copied.
- A batch is a list of graphs, one dict of NumPy arrays each. A tree has `left` and `right`,
  (n,) child indices in post-order and -1 at leaves, `word`, (n,) and -1 at inner nodes, and
  `label`, the class of the root. A chain has `words` and `labels`, both (n,). For the rest see
  `bench.graphs`.
- `step` is one whole training step, and all of it is timed: levels from these arrays, forward,
  backward, and plain SGD on every parameter (in the embedding, only on the rows that the batch
  reads). It returns the loss before the update.
- Optional: `schedule(batch)`, only the preparation on the host, which is timed separately; `run(batches, lr)`, several steps
  in sequence; `device`, "cpu" or "gpu".
"""

import os


def torch_device(name):
    """PyTorch's name of a device of the bench; on a GPU float32 products run in TF32, unless the run asks for fp32."""
    import torch

    if name == "gpu":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision() != "fp32"
    return {"cpu": "cpu", "gpu": "cuda"}[name]


def precision():
    """Of the run, one of `bench.systems.PRECISIONS`; the runner says it to its workers."""
    return os.environ.get("BENCH_PRECISION", "")


def torch_dtype():
    """The dtype of a peer's weights and states: bf16 for all of them in a run in bf16, as after `model.to(torch.bfloat16)`."""
    import torch

    return torch.bfloat16 if precision() == "bf16" else torch.float32
