"""What all engines share: dynamic tensors, the parts of F that run as one batch, and their cotangents."""
