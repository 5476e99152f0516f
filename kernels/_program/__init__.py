"""A level's program: what a kernel is asked to compute, whether it can, and how it is cut into phases."""
