"""Debugging tools: the per-vertex interpreter that defines a run, comparisons with it, a search for NaN, and `cavs inspect`."""
