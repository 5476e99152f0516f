"""The program of a level: what a kernel computes for each vertex, whether it can, and the phases that it is cut into."""
