"""`run`, its forward and backward passes, `readout`, `concurrent_jit`, and `cavs.explain`."""
