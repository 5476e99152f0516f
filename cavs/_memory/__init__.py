"""Computes batches in parts, and plans their number for a memory budget (moDNN)."""
