"""`run` and what belongs to it: the forward, its gradient, `readout`, `jit`, and `VertexFunction.explain`."""
