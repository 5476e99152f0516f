"""The vertex function: what a user writes, traced into equations for one vertex, rewritten, split and transposed."""
