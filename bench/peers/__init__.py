"""PyTorch peers of the benchmark: one system a file, one class a system.

Every peer is a class with `__init__(cell, params, threads=2)`, `step(batch, lr) -> float`
and `params() -> dict` of NumPy arrays.

- `cell` is "tree_lstm", "tree_fc" or "lstm"; `params` are float32 arrays, copied.
- A batch is a list of graphs, one dict of NumPy arrays each. A tree has `left` and `right`,
  (n,) child indices in post-order and -1 at leaves, `word`, (n,) and -1 at inner nodes, and
  `label`, the class of the root. A chain has `words` and `labels`, both (n,).
- `step` is one whole training step and the clock covers all of it: from these arrays to
  levels, forward, backward, plain SGD on every parameter (of the embedding only the rows
  that the batch reads). It returns the loss before the update.
- Optional: `schedule(batch)`, the host's preparation alone, which the bench times apart; `device`, "cpu" or "gpu".
"""


def torch_device(name):
    """PyTorch's name of a device of the bench; on a GPU products run in TF32, as JAX's do there."""
    import torch

    if name == "gpu":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    return {"cpu": "cpu", "gpu": "cuda"}[name]
