"""`run`, its forward and backward passes, `readout`, `concurrent_jit`, and `VertexFunction.explain`."""
