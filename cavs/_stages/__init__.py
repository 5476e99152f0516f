"""What every engine shares: tensors of all vertices, the parts of F that run in one batch, and the cotangents of both."""
