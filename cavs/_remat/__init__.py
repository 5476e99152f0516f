"""Recomputes values of any JAX function in its backward pass, within a memory budget (Echo)."""
